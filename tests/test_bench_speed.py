"""The speed benchmark's own code: what it runs, what it counts, what it prints. No time is asserted."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from cllm.backends.mock import MockBackend, load_mock
from cllm.bench import main, speed
from cllm.bench.ceilings import Ceiling, Ceilings
from cllm.config import EngineConfig
from cllm.errors import ConfigError


@pytest.fixture
def backend() -> MockBackend:
    return load_mock(
        EngineConfig(backend="mock", max_num_seqs=16, context_length=700, max_num_batched_tokens=64)
    )[0]


def test_a_runner_computes_what_the_test_says(backend: MockBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[int, int]] = []
    launch = backend.launch

    def counted(batch: Any) -> Any:
        batches.append((len(batch.token_ids), len(batch.logit_rows)))
        return launch(batch)

    monkeypatch.setattr(backend, "launch", counted)
    runner = speed.Runner(backend)
    assert runner.run(speed.Test("pp100", 100, False)) > 0
    assert batches == [(64, 1), (36, 1)]
    batches.clear()
    runner.run(speed.Test("tg3 x4", 3, True, batch=4))
    assert batches == [(4, 4)] * 3
    runner.clear()
    batches.clear()
    runner.run(speed.Test("tg2 @ d100", 2, True, depth=100))
    assert batches == [(64, 1), (36, 1), (1, 1), (1, 1)]
    batches.clear()
    runner.run(speed.Test("tg2 @ d100", 2, True, depth=100))  # what lies before it is still there
    assert batches == [(1, 1), (1, 1)]
    runner.clear()
    assert not any(backend.histories)


def test_tests_fit_the_context() -> None:
    assert [test.name for test in speed.make_tests(600)][-1] == "tg64 @ d512"
    assert "tg64 @ d4096" in [test.name for test in speed.make_tests(4224)]
    assert set(speed.TARGETS) <= {test.name for test in speed.make_tests(4224)}


class FixedCeilings:
    def measure(self) -> Ceiling:
        return Ceiling(1.0, 1.0)


@pytest.mark.parametrize("seconds", [0.0, 0.1])
def test_a_short_test_takes_more_rounds(backend: MockBackend, seconds: float) -> None:
    result = speed.Result(speed.Test("pp8", 8, False), {"kylin": [], "llama": []})
    runner = speed.Runner(backend)
    runners = {"kylin": runner, "llama": runner}
    for number in (1, 2):
        speed._alternate(result, runners, 2, seconds, FixedCeilings())  # type: ignore[arg-type]
        count = len(result.ceilings)
        assert count == 2 * number if seconds == 0.0 else count > 2 * number
        assert {len(samples) for samples in result.samples.values()} == {count}


def test_tests_take_turns(backend: MockBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "TEST_S", 0.0)
    ran: list[str] = []

    class Watched(speed.Runner):
        def run(self, test: speed.Test) -> float:
            ran.append(test.name)
            return 1.0

    tests = [speed.Test("a", 8, False), speed.Test("b", 8, True), speed.Test("deep", 8, True, depth=16)]
    results = [speed.Result(test, {"kylin": []}) for test in tests]
    speed._take_turns(results, {"kylin": Watched(backend)}, 3, FixedCeilings())  # type: ignore[arg-type]
    # A round that is not counted, and one that is; of the deep one all three at once.
    assert "".join(ran) == "aabb" + 4 * "deep" + "aabb" + "aabb"
    assert [len(result.ceilings) for result in results] == [3, 3, 3]


def fake_results(ratio: float, read_gb_s: float) -> list[speed.Result]:
    return [
        speed.Result(
            test,
            {"kylin": [ratio * 10, ratio * 20, ratio * 30], "llama": [10.0, 20.0, 30.0]},
            [Ceiling(read, 100.0) for read in (2 * read_gb_s, read_gb_s, read_gb_s)],
        )
        for test in speed.make_tests(1024)
    ]


@pytest.mark.parametrize(("ratio", "read_gb_s", "status"), [(5.0, 1e-3, 0), (1.0, 1e-3, 1), (5.0, 1e3, 1)])
def test_check_and_json(
    ratio: float,
    read_gb_s: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(speed, "measure", lambda configs, rounds, ceilings: fake_results(ratio, read_gb_s))
    monkeypatch.setattr(speed, "Ceilings", lambda num_threads: None)
    assert main(["speed", "--json", "--check"]) == status
    figures = json.loads(capsys.readouterr().out)
    row = figures["rows"][0]
    assert (row["test"], row["backend"], row["ratio"], row["t/s"]) == ("pp128", "kylin", ratio, ratio * 20)
    assert main(["speed"]) == 0
    assert "pp128" in capsys.readouterr().out


def test_phases_that_took_no_time_have_a_column(tiny_model: Any) -> None:
    result = speed.Result(speed.Test("tg64", 64, True), phase_cycles=Counter(qkv=3, output=1))
    result.samples, result.ceilings = {"kylin": [1.0]}, [Ceiling(1.0, 1.0)]
    figures = speed.report([result], str(tiny_model()), 2)
    assert list(figures["phases"]["tg64"].values()) == [0, 0.75, 0, 0, 0, 0, 0, 0.25]
    assert speed.format_table(figures).splitlines()[-1].split() == ["tg64", "0%", "75%", *["0%"] * 5, "25%"]


def test_ceilings_are_measured() -> None:
    assert min(Ceilings(2, num_bytes=1 << 22).measure(rounds=1)) > 0


@pytest.mark.parametrize(
    "argv", [[], ["nothing"], ["speed", "--backends", "llama"], ["speed", "--backends", "kylin,x"]]
)
def test_wrong_command_lines(argv: list[str]) -> None:
    with pytest.raises(ConfigError):
        main(argv)
