"""`cllm serve` as a process: it comes up, says where, ends on signals, and refuses what cannot work."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from command_helpers import clear_environment
from server_helpers import CLIENT, until

import cllm.server
from cllm.cli import run_command
from cllm.serve import _listen, main

# `cllm serve` on a mock that needs 10 ms a token and never ends; with LOAD it takes so many seconds to load.
PROGRAM = """
import sys, time
from cllm.backends import mock
from cllm.backends.mock import MockScript
from cllm.cli import run_command
from cllm.serve import main
load, script = mock.load_mock, MockScript(delay=0.01, tokens={n: 97 for n in range(5000)})
def slow(config):
    time.sleep(LOAD)
    return load(config, script)
mock.load_mock = slow
run_command(main, sys.argv[1:])
"""


class Process:
    """A running `cllm serve`."""

    def __init__(self, *argv: str, load: float = 0) -> None:
        self.lines: list[str] = []
        command = [sys.executable, "-c", PROGRAM.replace("LOAD", str(load)), "--backend", "mock", *argv]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    def url(self) -> str:
        until(lambda: any("http://" in line for line in self.lines) or self.process.poll() is not None)
        found = re.search(r"http://[\d.]+:\d+", "".join(self.lines))
        assert found, self.lines
        return found[0]

    def wait(self) -> int:
        try:
            return self.process.wait(30)
        finally:
            self.process.kill()
            self._reader.join()
            assert self.process.stderr is not None
            self.process.stderr.close()


@contextlib.contextmanager
def serving(*argv: str, load: float = 0) -> Iterator[Process]:
    running = Process("--port", "0", *argv, load=load)
    try:
        yield running
    finally:
        running.process.kill()
        running.wait()


BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 3000, "stream": True, "temperature": 0}


def stream(url: str, found: list[str], **changes: Any) -> threading.Thread:
    """Reads a stream in a thread until it ends."""

    def read() -> None:
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | changes, **CLIENT) as reply:
            found.extend(line for line in reply.iter_lines() if line)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: found)
    return thread


def test_sigterm_lets_answers_end() -> None:
    with serving() as server:
        found: list[str] = []
        reader = stream(server.url(), found, max_tokens=100)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        reader.join(30)
    assert json.loads(found[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert found[-1] == "data: [DONE]"
    assert len(server.lines) == 1  # where it served, and nothing else


def test_sigterm_ends_what_takes_too_long() -> None:
    with serving("--drain-seconds", "1") as server:
        url, found = server.url(), list[str]()
        reader = stream(url, found)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health", **CLIENT)
        assert server.wait() == 0
        assert 0.9 < time.monotonic() - started < 20
        reader.join(30)
    assert json.loads(found[-2][6:])["choices"][0]["finish_reason"] == "abort"


def test_ctrl_c() -> None:
    with serving("--drain-seconds", "0") as server:
        found: list[str] = []
        reader = stream(server.url(), found)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 130
        reader.join(30)
    assert found[-1] == "data: [DONE]"


def test_health_while_loading_and_sigterm_then() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with serving("--port", str(port), load=20) as server:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                reply = httpx.get(f"{url}/health", **CLIENT)
                assert (reply.status_code, reply.json()["status"]) == (503, "loading")
                return True
            return False

        until(answers)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0
        assert time.monotonic() - started < 10


def test_settings_reach_the_server() -> None:
    with serving("--api-key", "sesame", "--max-body", "50", "-c", "256", "--enable-benchmark") as server:
        url = server.url()
        assert httpx.get(f"{url}/v1/models", **CLIENT).status_code == 401
        headers = {"authorization": "Bearer sesame"}
        assert httpx.get(f"{url}/model/info", headers=headers, **CLIENT).json()["context_length"] == 256
        long = httpx.post(f"{url}/v1/completions", headers=headers, json={"prompt": "x" * 60}, **CLIENT)
        assert long.status_code == 413
        reply = httpx.post(f"{url}/benchmark", headers=headers, json={"num_requests": 1}, **CLIENT)
        assert reply.status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--port", "x"], "argument --port: invalid int value"),
        (["--port", "99999"], "argument --port: expected a number from 0 to 65535, found 99999"),
        (["--host", "nowhere.invalid"], "cannot listen at nowhere.invalid"),
        (["--max-body", "0"], "--max-body: expected a number of bytes"),
        (["--drain-seconds", "-1"], "--drain-seconds: expected at least 0"),
        (["--api-key", ""], "--api-key: expected printable ASCII"),
        (["--prot", "1"], "unrecognized arguments: --prot"),
        (["-c", "0"], "argument -c/--ctx-size: context_length should be"),
    ],
)
def test_what_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str], words: str
) -> None:
    clear_environment(monkeypatch)
    status, line = refused(capsys, "--backend", "mock", *argv)
    assert status == 2
    assert words in line


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as exit:
        run_command(main, list(argv))
    found = capsys.readouterr().err
    assert found.startswith("error: ")
    assert found.count("\n") == 1
    return exit.value.code, found


def test_a_port_in_use(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as other:
        status, line = refused(capsys, "--backend", "mock", "--port", str(other.getsockname()[1]))
    assert status == 2
    assert "choose another --host or --port" in line


def test_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setenv("CLLM_PORT", "many")
    status, line = refused(capsys, "--backend", "mock")
    assert status == 2
    assert "invalid int value: 'many'" in line


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"no model")
    with serving("-m", str(tmp_path / "bad.gguf")) as server:
        assert server.wait() == 1
    assert len(server.lines) == 1
    assert "bad.gguf" in server.lines[0]


def test_without_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setattr(cllm, "server", cllm.server)  # the package that is imported below must not stay
    for name in [name for name in sys.modules if name.startswith("cllm.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "starlette", None)  # what Python then says of an import
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    status, line = refused(capsys, "--backend", "mock", "--port", "0")
    assert status == 2
    assert "pip install 'cllm[server]'" in line


def test_the_package_loads_without_the_extra() -> None:
    code = "import sys, cllm, cllm.serve; print([m for m in ('starlette', 'uvicorn', 'msgspec') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_small_writes_are_sent_at_once() -> None:
    with _listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert client.fileno() >= 0
