"""Owns the portable matrix products on native GGUF blocks: numba without intrinsics, and the rounding of
activations that they need. It must not know models, threads or files; a caller with threads gives each one
a range of rows.

Law 1: an output is a function of its weight row and its token alone. Integer sums are exact in any order;
the float part runs block by block, in order, into one accumulator for each (row, token). Types without an
integer dot product use 16 lanes and a fixed tree. Without fastmath LLVM never reorders or fuses float
operations."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ..errors import ModelFileError
from .jit import inlined, kernel
from .plain_blocks import Array
from .plain_kernels import KERNELS
from .quants import ACTIVATION_ROUNDING, ROUNDING_BLOCK, round_activations

PLAIN_TYPES = frozenset(KERNELS)
SUM_BLOCK = 32  # activations that share one entry of Activations.sums

_F32, _I32 = np.float32, np.int32
_SIGN = np.int32(-(2**31))
_LARGEST_FINITE = np.finfo(np.float32).max
_ROUND = np.float32(1.5 * 2**23)  # (x + _ROUND) - _ROUND is x rounded to an integer, ties to even


class Activations(NamedTuple):
    """Activations as the kernels take them, made by `quantize`.

    `values` int8[T, n], `scales` float32[T, n / block] and `sums` int32[T, n / 32], the sums of 32 values.
    For the roundings "f16", "bf16" and "none" `values` is float32[T, n] and the others are empty, [T, 0]."""

    values: NDArray[Any]
    scales: NDArray[np.float32]
    sums: NDArray[np.int32]


def quantize(x: NDArray[np.float32], rounding: str) -> Activations:
    """Round float32[T, n]. Equal to `quants.quantize_activations` (`round_activations` for float roundings).

    Raises ValueError if x is something else, or n not a whole number of the rounding's blocks."""
    if x.ndim != 2 or x.dtype != np.float32:
        raise ValueError(f"activations to round: expected float32[T, n], found {x.dtype.name}{list(x.shape)}")
    num_tokens, n = x.shape
    if rounding not in ROUNDING_BLOCK:
        empty = np.empty((num_tokens, 0), np.float32)
        return Activations(round_activations(np.ascontiguousarray(x), rounding), empty, empty.view(np.int32))
    block = ROUNDING_BLOCK[rounding]
    if n % block:
        raise ValueError(f"{rounding} rounds blocks of {block}: expected [T, n * {block}], found {x.shape}")
    values = np.empty((num_tokens, n), np.int8)
    scales = np.empty((num_tokens, n // block), np.float32)
    sums = np.empty((num_tokens, n // SUM_BLOCK), np.int32)
    run = _quantize_q8_k if rounding == "q8_K" else _quantize_q8_0
    run(_read_only(x), values, scales, sums)
    return Activations(values, scales, sums)


def matmul_rows(
    data: NDArray[np.uint8],
    ggml_type: GGMLQuantizationType,
    acts: Activations,
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """out[t, r] = sum over i of W[r, i] * acts[t, i], for begin <= r < end; other rows are left as they are.

    `data` uint8[rows, row_bytes] in C order, at any address; `acts` rounded as
    ACTIVATION_ROUNDING[ggml_type] says; `out` float32[T, rows] in C order. Activations that are not finite
    make their token's outputs NaN or infinite. Raises ModelFileError for a type without kernel, ValueError
    for shapes, dtypes or a range that do not fit."""
    run = KERNELS.get(ggml_type)
    if run is None:
        supported = ", ".join(t.name for t in KERNELS)
        raise ModelFileError(f"no kernel for weights of type {ggml_type.name}: use one of {supported}")
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    _check_operands(data, ggml_type, acts, out)
    if not 0 <= begin <= end <= len(data):
        raise ValueError(f"rows {begin} to {end} do not lie within the {len(data)} rows of the matrix")
    num_tokens, n = acts.values.shape
    blocks = (n // block, block_bytes) if block > 1 else (1, data.shape[1])  # a row of plain floats is one
    weights = _read_only(data).reshape(len(data), *blocks)
    if acts.scales.shape[1] == 0:
        run(weights, _read_only(acts.values), out, begin, end)
        return
    values = _read_only(acts.values).reshape(num_tokens, n // block, block)
    sums = _read_only(acts.sums).reshape(num_tokens, n // block, block // SUM_BLOCK)
    run(weights, values, _read_only(acts.scales), sums, out, begin, end)


def _read_only(array: Array) -> Array:
    """A C-ordered read-only view, so that each kernel is compiled for one type of argument only."""
    view = np.ascontiguousarray(array).view()
    view.flags.writeable = False
    return view


def _check_operands(data: Array, ggml_type: GGMLQuantizationType, acts: Activations, out: Array) -> None:
    """The kernels index without bounds checks: everything that they rely on is checked here."""
    block, block_bytes = GGML_QUANT_SIZES[ggml_type]
    num_tokens, n = acts.values.shape
    rounding = ACTIVATION_ROUNDING[ggml_type]
    is_int = rounding in ROUNDING_BLOCK
    expected = {
        "data": (data, np.uint8, (len(data), n // block * block_bytes)),
        "out": (out, np.float32, (num_tokens, len(data))),
        "acts.values": (acts.values, np.int8 if is_int else np.float32, (num_tokens, n // block * block)),
        "acts.scales": (acts.scales, np.float32, (num_tokens, n // block if is_int else 0)),
        "acts.sums": (acts.sums, np.int32, (num_tokens, n // SUM_BLOCK if is_int else 0)),
    }
    for name, (array, dtype, shape) in expected.items():
        if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
            raise ValueError(
                f"{name} for {ggml_type.name} weights and {rounding!r} activations: expected C-ordered "
                f"{np.dtype(dtype).name}{list(shape)}, found {array.dtype.name}{list(array.shape)}"
            )


@inlined
def find_largest(x: Array, t: int, begin: int, end: int) -> Any:
    """The first value of largest magnitude; NaN counts as larger than infinity.

    Without their sign, the bits of floats are ordered as the floats are. The search for the first is left to the
    few blocks in which both signs have the largest magnitude, so that the others are done many values at once."""
    positive, negative = _I32(0), _I32(0)
    for i in range(begin, end):
        bits = _I32(_F32(x[t, i]).view(np.int32))
        flipped = _I32(bits ^ _SIGN)
        positive = bits if bits > positive else positive
        negative = flipped if flipped > negative else negative
    if positive == negative:
        for i in range(begin, end):
            bits = _I32(_F32(x[t, i]).view(np.int32))
            if _I32(bits & ~_SIGN) == positive:
                return _I32(bits).view(np.float32)
    return _I32(positive if positive > negative else negative ^ _SIGN).view(np.float32)


@inlined
def _round_block(x: Array, t: int, begin: int, end: int, inverse: Any, values: Array, sums: Array) -> None:
    """values = rint(x * inverse) and their sums. An inverse of 0 stands for a block without values."""
    for start in range(begin, end, SUM_BLOCK):
        total = _I32(0)
        for i in range(start, start + SUM_BLOCK):
            quant = np.int8((x[t, i] * inverse + _ROUND) - _ROUND) if inverse != _F32(0) else np.int8(0)
            values[t, i] = quant
            total = _I32(total + _I32(quant))
        sums[t, start // SUM_BLOCK] = total


@inlined
def round_to_half(x: Any) -> Any:
    """A finite x >= 0 rounded to f16 and back, ties to even; NaN where f16 overflows."""
    if x < _F32(2.0**-14):
        return (x + _F32(0.5)) - _F32(0.5)  # the step of floats from 0.5 on is that of f16 subnormals
    bits = _F32(x).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(13)) & np.uint32(1))
    bits = np.uint32(np.uint32(bits + np.uint32(0xFFF) + odd) & np.uint32(0xFFFFE000))
    rounded = np.uint32(bits).view(np.float32)
    return rounded if rounded <= _F32(65504) else _F32(np.nan)


@kernel
def _quantize_q8_k(x: Array, values: Array, scales: Array, sums: Array) -> None:
    for t in range(scales.shape[0]):
        for b in range(scales.shape[1]):
            begin, end = 256 * b, 256 * b + 256
            largest = find_largest(x, t, begin, end)
            inverse = _F32(-127) / largest
            scale = _F32(1) / inverse
            if not abs(largest) <= _LARGEST_FINITE:
                inverse, scale = _F32(0), _F32(np.nan)
            elif not abs(inverse) <= _LARGEST_FINITE:
                inverse, scale = _F32(0), _F32(0)
            scales[t, b] = scale
            _round_block(x, t, begin, end, inverse, values, sums)


@kernel
def _quantize_q8_0(x: Array, values: Array, scales: Array, sums: Array) -> None:
    for t in range(scales.shape[0]):
        for b in range(scales.shape[1]):
            begin, end = 32 * b, 32 * b + 32
            amax = abs(find_largest(x, t, begin, end))
            inverse = _F32(127) / amax
            scale = _F32(np.nan)
            if amax <= _LARGEST_FINITE:
                scale = round_to_half(amax / _F32(127))
            if not (inverse <= _LARGEST_FINITE and scale <= _LARGEST_FINITE):
                inverse = _F32(0)
            scales[t, b] = scale
            _round_block(x, t, begin, end, inverse, values, sums)
