"""The slow twin of the sampler: Python floats and sorting, one formula a line. It owns no test."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

INFINITY = math.inf


def uniform_of(seed: int, index: int = 0) -> float:
    """The first number of a sequence's random stream."""
    return float(
        np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,)))).random()
    )


def twin_kept(
    row: np.ndarray, *, unused: Any = (), temperature: float, min_p: float, top_k: int, top_p: float
) -> tuple[dict[int, float], float]:
    """The kept ids, best first, with their probabilities, and how far `top_p` lies from any summed one."""
    logits = {i: float(x) for i, x in enumerate(row) if i not in set(unused) and x > -INFINITY}
    ids = sorted(logits, key=lambda i: (-logits[i], i))
    peak = logits[ids[0]]
    if min_p > 0:
        ids = [i for i in ids if logits[i] - peak >= temperature * math.log(min_p)]
    if 0 < top_k < len(row):
        ids = ids[:top_k]
    weights = {i: math.exp((logits[i] - peak) / temperature) for i in ids}
    total = math.fsum(weights.values())
    mass, kept, margin = 0.0, {}, INFINITY
    for i in ids:
        if top_p < 1 and mass >= top_p * total:
            break
        kept[i] = weights[i]
        mass += weights[i]
        margin = min(margin, abs(mass / total - top_p)) if top_p < 1 else margin
    return {i: weight / mass for i, weight in kept.items()}, margin


def twin_choice(probabilities: dict[int, float], uniform: float, *, by_id: bool) -> tuple[int, float]:
    """The id at which the summed probability exceeds `uniform`, and how far that lies from any sum."""
    mass, chosen, margin = 0.0, -1, INFINITY
    for i in sorted(probabilities) if by_id else probabilities:
        mass += probabilities[i]
        margin = min(margin, abs(mass - uniform))
        chosen = i if chosen < 0 and mass > uniform else chosen
    return chosen, margin
