"""What was measured, for people and for programs: the table, the JSON object, the plot."""

from __future__ import annotations

import importlib
import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from ...errors import CLLMError, ConfigError
from ..answers import percentile
from .load import Timing
from .measure import Climb, Estimate
from .targets import (
    GOAL_OF_LLAMA_BENCH,
    GOAL_TOKENS_PER_S,
    GPU_RUN,
    LLAMA_BENCH,
    ONE_AT_A_TIME,
    PREDECESSOR,
    Target,
    index_of,
    judge,
)

_BARS = "▁▂▃▄▅▆▇█"
_SPARKS = 16  # characters


def report(climb: Climb, about: dict[str, Any], targets: list[Target]) -> dict[str, Any]:
    """All figures as one JSON object. Losses are shares of rung 0's speed, times in seconds but for `*_us` and `*_ms`.

    A loss smaller than the drift is None: it was not measured. `us_per_token` is the same loss as time.
    """
    return {
        **about,
        "load": {name: getattr(climb.load, name) for name in climb.load.__slots__},
        "drift": climb.drift,
        "drift_us": climb.drift_us,
        "guard": climb.guard,
        "rungs": [_row(climb, index) for index in range(len(climb.rungs))],
        "targets": judge(climb, targets),
        "goals": _goals(climb),
        "predecessor": {"gpu_run": GPU_RUN, "one_at_a_time": ONE_AT_A_TIME},
    }


def _row(climb: Climb, index: int) -> dict[str, Any]:
    rung, speed = climb.rungs[index], climb.speed(index)
    timings = [timing for outcome in climb.outcomes[index] for timing in outcome.timings]
    is_above = rung.number is not None and index > 0
    occupancy = climb.occupancy[index]
    row: dict[str, Any] = {
        "rung": rung.number,
        "name": rung.name,
        "tokens_per_s": _as_json(speed),
        "loss_below": _unless(climb.drift, climb.loss_below(index)) if is_above else None,
        "loss": _unless(climb.drift, climb.loss(index)) if is_above else None,
        "us_per_token": _unless(climb.drift_us, climb.microseconds(index, index - 1)) if is_above else None,
        "us_above_rung_0": _unless(climb.drift_us, climb.microseconds(index, 0)) if is_above else None,
        "ratio_to_rung_0": None if index == 0 else _as_json(climb.ratio(index, 0)),
        "samples": climb.speeds(index).tolist(),
        **_latencies(timings),
        "requests": len(timings),
        "succeeded": sum(outcome.num_good(climb.load) for outcome in climb.outcomes[index]),
        "errors": sorted({timing.error for timing in timings if timing.error})[:5],
        "same_answers": _share([t.is_same for t in timings if t.is_same is not None]),
        "occupancy": statistics.fmean(occupancy) / climb.load.concurrency if occupancy else None,
        "occupancy_over_time": occupancy,
        "predecessor": None if rung.number is None else PREDECESSOR.get(rung.number),
    }
    return row


def _latencies(timings: Sequence[Timing]) -> dict[str, float | None]:
    good = [timing for timing in timings if timing.error is None]
    firsts = [timing.ttft for timing in good if timing.ttft is not None]
    return {
        "mean_latency_ms": 1000 * statistics.fmean(t.latency for t in good) if good else None,
        "p99_latency_ms": 1000 * percentile([t.latency for t in good], 99) if good else None,
        "mean_ttft_ms": 1000 * statistics.fmean(firsts) if firsts else None,
    }


def _share(values: list[bool]) -> float | None:
    return sum(values) / len(values) if values else None


def _as_json(estimate: Estimate) -> dict[str, float]:
    return estimate._asdict()


def _unless(drift: float, estimate: Estimate) -> dict[str, float] | None:
    return None if abs(estimate.value) < drift else _as_json(estimate)


def _goals(climb: Climb) -> list[dict[str, Any]]:
    """The predecessor's two goals, for the highest rung measured without streaming."""
    rung, bench = index_of(climb, 8), index_of(climb, LLAMA_BENCH)
    speed = None if rung is None else climb.speed(rung).value
    ratio = None if rung is None or bench is None else climb.ratio(rung, bench).value
    goals = (("tokens_per_s", GOAL_TOKENS_PER_S, speed), ("of_llama_bench", GOAL_OF_LLAMA_BENCH, ratio))
    return [{"goal": name, "least": least, "found": found} for name, least, found in goals]


# --- the table ---

_HEAD = (
    f"{'rung':26}{'tokens/s':>9} {'95 % interval':>17}{'loss':>15}{'of rung 0':>15}{'us/token':>9}"
    f"{'latency ms':>11}{'p99':>8}{'ttft':>8}{'done':>9}  batch"
)


def format_table(figures: dict[str, Any]) -> str:
    """A line a rung, and below them the drift, the predecessor, goals and targets."""
    lines = [f"{figures['backend']} {figures['model']}: {figures['description']}"]
    lines.append(f"{figures['load_text']}; {figures['rounds']} rounds")
    lines += ["", _HEAD]
    lines += [_line(row, figures) for row in figures["rungs"]]
    lines += ["", f"rung 0 drifted by {figures['drift']:.1%} during the run: no smaller loss is told"]
    if figures["backend"] == "mock":
        lines += _front_end_lines(figures)
    for row in figures["rungs"]:
        if row["same_answers"] not in (None, 1.0):
            lines.append(
                f"{row['name']}: {row['same_answers']:.0%} of the answers equal those of the engine alone"
            )
        lines += [f"{row['name']}: failed: {error}" for error in row["errors"]]
    lines += ["", "the predecessor, in tokens/s:"]
    lines += [f"  rung {number}: {text}" for number, text in PREDECESSOR.items()]
    lines += [f"  {ONE_AT_A_TIME}", f"  {GPU_RUN}", ""]
    if figures["backend"] != "mock":
        lines += _goal_lines(figures) + _target_lines(figures)
    return "\n".join(line.rstrip() for line in lines)


def _line(row: dict[str, Any], figures: dict[str, Any]) -> str:
    speed, drift, drift_us = row["tokens_per_s"], figures["drift"], figures["drift_us"]
    below = above = micros = ""
    if row["rung"] is None:
        above = f"x {row['ratio_to_rung_0']['value']:.3f}"
    elif row["rung"]:
        below, above = (_loss(row[key], drift) for key in ("loss_below", "loss"))
        time = row["us_per_token"]
        micros = f"< {drift_us:.1f}" if time is None else f"{time['value']:.1f}"
    interval = f"{speed['low']:.1f}..{speed['high']:.1f}"
    times = [_ms(row[key]) for key in ("mean_latency_ms", "p99_latency_ms", "mean_ttft_ms")]
    done = f"{row['succeeded']}/{row['requests']}"
    batch = sparkline(row["occupancy_over_time"], figures["load"]["concurrency"])
    return (
        f"{_name(row):26}{speed['value']:9.1f} {interval:>17}{below:>15}{above:>15}{micros:>9}"
        f"{times[0]:>11}{times[1]:>8}{times[2]:>8}{done:>9}  {batch}"
    )


def _name(row: dict[str, Any]) -> str:
    return str(row["name"]) if row["rung"] is None else f"{row['rung']} {row['name']}"


def _loss(loss: dict[str, float] | None, drift: float) -> str:
    return f"< drift {drift:.1%}" if loss is None else f"{loss['value']:.1%}"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def sparkline(values: Sequence[float], full: float) -> str:
    """The values over time as a line of bars, `full` the tallest; the mean of those that share a bar."""
    if not values:
        return ""
    count = min(_SPARKS, len(values))
    cuts = [len(values) * at // count for at in range(count + 1)]
    means = [statistics.fmean(values[start:end]) for start, end in itertools.pairwise(cuts)]
    return "".join(_BARS[min(len(_BARS) - 1, int(mean / full * (len(_BARS) - 1) + 0.5))] for mean in means)


def _front_end_lines(figures: dict[str, Any]) -> list[str]:
    """What everything above the backend costs, where the backend costs next to nothing."""
    rows = [row for row in figures["rungs"] if row["us_above_rung_0"] is not None]
    return [
        f"{_name(row)}: {row['us_above_rung_0']['value']:.1f} microseconds a token above rung 0"
        for row in rows[-2:]
    ]


def _goal_lines(figures: dict[str, Any]) -> list[str]:
    speed, share = figures["goals"]
    lines = []
    if speed["found"] is not None:
        verdict = "reached" if speed["found"] >= speed["least"] else "not reached"
        lines.append(f"goal of {speed['least']:.0f} tokens/s: rung 8 has {speed['found']:.1f}, {verdict}")
    if share["found"] is None:
        lines.append(f"goal of {share['least']:.0%} of llama-bench: not measured (--llama-bench PATH)")
    else:
        verdict = "reached" if share["found"] >= share["least"] else "not reached"
        lines.append(
            f"goal of {share['least']:.0%} of llama-bench: rung 8 has {share['found']:.0%}, {verdict}"
        )
    return lines


def _target_lines(figures: dict[str, Any]) -> list[str]:
    lines = []
    for target in figures["targets"]:
        base = target["base"] if isinstance(target["base"], str) else f"rung {target['base']}"
        verdict = {True: "met", False: "missed", None: "not measured"}[target["is_met"]]
        ratio = target["ratio"]
        found = "" if ratio is None else f"{ratio['value']:.3f} ({ratio['low']:.3f}..{ratio['high']:.3f}), "
        lines.append(
            f"target: rung {target['rung']} / {base} at least {target['least']:.2f}: {found}{verdict}"
        )
    return lines


# --- the plot ---


def load_plotting() -> Any:
    """matplotlib's `figure` module. Raises `ConfigError` where it is missing."""
    try:
        return importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(f"argument --plot needs matplotlib ({error}): pip install 'cllm[plot]'") from None


def plot(figures: dict[str, Any], path: str) -> None:
    """Speeds with their intervals, and below them the occupancy over time, into an image file.

    Raises `CLLMError` where it cannot be written.
    """
    rows, concurrency = figures["rungs"], figures["load"]["concurrency"]
    figure = load_plotting().Figure(figsize=(11, 7), layout="constrained")
    speeds, batches = figure.subplots(2, 1)
    names = [_name(row) for row in rows]
    values = [row["tokens_per_s"]["value"] for row in rows]
    errors = [
        [abs(row["tokens_per_s"][end] - row["tokens_per_s"]["value"]) for row in rows]
        for end in ("low", "high")
    ]
    colours = ["tab:gray" if row["rung"] is None else "tab:blue" for row in rows]
    speeds.barh(names, values, xerr=errors, color=colours)
    speeds.invert_yaxis()
    speeds.set_xlabel("output tokens/s")
    speeds.set_title(f"{figures['backend']}: {figures['load_text']}")
    for name, row in zip(names, rows, strict=True):
        series = row["occupancy_over_time"]
        if series:
            batches.plot([at / len(series) for at in range(len(series))], series, label=name)
    batches.set_xlabel("share of the run")
    batches.set_ylabel("sequences in a step")
    batches.set_ylim(0, concurrency * 1.1)
    batches.legend(fontsize="x-small", ncols=3)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise CLLMError(f"cannot write the plot to {path}: {error}") from None
