"""What two engines' logits for the same tokens say of each other: statistics, limits, and a table for people.

It owns the numbers and their words. It must not know how logits come about: it sees rows of them, and names.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .config import EngineConfig
from .errors import ConfigError

Floats = NDArray[np.float32]

NEAR_TIE = 0.5  # two best logits closer than this may change places by rounding alone


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two engines: how it was configured, and what it says of itself."""

    config: EngineConfig
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyDifference:
    """Where the greedy answers to one prompt part. Pairs are (first side, second side)."""

    prompt: int  # index
    position: int  # tokens of the answer that agree
    context: str  # the end of the text before
    token_ids: tuple[int, int]
    tokens: tuple[str, str]
    first_logits: tuple[float, float]  # the first side's logits of both tokens
    second_logits: tuple[float, float]  # the second side's
    gaps: tuple[float, float]  # how far each side puts its own token above the other's, in logits
    is_near_tie: bool  # the first side's two best logits lie closer than `NEAR_TIE`


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What `compare` found over `num_tokens` positions. KLD is KL(first || second) in nats; shares are 0 to 1."""

    first: Side
    second: Side
    num_prompts: int
    num_tokens: int
    mean_kld: float
    median_kld: float
    kld_99: float  # the 99th percentile
    max_kld: float
    first_perplexity: float
    second_perplexity: float
    same_top1: float  # share of positions where both find the same token the likeliest
    same_top5: float  # mean share of the first side's five likeliest that are among the second's five
    near_ties: float  # share of positions where the first side's two best logits lie closer than `NEAR_TIE`
    num_clear_changes: int  # positions that are no near-tie, yet the likeliest token differs
    nmse: float  # of the logits: sum (second - first)^2 / sum first^2
    num_greedy_tokens: int  # at most so many after each prompt
    greedy_differences: tuple[GreedyDifference, ...]  # in order of prompts, at most one for each

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a comparison may not exceed. Raises `ConfigError` for a value that cannot be one."""

    max_kld: float = 0.01  # mean, nats
    max_kld_99: float = 0.05  # 99th percentile, nats
    min_top1: float = 0.93  # share

    def __post_init__(self) -> None:
        for name, largest in (("max_kld", math.inf), ("max_kld_99", math.inf), ("min_top1", 1.0)):
            value = getattr(self, name)
            if not 0 <= value <= largest:  # false for NaN
                raise ConfigError(f"{name} should be from 0 to {largest:g}; found {value}")

    def exceeded(self, comparison: Comparison) -> list[str]:
        """A phrase for each limit that `comparison` breaks."""
        found = []
        if comparison.mean_kld > self.max_kld:
            found.append(f"Mean KLD {comparison.mean_kld:.6f} is above {self.max_kld:g}")
        if comparison.kld_99 > self.max_kld_99:
            found.append(f"99.0% KLD {comparison.kld_99:.6f} is above {self.max_kld_99:g}")
        if comparison.same_top1 < self.min_top1:
            found.append(f"Same top p {comparison.same_top1:.3%} is below {self.min_top1:.3%}")
        return found


class Position(NamedTuple):
    """What two rows of logits say of each other; names as in `Comparison`."""

    kld: float
    first_nll: float  # -ln of the probability of the token that follows; NaN where none does
    second_nll: float
    same_top1: bool
    same_top5: float
    is_near_tie: bool
    squared_error: float
    squared_size: float


def compare_rows(first: Floats, second: Floats, next_id: int | None) -> Position:
    """Compares two rows of logits [V], in float64. `next_id`: the token that follows in the text, if any.

    KL(first || second) = sum p (ln p - ln q), with p and q the softmax of each row.
    """
    x, y = first.astype(np.float64), second.astype(np.float64)
    log_p, log_q = _log_softmax(x), _log_softmax(y)
    best, others = (set(np.argpartition(row, -5)[-5:].tolist()) for row in (x, y))
    return Position(
        kld=float(np.exp(log_p) @ (log_p - log_q)),
        first_nll=math.nan if next_id is None else -float(log_p[next_id]),
        second_nll=math.nan if next_id is None else -float(log_q[next_id]),
        same_top1=bool(x.argmax() == y.argmax()),
        same_top5=len(best & others) / 5,
        is_near_tie=is_near_tie(first),
        squared_error=float((y - x) @ (y - x)),
        squared_size=float(x @ x),
    )


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max()
    logarithms: NDArray[np.float64] = shifted - math.log(np.exp(shifted).sum())
    return logarithms


def is_near_tie(logits: Floats) -> bool:
    second, best = np.partition(logits, -2)[-2:]
    return bool(best - second < NEAR_TIE)


def summarise(positions: list[Position]) -> dict[str, Any]:
    """The fields of `Comparison` that are statistics of positions."""
    columns = dict(zip(Position._fields, np.array(positions, np.float64).T, strict=True))
    kld = columns["kld"]
    is_clear_change = (columns["same_top1"] == 0) & (columns["is_near_tie"] == 0)
    return {
        "num_tokens": len(positions),
        "mean_kld": float(kld.mean()),
        "median_kld": float(np.median(kld)),
        "kld_99": float(np.quantile(kld, 0.99)),
        "max_kld": float(kld.max()),
        "first_perplexity": float(np.exp(np.nanmean(columns["first_nll"]))),
        "second_perplexity": float(np.exp(np.nanmean(columns["second_nll"]))),
        "same_top1": float(columns["same_top1"].mean()),
        "same_top5": float(columns["same_top5"].mean()),
        "near_ties": float(columns["is_near_tie"].mean()),
        "num_clear_changes": int(is_clear_change.sum()),
        "nmse": float(columns["squared_error"].sum() / columns["squared_size"].sum()),
    }


def describe_difference(
    prompt: int, position: int, before: str, tokens: tuple[str, str], first: Floats, second: Floats
) -> GreedyDifference:
    """What is to be said of two rows of logits [V] whose best tokens differ."""
    ids = int(first.argmax()), int(second.argmax())
    first_pair, second_pair = ((float(row[ids[0]]), float(row[ids[1]])) for row in (first, second))
    return GreedyDifference(
        prompt=prompt,
        position=position,
        context=before,
        token_ids=ids,
        tokens=tokens,
        first_logits=first_pair,
        second_logits=second_pair,
        gaps=(first_pair[0] - first_pair[1], second_pair[1] - second_pair[0]),
        is_near_tie=is_near_tie(first),
    )


def format_table(comparison: Comparison) -> str:
    """The comparison for people, in the words of llama-perplexity: the first side is its base, the second its Q."""
    c = comparison
    rows = [
        ("Mean PPL(base)", f"{c.first_perplexity:.6f}"),
        ("Mean PPL(Q)", f"{c.second_perplexity:.6f}"),
        ("Mean ln(PPL(Q)/PPL(base))", f"{math.log(c.second_perplexity / c.first_perplexity):.6f}"),
        ("Mean KLD", f"{c.mean_kld:.6f}"),
        ("Median KLD", f"{c.median_kld:.6f}"),
        ("99.0% KLD", f"{c.kld_99:.6f}"),
        ("Maximum KLD", f"{c.max_kld:.6f}"),
        ("Same top p", f"{c.same_top1:.3%}"),
        ("Same top 5", f"{c.same_top5:.3%}"),
        (f"Near-ties (below {NEAR_TIE})", f"{c.near_ties:.3%}"),
        ("Other top p, no near-tie", f"{c.num_clear_changes} of {c.num_tokens}"),
        ("NMSE of logits", f"{c.nmse:.3e}"),
    ]
    lines = [f"{name:26}{value:>14}" for name, value in rows]
    sides = zip(("base", "Q"), (c.first, c.second), strict=True)
    head = [f"{name:5} {side.config.model} | {side.description}" for name, side in sides]
    return "\n".join([*head, f"{c.num_prompts} texts, {c.num_tokens} tokens", "", *lines, *_greedy_lines(c)])


def _greedy_lines(c: Comparison) -> list[str]:
    if not c.num_greedy_tokens:
        return []
    num_same = c.num_prompts - len(c.greedy_differences)
    lines = ["", f"Greedy answers, {c.num_greedy_tokens} tokens: {num_same} of {c.num_prompts} the same"]
    for d in c.greedy_differences:
        lines.append(f"  text {d.prompt}, token {d.position}, after {d.context!r}")
        sides = zip(("base", "Q"), d.tokens, d.first_logits, d.second_logits, strict=True)
        for name, token, base, q in sides:
            lines.append(f"    {name:5} takes {token!r:16} its logit: base {base:.3f}, Q {q:.3f}")
        tie = "a near-tie" if d.is_near_tie else "no near-tie"
        lines.append(f"    gap: base {d.gaps[0]:.3f}, Q {d.gaps[1]:.3f}; {tie}")
    return lines
