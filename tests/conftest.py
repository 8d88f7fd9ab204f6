"""Fixtures that several test files share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

from cllm.backends import mock
from cllm.backends.mock import MockScript

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The real SmolLM2-135M-Instruct; tests that use it carry the marker `model`."""
    path = Path(os.environ.get("CLLM_TEST_SMOLLM2", ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not path.exists():
        pytest.skip(f"{path} is missing: run tools/fetch_smollm2.py")
    return path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model(architecture, types)`: the path of a random two-layer model, made once a session."""
    folder, made = tmp_path_factory.mktemp("tiny"), {}

    def make(architecture: str = "qwen3", types: str = "q4_k_m") -> Path:
        key = (architecture, types)
        if key not in made:
            made[key] = write_tiny_model(folder / f"{architecture}-{types}.gguf", architecture, types)
        return made[key]

    return make


@pytest.fixture(params=[False, True], ids=["at once", "launches early"])
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MockScript:
    """What the mock of each `LLM` made in the test does; it may be changed while it runs."""
    script = MockScript(launches_early=request.param)
    load = mock.load_mock
    monkeypatch.setattr(mock, "load_mock", lambda config: load(config, script))
    return script
