"""From one row of logits to one token: pure functions over a row, and the sampling state of one sequence.
It knows ids and settings, no model, no text and no neighbour: batching changes no bit.

A row is float32[V] and is never written to. The order is that of vLLM's V1 sampler
(https://docs.vllm.ai/en/latest/api/vllm/v1/sample/sampler/):

 1. log-probabilities, from the raw row over all ids;
 2. masks: unused ids, `allowed_token_ids`, and below `min_tokens` the ids that would end the sequence;
 3. `logit_bias`, then the repetition, frequency and presence penalties;
 4. greedy: the best token; else temperature, then `min_p`, `top_k`, `top_p`, each over what the last left;
 5. one uniform number u: the first token at which the summed probability exceeds u. Without a filter tokens
    are summed by ascending id, with one by descending probability.

Of equal logits the lowest id is the better one, everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cllm.errors import BackendError, InvalidRequestError
from cllm.outputs import Logprob
from cllm.params import SamplingParams

if TYPE_CHECKING:  # at run time it is imported where it is needed: greedy sampling does without numba
    from cllm.sampler_kernels import Blocks

Row = NDArray[np.float32]
Ids = NDArray[np.int64]

_LARGEST = float(np.finfo(np.float32).max)
_NO_IDS: Ids = np.empty(0, np.int64)

Argmax = Callable[[NDArray[np.float32]], Ids]


class Sampled(NamedTuple):
    """One sampled token. `logprob` and `top` are None unless `SamplingParams.logprobs` asks for them.

    `top` holds the best tokens, best first, and the sampled one.
    """

    token_id: int
    logprob: float | None = None
    top: dict[int, Logprob] | None = None


class TokenSampler:
    """The sampling state of one sequence: its random stream and the tokens that its penalties count.

    `takes_best_below`: where the best id of a row lies below it, that is the next token, and nothing has to be kept.

    `unused_ids` are the ids without a token, never sampled; `eog_ids` those that end a generation; `index`
    numbers the choice among `params.n`. The stream follows from `params.seed` and `index` alone.
    Raises `InvalidRequestError` for ids outside the vocabulary, or where no allowed token is left to sample.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        vocab_size: int,
        unused_ids: ArrayLike,
        eog_ids: Collection[int],
        index: int = 0,
    ) -> None:
        params.check_vocabulary(vocab_size)
        self._params = params
        self._vocab_size = vocab_size
        self._unused_ids = _sorted_ids(unused_ids)
        self._eog_ids = eog_ids
        self._index = index
        self._allowed_ids = _sorted_ids([*(params.allowed_token_ids or ())])
        self._refuse_if_nothing_is_allowed()
        self._bias_ids, self._biases = _bias_arrays(params.logit_bias or {})
        self._is_penalised = (
            params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        )
        is_edited = self._is_penalised or params.logit_bias or params.allowed_token_ids is not None
        takes_best = params.is_greedy and params.logprobs is None and not params.min_tokens and not is_edited
        first_unused = int(self._unused_ids[0]) if len(self._unused_ids) else vocab_size
        self.takes_best_below = first_unused if takes_best else 0
        # Tokens seen so far, ascending, and how often each was sampled; kept only where a penalty needs them.
        self._seen_ids = _sorted_ids(prompt_token_ids) if self._is_penalised else _NO_IDS
        self._counts = np.zeros(len(self._seen_ids), np.int64)
        self._num_sampled = 0

    def sample(self, row: Row) -> Sampled:
        """The next token for the logits `row` float32[V]; draws exactly one number unless greedy.

        Raises `BackendError`, and changes nothing, if a logit is NaN or +inf or if every id is masked.
        """
        if row.shape != (self._vocab_size,):
            raise BackendError(f"expected one logit for each of {self._vocab_size} ids; found {row.shape}")
        best_id = best_token(row, self._unused_ids)
        edited = self._edit(row)
        if edited is not row:
            best_id = best_token(edited, self._unused_ids)
        token_id = best_id if self._params.is_greedy else self._draw(edited, float(edited[best_id]))
        self._observe(token_id)
        if self._params.logprobs is None:
            return Sampled(token_id)
        top = top_logprobs(row, self._params.logprobs, token_id)
        return Sampled(token_id, top[token_id].logprob, top)

    # What only some requests need is made when it is asked for.

    @cached_property
    def _random(self) -> np.random.Generator:
        seeds = np.random.SeedSequence(self._params.seed, spawn_key=(self._index,))
        return np.random.Generator(np.random.PCG64(seeds))

    @cached_property
    def _end_ids(self) -> Ids:
        return _sorted_ids([*self._eog_ids, *(self._params.stop_token_ids or ())])

    @cached_property
    def _blocks(self) -> Blocks:
        from cllm.sampler_kernels import make_blocks

        return make_blocks(self._vocab_size, self._unused_ids)

    def _edit(self, row: Row) -> Row:
        """The masks, biases and penalties of this step; the row itself if there are none."""
        params = self._params
        if params.allowed_token_ids is not None:
            row = keep_only(row, self._allowed_ids)
        if self._num_sampled < params.min_tokens:
            row = ban(row, self._end_ids)
        if len(self._bias_ids):
            row = apply_logit_bias(row, self._bias_ids, self._biases)
        if self._is_penalised:
            row = apply_penalties(
                row,
                self._seen_ids,
                self._counts,
                repetition=params.repetition_penalty,
                frequency=params.frequency_penalty,
                presence=params.presence_penalty,
            )
        return row

    def _draw(self, row: Row, peak: float) -> int:
        from cllm import sampler_kernels as kernels

        params = self._params
        uniform = self._random.random()
        if not (0 < params.top_k < self._vocab_size or params.top_p < 1 or params.min_p > 0):
            scale = kernels.inverse_temperature(params.temperature)
            return int(kernels.draw(row, self._blocks.ranges, peak, scale, uniform))
        ids, cumulative = kernels.kept_tokens(
            row,
            self._blocks,
            peak,
            temperature=params.temperature,
            min_p=params.min_p,
            top_k=params.top_k,
            top_p=params.top_p,
        )
        # u < 1, so the product stays below the last sum also when rounded.
        return int(ids[np.searchsorted(cumulative, uniform * cumulative[-1], "right")])

    def _observe(self, token_id: int) -> None:
        self._num_sampled += 1
        if self._is_penalised:
            at = np.searchsorted(self._seen_ids, token_id)
            if not _contains(self._seen_ids, token_id):
                self._seen_ids = np.insert(self._seen_ids, at, token_id)
                self._counts = np.insert(self._counts, at, 0)
            self._counts[at] += 1

    def _refuse_if_nothing_is_allowed(self) -> None:
        if self._params.allowed_token_ids is None:
            return
        masked = [*self._unused_ids, *(self._end_ids if self._params.min_tokens else ())]
        if set(self._allowed_ids) <= set(masked):
            raise InvalidRequestError(
                "allowed_token_ids leaves no token to sample: each is unused in this vocabulary, or ends the "
                "generation, which min_tokens forbids; allow another id or set min_tokens to 0",
                field="allowed_token_ids",
            )


def sample_rows(
    logits: NDArray[np.float32], samplers: Sequence[TokenSampler], argmax: Argmax | None = None
) -> list[Sampled | BackendError]:
    """One token for each row of `logits` float32[R, V]; a row that fails has its error instead.

    `argmax`: the place of the largest logit of each row, as `np.argmax` finds it.
    """
    limits = [sampler.takes_best_below for sampler in samplers]
    if not min(limits, default=0):
        return [_sample_row(row, sampler) for row, sampler in zip(logits, samplers, strict=True)]
    best_ids = logits.argmax(axis=1) if argmax is None else argmax(logits)
    results: list[Sampled | BackendError] = []
    for index, (best_id, limit) in enumerate(zip(best_ids.tolist(), limits, strict=True)):
        # Not finite where there is a NaN anywhere in the row.
        is_plain = best_id < limit and math.isfinite(logits.item(index, best_id))
        results.append(Sampled(best_id) if is_plain else _sample_row(logits[index], samplers[index]))
    return results


def _sample_row(row: Row, sampler: TokenSampler) -> Sampled | BackendError:
    try:
        return sampler.sample(row)
    except BackendError as error:
        return error


def keep_only(row: Row, token_ids: Ids) -> Row:
    """A copy with every other id at -inf."""
    kept = np.full_like(row, -np.inf)
    kept[token_ids] = row[token_ids]
    return kept


def ban(row: Row, token_ids: Ids) -> Row:
    """A copy with these ids at -inf."""
    edited = row.copy()
    edited[token_ids] = -np.inf
    return edited


def apply_logit_bias(row: Row, token_ids: Ids, biases: Row) -> Row:
    """A copy with logit + bias at these ids, which are distinct."""
    edited = row.copy()
    edited[token_ids] += biases
    return edited


def apply_penalties(
    row: Row, token_ids: Ids, counts: Ids, *, repetition: float, frequency: float, presence: float
) -> Row:
    """A copy penalised at the distinct ids of prompt and output; `counts`: how often the output has each.

    Repetition: x / r where x > 0, else x * r (Keskar et al. 2019, arXiv:1909.05858). Then
    x - frequency * count - presence * (count > 0), as in OpenAI's API.
    """
    logits = row[token_ids].astype(np.float64)
    with np.errstate(over="ignore"):  # an extreme penalty ends at the largest float32, not at an infinity
        values = np.where(logits > 0, logits / repetition, logits * repetition)
    values = np.clip(values - frequency * counts - presence * (counts > 0), -_LARGEST, _LARGEST)
    edited = row.copy()
    edited[token_ids] = np.where(logits == -np.inf, -np.inf, values)
    return edited


def best_token(row: Row, unused_ids: Ids = _NO_IDS) -> int:
    """The id of the largest logit, the lowest of equal ones, never one of the ascending `unused_ids`.

    Raises `BackendError` if any logit, also an unused one, is NaN or +inf, or if none is above -inf.
    """
    best_id = int(row.argmax())  # NumPy's argmax stops at a NaN, so its value tells of NaN and +inf at once
    if not row[best_id] < np.inf:
        num_nan, num_infinite = np.count_nonzero(np.isnan(row)), np.count_nonzero(row == np.inf)
        raise BackendError(
            f"expected finite logits; found {num_nan} NaN and {num_infinite} +infinity in {len(row)} (one at "
            f"token id {best_id}): the model file or the backend is faulty, check it with `cllm compare`"
        )
    if _contains(unused_ids, best_id):
        row = ban(row, unused_ids)
        best_id = int(row.argmax())
    if row[best_id] == -np.inf:
        raise BackendError("no token can be sampled: the model or the request's masks set all to -infinity")
    return best_id


def top_logprobs(row: Row, k: int, token_id: int) -> dict[int, Logprob]:
    """The log-probabilities of the `k` best ids, best first, and of `token_id`, over all ids of a raw row.

    log p(i) = x_i - ln(sum_j e^x_j), within 1e-6; -inf where the logit is. For a prompt: the row of position
    i - 1 with the id at position i. Raises `BackendError` as `best_token` does.
    """
    from cllm import sampler_kernels as kernels

    peak = float(row[best_token(row)])
    blocks = kernels.whole_blocks(len(row))
    log_total = peak + math.log(kernels.block_sums(row, blocks.ranges, peak, 1.0).sum())
    ids = kernels.best_tokens(row, blocks, k).tolist() if k else []
    top = {best: Logprob(float(row[best]) - log_total, rank) for rank, best in enumerate(ids, start=1)}
    if token_id not in top:
        top[token_id] = Logprob(float(row[token_id]) - log_total, _rank(row, token_id))
    return top


def _rank(row: Row, token_id: int) -> int:
    better = np.count_nonzero(row > row[token_id])
    return int(1 + better + np.count_nonzero(row[:token_id] == row[token_id]))


def _sorted_ids(token_ids: ArrayLike) -> Ids:
    ids = np.asarray(token_ids, np.int64)
    return ids if len(ids) < 2 or (ids[1:] > ids[:-1]).all() else np.unique(ids)


def _contains(sorted_ids: Ids, token_id: int) -> bool:
    if not len(sorted_ids) or token_id < sorted_ids[0]:  # the usual cases: unused ids are the last
        return False
    at = int(np.searchsorted(sorted_ids, token_id))
    return at < len(sorted_ids) and int(sorted_ids[at]) == token_id


def _bias_arrays(logit_bias: Mapping[int, float]) -> tuple[Ids, Row]:
    ids = np.fromiter(logit_bias.keys(), np.int64, len(logit_bias))
    return ids, np.fromiter(logit_bias.values(), np.float32, len(logit_bias))
