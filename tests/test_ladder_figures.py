"""The ladder's figures: intervals that hold the truth, losses that add up, a guard against drift; what is printed."""

from __future__ import annotations

import json
import random
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_helpers import clear_environment, run_main

from cllm.bench import ladder
from cllm.bench.ladder.load import Load, Outcome, Timing
from cllm.bench.ladder.measure import Climb, climb
from cllm.bench.ladder.report import format_table, plot, report, sparkline
from cllm.bench.ladder.rig import Rung
from cllm.bench.ladder.targets import Target, judge, targets_for

LOAD = Load(num_prompts=10, input_len=4, output_len=10, concurrency=2)
# The time of a run of the whole load on each rung, in seconds.
TRUE_S = [1.0, 1.0, 1.02, 1.05, 1.05, 1.06, 1.061, 1.1, 1.25, 1.3]


def fake_climb(
    seconds: list[float], rounds: int, noise: float = 0.0, drift: Callable[[int], float] = lambda run: 1.0
) -> Climb:
    """Rungs that take `seconds`, each run with noise of its own and the drift of the machine at that time."""
    draw, runs = random.Random(1), 0

    def make(true: float) -> Callable[[], Outcome]:
        def run() -> Outcome:
            nonlocal runs
            runs += 1
            took = true * drift(runs) * draw.lognormvariate(0, noise)
            return Outcome(took, [Timing(took / 5, took / 50, 10) for _ in range(10)], [2.0, 2.0, 1.0])

        return run

    rungs = [Rung(number, f"rung {number}", make(true)) for number, true in enumerate(seconds)]
    return climb(rungs, LOAD, rounds, 0, warm_up=lambda rung: rung.run().occupancy)


def test_losses_are_exact_without_noise_and_add_up() -> None:
    found = fake_climb(TRUE_S, rounds=3)
    for index in range(1, 10):
        assert found.loss(index).value == pytest.approx(1 - 1 / TRUE_S[index])
        below = 1 / TRUE_S[index - 1] - 1 / TRUE_S[index]
        assert found.loss_below(index) == pytest.approx((below, below, below))
        assert found.microseconds(index, index - 1).value == pytest.approx(
            1e4 * (TRUE_S[index] - TRUE_S[index - 1])
        )
    total = sum(found.loss_below(index).value for index in range(1, 10))
    assert total == pytest.approx(found.loss(9).value)
    assert found.ratio(8, 0).value == pytest.approx(1 / 1.25)
    assert found.drift == pytest.approx(0)


def test_intervals_hold_the_truth_and_losses_still_add_up() -> None:
    found = fake_climb(TRUE_S, rounds=15, noise=0.01)
    held = 0
    for index in range(1, 10):
        true = 1 / TRUE_S[index - 1] - 1 / TRUE_S[index]
        value, low, high = found.loss_below(index)
        assert low <= value <= high
        assert high - low < 0.03
        held += low <= true <= high
    assert held >= 8  # of 9, at 95 %
    total = sum(found.loss_below(index).value for index in range(1, 10))
    assert total == pytest.approx(found.loss(9).value)


def test_pairs_take_out_what_a_round_has_in_common() -> None:
    slow_rounds = fake_climb(TRUE_S, rounds=8, drift=lambda run: 1.5 if run // 11 % 2 else 1.0)
    speeds = slow_rounds.speed(0)
    assert speeds.high > 1.2 * speeds.low
    assert slow_rounds.loss(8).value == pytest.approx(1 - 1 / 1.25, abs=0.02)


def test_drift_is_seen_and_hides_smaller_losses() -> None:
    found = fake_climb(TRUE_S, rounds=4, drift=lambda run: 1 + 0.002 * run)
    assert found.drift == pytest.approx(0.002 * 42 / (1 + 0.002 * 32), abs=0.005)
    rows = report(found, {}, [])["rungs"]
    assert rows[2]["loss_below"] is None  # 2 %
    assert rows[2]["us_per_token"] is None
    assert rows[8]["loss_below"]["value"] == pytest.approx(1 / 1.1 - 1 / 1.25, abs=0.02)


def test_the_guard_is_at_start_middle_and_end_and_each_round_has_its_own_order() -> None:
    for rounds in (1, 2, 5):
        runs: list[int] = []

        def make(number: int, runs: list[int] = runs) -> Rung:
            def run() -> Outcome:
                runs.append(number)
                return Outcome(1.0, [Timing(1.0, None, 1)])

            return Rung(number, str(number), run)

        told: list[str] = []
        climb([make(n) for n in range(4)], LOAD, rounds, 0, warm_up=lambda rung: [], tell=told.append)
        assert len(runs) == 4 * rounds + 3
        assert runs[0] == runs[-1] == 0
        middle = 1 + 2 * rounds
        assert runs[middle] == 0
        measured = runs[1:middle] + runs[middle + 1 : -1]
        orders = [tuple(measured[at : at + 4]) for at in range(0, len(measured), 4)]
        assert all(sorted(order) == [0, 1, 2, 3] for order in orders)
        assert rounds < 5 or len(set(orders)) > 2
        assert told[-1] == f"round {rounds} of {rounds}"


# --- targets ---


def test_targets_are_those_that_were_set() -> None:
    def found(backend: str, concurrency: int, is_gpu: bool = False) -> list[tuple[Any, ...]]:
        targets = targets_for(backend, concurrency, is_gpu=is_gpu)
        return [(target.rung, target.base, target.least) for target in targets]

    of_llm = [(8, 6, 0.97), (9, 6, 0.95)]
    assert found("llama", 8) == [(6, 0, 0.97), (8, 0, 0.95), (8, "llama-server", 1.0), *of_llm]
    assert found("kylin", 8) == [(8, 0, 0.93), (8, "llama-server", 2.5), *of_llm]
    assert found("llama", 1) == [(8, 0, 0.95), (8, "llama-server", 1.0)]
    assert found("kylin", 1) == [(8, 0, 0.95), (8, "llama-server", 2.5)]
    assert found("llama", 8, True) == [(6, "llama-batched-bench", 0.9)]
    assert found("llama", 64, True) == [(6, "llama-batched-bench", 0.8), (9, 6, 0.85)]
    assert found("mock", 8) == found("llama", 5) == found("llama", 32, True) == []


def test_judgement() -> None:
    found = fake_climb(TRUE_S, rounds=2)
    targets = [Target(8, 0, 0.79), Target(8, 0, 0.81), Target(9, 6, 0.8), Target(8, "llama-server", 1.0)]
    judged = judge(found, targets)
    assert [one["is_met"] for one in judged] == [True, False, True, None]
    assert judged[0]["ratio"] == pytest.approx({"value": 0.8, "low": 0.8, "high": 0.8})


# --- what is printed ---


def some_figures(**changes: Any) -> dict[str, Any]:
    found = fake_climb(TRUE_S, rounds=2)
    found.rungs.append(Rung(None, "llama-server", found.rungs[0].run))
    found.outcomes.append([found.rungs[0].run() for _ in range(2)])
    found.outcomes[9][0].timings[0] = Timing(0.1, None, 0, "status 503: busy")
    found.outcomes[8][0].timings[0].is_same = False
    found.occupancy.append([])
    about = {
        "backend": "llama",
        "model": "m.gguf",
        "description": "two threads",
        "load_text": str(LOAD),
        "rounds": 2,
    }
    return report(found, about | changes, [Target(8, 0, 0.95), Target(8, "other", 1.0)])


def test_the_table() -> None:
    text = format_table(some_figures())
    lines = text.splitlines()
    assert lines[:2] == ["llama m.gguf: two threads", "10 requests of 4 + 10 tokens, 2 at a time; 2 rounds"]
    assert lines[4].split()[:6] == ["0", "rung", "0", "100.0", "100.0..100.0", "200"]
    row = lines[12]
    assert row.startswith("8 rung 8 ")
    for piece in (" 80.0 ", " 10.9% ", " 20.0% ", " 1500.0 ", " 20/20 ", "██▅"):
        assert piece in row
    assert lines[13].count("19/20") == 1
    assert "x 1.000" in lines[14]
    assert "rung 0 drifted by 0.0% during the run" in text
    assert "rung 9: failed: status 503: busy" in text
    assert "rung 8: 0% of the answers equal those of the engine alone" in text
    assert "rung 8: 47-55" in text
    assert "52.6 tokens/s" in text
    assert "goal of 80 tokens/s: rung 8 has 80.0, reached" in text
    assert "goal of 80% of llama-bench: not measured (--llama-bench PATH)" in text
    assert "target: rung 8 / rung 0 at least 0.95: 0.800 (0.800..0.800), missed" in text
    assert "target: rung 8 / other at least 1.00: not measured" in text
    json.dumps(some_figures())


def test_on_the_mock_the_front_end_is_told_in_microseconds() -> None:
    text = format_table(some_figures(backend="mock"))
    assert "8 rung 8: 2500.0 microseconds a token above rung 0" in text
    assert "goal" not in text


def test_sparklines() -> None:
    assert sparkline([], 4) == ""
    assert sparkline([0, 2, 4], 4) == "▁▅█"
    assert len(sparkline(list(range(100)), 99)) == 16


@pytest.mark.parametrize(
    ("check", "is_met", "good", "status"),
    [
        ([], False, 2, 0),
        (["--check"], False, 2, 1),
        (["--check"], True, 2, 0),
        (["--check"], None, 2, 0),
        ([], True, 1, 1),
    ],
)
def test_exit_status(
    check: list[str],
    is_met: bool | None,
    good: int,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    clear_environment(monkeypatch)
    figures = {"rungs": [{"succeeded": good, "requests": 2}], "targets": [{"is_met": is_met}]}
    monkeypatch.setattr(ladder, "measure", lambda *args: figures)
    assert ladder.main(["--json", *check]) == status
    assert json.loads(capsys.readouterr().out) == figures


def test_a_plot_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = run_main(capsys, ladder.main, "--backend", "mock", "--plot", "x.png")
    assert done.status == 2
    assert "pip install 'cllm[plot]'" in done.error


def test_what_is_plotted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: dict[str, list[Any]] = {}

    class Recorder:
        def __init__(self, **settings: Any) -> None:
            pass

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *args, **settings: calls.setdefault(name, []).append((args, settings))

        def subplots(self, rows: int, columns: int) -> tuple[Recorder, Recorder]:
            return Recorder(), Recorder()

    monkeypatch.setitem(sys.modules, "matplotlib", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.SimpleNamespace(Figure=Recorder))
    plot(some_figures(), str(tmp_path / "ladder.png"))
    ((names, values), _), *_ = calls["barh"]
    assert names[8] == "8 rung 8"
    assert values[8] == pytest.approx(80)
    assert len(calls["plot"]) == 10  # the other program's batches are not seen
    assert calls["savefig"] == [((str(tmp_path / "ladder.png"),), {})]
