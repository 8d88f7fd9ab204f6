"""From what arrived to what it means: the answers of an OpenAI server, their times, and the figures over many of them.

Figures and their names are those of `vllm bench serve`. It knows bodies and no sockets.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .load import Exchange


@dataclass(slots=True)
class Answer:
    """One request as its client saw it. Times in seconds.

    `times`: when each event with a choice arrived, counted from the request's start; empty where not streamed.
    `error`: why it failed, or None; a failed one has no other figures.
    """

    latency: float
    num_prompt: int = 0
    num_output: int = 0
    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def ttft(self) -> float:
        """Time to first token."""
        return self.times[0]

    @property
    def itls(self) -> list[float]:
        """Inter-token latencies: between events, which carry a token each."""
        return [after - before for before, after in itertools.pairwise(self.times)]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first."""
        return (self.latency - self.ttft) / (self.num_output - 1) if self.num_output > 1 else None


def read_answer(exchange: Exchange, num_prompt: int, *, is_stream: bool) -> Answer:
    """What the exchange says. `num_prompt`: tokens of the prompt, where the server does not tell."""
    answer = Answer(exchange.ended - exchange.started, num_prompt)
    if exchange.error is not None:
        answer.error = exchange.error
    elif exchange.status != 200:
        answer.error = f"status {exchange.status}: {_reason(exchange.body)}"
    else:
        try:
            if is_stream:
                _read_stream(exchange, answer)
            else:
                _read_reply(json.loads(exchange.body), answer)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            answer.error = f"not a reply of OpenAI's shape: {error!r:.200}"
    return answer


def _read_reply(reply: dict[str, Any], answer: Answer) -> None:
    choice = reply["choices"][0]
    answer.text = choice["text"] if "text" in choice else choice["message"]["content"] or ""
    _read_usage(reply["usage"], answer)


def _read_stream(exchange: Exchange, answer: Answer) -> None:
    texts, is_whole, has_usage = [], False, False
    for time, data in _events(exchange.pieces):
        if data == b"[DONE]":
            is_whole = True
            break
        event = json.loads(data)
        if "error" in event:
            answer.error = f"failed while it was streamed: {_reason(data)}"
            return
        if event.get("choices"):
            choice = event["choices"][0]
            answer.times.append(time - exchange.started)
            texts.append(choice["text"] if "text" in choice else choice["delta"].get("content") or "")
            is_whole = is_whole or choice.get("finish_reason") is not None
        if event.get("usage"):
            has_usage = True
            _read_usage(event["usage"], answer)
    answer.text = "".join(texts)
    if not has_usage:
        answer.num_output = len(answer.times)
    if not is_whole or not answer.times:
        answer.error = "the stream ended before the answer did"


def _events(pieces: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of server-sent events, with the time when the end of their line arrived."""
    rest = b""
    for time, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield time, line[5:].strip()


def _read_usage(usage: dict[str, Any], answer: Answer) -> None:
    answer.num_output = int(usage["completion_tokens"])
    answer.num_prompt = int(usage.get("prompt_tokens", answer.num_prompt))


def _reason(body: bytes) -> str:
    """The message of an error, or the beginning of whatever came instead."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace")
    return text[:200] or "no reason given"


def summarize(answers: Sequence[Answer], duration: float, *, is_stream: bool) -> dict[str, Any]:
    """The figures of one run of `duration` seconds, under the keys of `vllm bench serve`; `*_ms` in milliseconds."""
    good = [answer for answer in answers if answer.error is None]
    num_input, num_output = sum(a.num_prompt for a in good), sum(a.num_output for a in good)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(good) / duration,
        "output_throughput": num_output / duration,
        "total_token_throughput": (num_input + num_output) / duration,
        "input_lens": [answer.num_prompt for answer in answers],
        "output_lens": [answer.num_output for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }
    if is_stream:
        figures["ttfts"] = [answer.ttft if answer.error is None else 0.0 for answer in answers]
        figures["itls"] = [answer.itls if answer.error is None else [] for answer in answers]
        figures |= _spread("ttft", [answer.ttft for answer in good])
        figures |= _spread("tpot", [answer.tpot for answer in good if answer.tpot is not None])
        figures |= _spread("itl", [itl for answer in good for itl in answer.itls])
    return figures | _spread("e2el", [answer.latency for answer in good])


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    values = [1000 * second for second in seconds] or [0.0]
    return {
        f"mean_{name}_ms": statistics.fmean(values),
        f"median_{name}_ms": statistics.median(values),
        f"std_{name}_ms": statistics.pstdev(values),
        f"p99_{name}_ms": percentile(values, 99),
    }


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest of the sorted values, as NumPy's default is."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


_SECTIONS = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def result_block(figures: dict[str, Any]) -> str:
    """The block that `vllm bench serve` prints, and below it why requests failed."""
    lines = [f"{' Serving Benchmark Result ':=^50}"]

    def line(label: str, value: float | int | None) -> None:
        if value is not None:
            lines.append(
                f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
            )

    line("Successful requests:", figures["completed"])
    line("Failed requests:", figures["failed"])
    line("Maximum request concurrency:", figures["max_concurrency"])
    line("Request rate configured (RPS):", figures["request_rate"])
    line("Benchmark duration (s):", figures["duration"])
    line("Total input tokens:", figures["total_input_tokens"])
    line("Total generated tokens:", figures["total_output_tokens"])
    line("Request throughput (req/s):", figures["request_throughput"])
    line("Output token throughput (tok/s):", figures["output_throughput"])
    line("Total token throughput (tok/s):", figures["total_token_throughput"])
    for name, title in _SECTIONS.items():
        if f"mean_{name}_ms" in figures:
            lines.append(f"{title:-^50}")
            for kind, word in (("mean", "Mean"), ("median", "Median"), ("p99", "P99")):
                line(f"{word} {name.upper()} (ms):", figures[f"{kind}_{name}_ms"])
    lines.append("=" * 50)
    reasons = Counter(error for error in figures["errors"] if error)
    lines += [f"failed: {count} x {reason}" for reason, count in reasons.most_common()]
    return "\n".join(line.rstrip() for line in lines)
