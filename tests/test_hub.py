"""Names of models: what each stands for, and downloads from a local server that speaks the hub's routes."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from command_helpers import clear_environment, run
from hub_server import STORE, HubServer
from huggingface_hub import constants, file_download

from cllm import LLM, ConfigError, ModelFileError, SamplingParams
from cllm.hub import cached_models, cached_path, is_hub_name, model_path, part_paths, pull

REPO = "unsloth/Qwen3-0.6B-GGUF"
FILES = {
    "README.md": b"# Qwen3",
    "Qwen3-0.6B-Q4_K_M.gguf": b"four bits",
    "Qwen3-0.6B-UD-Q4_K_XL.gguf": b"four bits, dynamic",
    "Qwen3-0.6B-Q8_0.gguf": b"eight bits",
    "BF16/Qwen3-0.6B-BF16-00001-of-00002.gguf": b"sixteen bits, ",
    "BF16/Qwen3-0.6B-BF16-00002-of-00002.gguf": b"the rest",
    "mmproj-F16.gguf": b"a projector",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A server with `REPO`, and an empty cache, as HF_ENDPOINT and HF_HOME would set them at the start."""
    with HubServer() as server:
        server.add(REPO, FILES)
        use_hub(monkeypatch, server.url, tmp_path / "cache")
        yield server


def use_hub(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("NO_PROXY", "*")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))
    huggingface_hub.close_session()  # its client keeps the proxies of its making


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def failure(name: str, act: Callable[[str], str] = model_path) -> str:
    """The message of the error that `name` ends in: one line, with the name first."""
    with pytest.raises(ModelFileError) as error:
        act(name)
    assert str(error.value).startswith(f"{name}: ")
    assert "\n" not in str(error.value)
    return str(error.value)


# --- Names --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (REPO, True),
        (f"{REPO}:Q4_K_M", True),
        (f"{REPO}:Qwen3-0.6B-Q4_K_M.gguf", True),
        ("folder/model.gguf", False),
        ("model", False),
        ("a/b/c", False),
        ("/a/b", False),
        ("../b", False),
        ("./b", False),
        ("~/b", False),
        ("a/b:", False),
        ("a/b:c:d", False),
        ("a/b c", False),
        ("a/b\n", False),
        ("", False),
    ],
)
def test_form_of_a_name(name: str, expected: bool) -> None:
    assert is_hub_name(name) == expected


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf", "a/b/c", "a\0b", "user/repo.gguf"])
def test_what_is_no_name_is_told_what_names_are(hub: HubServer, name: str) -> None:
    message = failure(name)
    assert "no such file; a model is demo, the path of a .gguf file or USER/REPO[:QUANT]" in message
    assert not hub.seen


def test_demo_is_the_model_in_the_package() -> None:
    assert read(model_path("demo"))[:4] == b"GGUF"


def test_a_local_file_wins_over_a_name(
    monkeypatch: pytest.MonkeyPatch, hub: HubServer, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unsloth").mkdir()
    Path(REPO).write_bytes(b"local")
    assert model_path(REPO) == cached_path(REPO) == REPO
    assert not hub.seen


def test_pull_takes_names_of_the_hub_only(hub: HubServer) -> None:
    with pytest.raises(ConfigError, match=r"expected USER/REPO\[:QUANT\], as .*; found 'demo'"):
        pull("demo")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("a/m.gguf", ["a/m.gguf"]),
        ("a/m-00002-of-00002.gguf", ["a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf"]),
    ],
)
def test_parts_of_a_file(path: str, expected: list[str]) -> None:
    assert part_paths(path) == expected


# --- Choosing a file ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quant", "file"),
    [
        ("", "Qwen3-0.6B-Q4_K_M.gguf"),
        (":Q8_0", "Qwen3-0.6B-Q8_0.gguf"),
        (":q8_0", "Qwen3-0.6B-Q8_0.gguf"),
        (":UD-Q4_K_XL", "Qwen3-0.6B-UD-Q4_K_XL.gguf"),
        (":Q4_K_XL", "Qwen3-0.6B-UD-Q4_K_XL.gguf"),
        (":Qwen3-0.6B-Q8_0", "Qwen3-0.6B-Q8_0.gguf"),
        (":Qwen3-0.6B-Q8_0.gguf", "Qwen3-0.6B-Q8_0.gguf"),
    ],
)
def test_a_quantisation_names_a_file(hub: HubServer, quant: str, file: str) -> None:
    path = model_path(REPO + quant)
    assert Path(path).name == file
    assert read(path) == FILES[file]


@pytest.mark.parametrize(
    ("files", "quant", "expected"),
    [
        (["model.Q4_K_M.gguf", "model.Q5_K_M.gguf"], "", "model.Q4_K_M.gguf"),  # dots instead of hyphens
        (["qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct-fp16.gguf"], ":FP16", "-fp16.gguf"),
        (["m-Q8_0.gguf"], "", "m-Q8_0.gguf"),  # the only one
        (["m.gguf"], "", "m.gguf"),
        (["m-IQ4_NL.gguf", "m-Q4_K_M.GGUF"], "", "m-Q4_K_M.GGUF"),
        (["m-UD-Q4_K_M.gguf", "m-Q4_K_M.gguf"], "", "/m-Q4_K_M.gguf"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], ":b-Q4_0", "b-Q4_0.gguf"),
    ],
)
def test_spellings_in_other_repositories(hub: HubServer, files: list[str], quant: str, expected: str) -> None:
    hub.add("a/b", {file: file.encode() for file in files})
    assert model_path("a/b" + quant).endswith(expected)


@pytest.mark.parametrize(
    ("files", "quant", "expected"),
    [
        (
            list(FILES),
            ":Q3_K_M",
            "there is no Q3_K_M; choose one of BF16, Q4_K_M, Q8_0, UD-Q4_K_XL, as a/b:BF16",
        ),
        (list(FILES), ":4_K_M", "there is no 4_K_M"),  # a part of a word names nothing
        (["m-Q8_0.gguf", "m-F16.gguf"], "", "there is no Q4_K_M; choose one of F16, Q8_0, as a/b:F16"),
        (["m-Q8_0.gguf"], ":Q4_K_M", "there is no Q4_K_M; choose one of Q8_0, as a/b:Q8_0"),
        (
            ["a-Q4_0.gguf", "b-Q4_0.gguf", "c-Q8_0.gguf"],
            ":Q4_0",
            "2 models are Q4_0; choose one of a-Q4_0, b-Q4_0, as a/b:a-Q4_0",
        ),
        (["model.safetensors"], "", "holds no complete GGUF model"),
        ([], "", "holds no complete GGUF model"),
        (["m-Q4_0-00001-of-00003.gguf", "m-Q4_0-00003-of-00003.gguf"], "", "holds no complete GGUF model"),
    ],
)
def test_what_cannot_be_chosen_is_told_what_there_is(
    hub: HubServer, files: list[str], quant: str, expected: str
) -> None:
    hub.add("a/b", dict.fromkeys(files, b"x"))
    assert expected in failure("a/b" + quant)


def test_all_parts_of_a_split_file_are_fetched(hub: HubServer) -> None:
    first = model_path(f"{REPO}:BF16")
    assert b"".join(map(read, part_paths(first))) == b"sixteen bits, the rest"
    (Path(first).parent / "Qwen3-0.6B-BF16-00002-of-00002.gguf").unlink()
    assert [model.name for model in cached_models()] == []  # a part alone is no model


# --- The cache ----------------------------------------------------------------------------------------------


def test_what_is_cached_is_used_without_asking(hub: HubServer) -> None:
    first = model_path(REPO)
    hub.seen.clear()
    assert model_path(REPO) == model_path(f"{REPO}:q4_k_m") == cached_path(REPO) == first
    assert not hub.seen


def test_cached_models_have_names_and_sizes(hub: HubServer) -> None:
    assert cached_models() == []
    paths = {quant: pull(f"{REPO}:{quant}") for quant in ("BF16", "Q8_0")}
    hub.add("a/b", {"m.gguf": b"x"})
    paths["m"] = pull("a/b")
    assert [(model.name, model.path, model.size) for model in cached_models()] == [
        ("a/b:m", paths["m"], 1),
        (f"{REPO}:BF16", paths["BF16"], len(b"sixteen bits, the rest")),
        (f"{REPO}:Q8_0", paths["Q8_0"], len(b"eight bits")),
    ]


def test_pull_looks_for_a_newer_version_and_keeps_the_old_one(hub: HubServer) -> None:
    model_path(f"{REPO}:Q8_0")
    old = model_path(REPO)
    hub.add(REPO, FILES | {"Qwen3-0.6B-Q4_K_M.gguf": b"better four bits"})
    assert model_path(REPO) == old
    new = pull(REPO)
    assert read(new) == b"better four bits"
    assert model_path(REPO) == new
    assert read(cached_path(f"{REPO}:Q8_0")) == b"eight bits"  # of the older version
    hub.seen.clear()
    assert pull(REPO) == new
    assert hub.ranges() == []  # nothing is fetched twice


def test_what_is_not_here_yet_is_said(hub: HubServer) -> None:
    pull(f"{REPO}:Q8_0")
    hub.seen.clear()
    message = failure(REPO, cached_path)
    assert (
        f"fetch it with cllm models pull {REPO}, or name a model that is here (demo, {REPO}:Q8_0)" in message
    )
    assert not hub.seen


# --- The connection -----------------------------------------------------------------------------------------


def test_a_large_file_arrives_whole_over_a_broken_connection(hub: HubServer) -> None:
    data = np.random.default_rng(0).bytes(25_000_000)  # more than two of the library's pieces
    hub.add("a/b", {"m-Q4_K_M.gguf": data})
    hub.cuts = [11_000_000]
    assert read(model_path("a/b")) == data
    whole, rest = hub.ranges()
    assert whole is None
    assert rest is not None
    assert (
        0 < int(rest.removeprefix("bytes=").rstrip("-")) <= 11_000_000
    )  # it goes on, not from the beginning


def test_a_connection_that_keeps_breaking(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    hub.cuts = [0] * 100
    assert f"cannot fetch this from {hub.url}: " in (message := failure(REPO))
    assert "try again, or name a model that is here (demo) or the path of a .gguf file" in message
    assert cached_models() == []
    hub.cuts = []
    assert read(model_path(REPO)) == b"four bits"


def test_the_token_goes_to_the_hub_only(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    hub.add("a/private", {"m-Q4_K_M.gguf": b"secret"}, token="hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert read(model_path("a/private")) == b"secret"
    tokens = {(request.host == STORE, request.token) for request in hub.seen}
    assert tokens == {(False, "hf_right"), (True, None)}


@pytest.mark.parametrize(
    ("options", "token", "expected"),
    [
        (
            {"token": "hf_right"},
            None,
            "no such repository at {url}/a/b; check the name, and for a private one set",
        ),
        (
            {"token": "hf_right"},
            "hf_wrong",
            "{url} refuses the token; set HF_TOKEN to a valid one, or unset it",
        ),
        (
            {"token": "hf_right", "is_gated": True},
            "hf_wrong",
            "gated; accept its terms at {url}/a/b and set HF_TOKEN",
        ),
        ({"error": 404}, None, "cannot fetch this from {url}: "),
        ({"error": 500}, None, "cannot fetch this from {url}: "),
    ],
)
def test_refusals(
    monkeypatch: pytest.MonkeyPatch,
    hub: HubServer,
    capfd: pytest.CaptureFixture[str],
    options: dict[str, object],
    token: str | None,
    expected: str,
) -> None:
    hub.add("a/b", {"m-Q4_K_M.gguf": b"x"}, **options)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    assert expected.format(url=hub.url) in failure("a/b")
    assert capfd.readouterr() == ("", "")


def test_a_repository_that_does_not_exist(hub: HubServer) -> None:
    assert f"no such file, and no such repository at {hub.url}/a/b" in failure("a/b")
    assert "Cannot have -- or .." in failure("a/b..c")


def test_offline(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    path = pull(f"{REPO}:Q8_0")
    hub.seen.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert model_path(f"{REPO}:Q8_0") == path
    message = failure(REPO)
    assert (
        "HF_HUB_OFFLINE is set; name a model that is here (demo, unsloth/Qwen3-0.6B-GGUF:Q8_0) or the"
        in message
    )
    assert not hub.seen


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with HubServer() as server:
        url = server.url
    use_hub(monkeypatch, url, tmp_path)  # nobody listens there any more
    message = failure(REPO)
    assert f"cannot fetch this from {url}: ConnectError: " in message
    assert "name a model that is here (demo) or the path of a .gguf file" in message


# --- From the front doors -----------------------------------------------------------------------------------


def test_llm_takes_a_name(hub: HubServer, tiny_model: Callable[..., Path]) -> None:
    hub.add("a/b", {"m-Q4_K_M.gguf": tiny_model().read_bytes()})
    params = SamplingParams(temperature=0, max_tokens=2)
    with LLM("a/b:Q4_K_M", kernels="numpy") as fetched, LLM(str(tiny_model()), kernels="numpy") as local:
        assert fetched.generate("ab", params)[0].outputs == local.generate("ab", params)[0].outputs


@pytest.mark.parametrize("flag", ["-m", "-hf"])
def test_commands_take_a_name(
    hub: HubServer, tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    hub.add("a/b", {"m-Q4_K_M.gguf": tiny_model().read_bytes()})
    done = run(capsys, flag, "a/b", "--kernels", "numpy", "-n", "2", "ab")
    assert (done.status, len(done.out) > 1) == (0, True), done.err
    done = run(capsys, flag, "a/c", "prompt")
    assert (done.status, done.out) == (1, "")
    assert "a/c: no such file, and no such repository" in done.error


def test_a_progress_bar_on_a_terminal(tmp_path: Path) -> None:
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with HubServer() as server:
        server.add("a/b", {"m-Q4_K_M.gguf": bytes(1000)})
        done = models(server, tmp_path, "pull", "a/b", stderr=theirs)
    os.close(theirs)
    shown = os.read(terminal, 10_000).decode()
    os.close(terminal)
    assert done.returncode == 0
    assert "m-Q4_K_M.gguf" in shown
    assert "100%" in shown


def test_the_hubs_environment_variables_hold(tmp_path: Path) -> None:
    with HubServer() as server:
        server.add("a/private", {"m-Q4_K_M.gguf": b"secret"}, token="hf_right")
        fetched = models(server, tmp_path, "pull", "a/private", HF_TOKEN="hf_right")
        offline = models(server, tmp_path, "pull", "a/private", HF_HUB_OFFLINE="1")
    assert fetched.stderr == ""  # no bar where no terminal is
    path = fetched.stdout.strip()
    assert Path(path).is_relative_to(tmp_path / "hub")
    assert read(path) == b"secret"
    assert (offline.returncode, offline.stdout) == (1, "")
    assert "HF_HUB_OFFLINE is set; name a model that is here (demo, a/private:Q4_K_M)" in offline.stderr
    assert offline.stderr.count("\n") == 1


def models(
    server: HubServer, home: Path, *argv: str, stderr: int = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    """`cllm models ARGV` as a process that knows the server and its cache by environment variables."""
    command = [sys.executable, "-m", "cllm.models", *argv]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "CLLM_"))}
    environment |= {"HF_ENDPOINT": server.url, "HF_HOME": str(home), "NO_PROXY": "*"} | variables
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)
