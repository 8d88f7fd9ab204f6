"""Matrix products on repacked weights: which types have fast kernels, how weights get into their layout, and
the compiled entry points. It must not know models or threads: a caller gives each thread a range of groups.

The inner loops are in `tile_types.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numba import types
from numpy.typing import NDArray

from .gguf import Tensor
from .isa import host_isa
from .jit import intrinsic, kernel, native_function
from .quants import ACTIVATION_ROUNDING
from .rounding import records_shape
from .simd import make_internal
from .tile_loops import TileSizes, emit_groups
from .tile_types import TILE_TYPES
from .tiles import RECORD_BYTES, ROWS, WORD

_ISA = host_isa()
_NUM_ARGUMENTS = 11  # of `tile_loops.emit_groups`
_ARGUMENTS = types.UniTuple(types.int64, _NUM_ARGUMENTS)  # type: ignore[no-untyped-call]


def is_fast(ggml_type: GGMLQuantizationType) -> bool:
    """Whether there are fast kernels for weights of a type."""
    return ggml_type in TILE_TYPES


@dataclass(frozen=True)
class PackedMatrix:
    """A weight matrix in groups of 16 rows; rows past the last are zeros.

    `data` uint8[parts, spans, groups of a span, group bytes]: the groups of a span follow each other in memory, while
    spans and parts may lie apart.
    """

    type: GGMLQuantizationType
    num_rows: int
    num_columns: int
    data: NDArray[np.uint8] = field(repr=False)

    @property
    def num_records(self) -> int:
        return _num_records(self.type, self.num_columns)

    @property
    def rounding(self) -> str:
        return ACTIVATION_ROUNDING[self.type]

    @property
    def padded_rows(self) -> int:
        return self.num_groups * ROWS

    @property
    def num_groups(self) -> int:
        return math.prod(self.data.shape[:3])


def packed_bytes(tensor: Tensor) -> int:
    """Bytes of the tensor's groups."""
    return num_groups(tensor) * num_records(tensor) * TILE_TYPES[tensor.type].words * WORD


def num_groups(tensor: Tensor) -> int:
    """Groups of 16 rows, the last of which may be padded."""
    return -(-tensor.shape[0] // ROWS)


def num_records(tensor: Tensor) -> int:
    """Records of a group."""
    return _num_records(tensor.type, tensor.shape[1])


def pack(tensor: Tensor, out: NDArray[np.uint8], begin: int, end: int) -> None:
    """Repacks the groups begin <= g < end of `tensor` into a `PackedMatrix.data`."""
    kind, source = TILE_TYPES[tensor.type], tensor.data.view(np.uint16)
    order = np.array(kind.order, np.int32)
    for span, first, low, high in _spans(out, begin, end):
        words = span.view(np.uint32).reshape(len(span), -1, kind.words, ROWS)
        _pack_groups(source[first * ROWS :], order, _source_halves(tensor.type), words, low, high)
        if kind.regroup is not None:
            kind.regroup(words[low:high])


def _spans(
    data: NDArray[np.uint8], begin: int, end: int
) -> Iterator[tuple[NDArray[np.uint8], int, int, int]]:
    """The spans of a `PackedMatrix.data` that hold the groups begin <= g < end: each as uint8[groups, group bytes], the
    number of its first group, and low and high, the range of its groups that are among them."""
    _, in_a_part, size, _ = data.shape
    for first in range(begin // size * size, end, size):
        part, span = divmod(first // size, in_a_part)
        yield data[part, span], first, max(begin - first, 0), min(end - first, size)


def multiply(
    matrix: PackedMatrix,
    acts: NDArray[np.uint8],
    out: NDArray[np.float32],
    begin: int,
    end: int,
) -> None:
    """out[t, r] = matrix[r] . acts[t] for the rows of the groups begin <= g < end.

    acts from `rounding.round_rows` of float32[T, columns]; out float32[T, padded rows] in C order. Raises ValueError
    for shapes or a range that do not fit: the kernels check nothing.
    """
    expected = (
        records_shape(matrix.rounding, len(out), matrix.num_columns),
        (len(out), matrix.padded_rows),
    )
    if (acts.shape, out.shape) != expected or not (acts.flags.c_contiguous and out.flags.c_contiguous):
        raise ValueError(f"expected activations and output of {expected}, found {acts.shape} and {out.shape}")
    if not 0 <= begin <= end <= matrix.num_groups:
        raise ValueError(f"groups {begin} to {end} do not lie within the {matrix.num_groups} of the matrix")
    for span, first, low, high in _spans(matrix.data, begin, end):
        addresses = span.ctypes.data, acts.ctypes.data, out[:, first * ROWS :].ctypes.data
        numbers = (out.strides[0], matrix.num_records, 0, len(out), low, high, 0, 0)
        compiled_kernel(matrix.type).ctypes(*addresses, *numbers)


@cache
def compiled_kernel(ggml_type: GGMLQuantizationType) -> Any:
    """The type's compiled kernel, with `address` and `ctypes`; its arguments are those of `tile_loops.emit_groups`."""
    return native_function(_groups_of(ggml_type.name), _NUM_ARGUMENTS)


def _groups_of(type_name: str) -> Any:
    def groups(weights, acts, out, out_stride, num_records, first, last, begin, end, bias, adds):  # type: ignore[no-untyped-def]
        numbers = (weights, acts, out, out_stride, num_records, first, last, begin, end, bias, adds)
        emitted_groups(type_name, _ISA, numbers)

    return groups


@intrinsic(prefer_literal=True)
def emitted_groups(typing_context, type_name, isa, numbers):  # type: ignore[no-untyped-def]
    """`tiles.emit_groups` of a type, as a part of the compiled function that calls it; `numbers`: its arguments."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        ggml_type = GGMLQuantizationType[type_name.literal_value]
        kind = TILE_TYPES[ggml_type]
        sizes = TileSizes(kind.words * WORD, RECORD_BYTES[ACTIVATION_ROUNDING[ggml_type]])
        name = f"cllm_{ggml_type.name}"
        function = emit_groups(builder.module, isa.literal_value, name, kind.record, sizes)
        make_internal(function)
        builder.call(function, [builder.extract_value(values[2], i) for i in range(_NUM_ARGUMENTS)])
        return context.get_dummy_value()

    return types.void(type_name, isa, _ARGUMENTS), generate


# --- repacking ----------------------------------------------------------------------------------------------------


def _num_records(ggml_type: GGMLQuantizationType, num_columns: int) -> int:
    kind = TILE_TYPES[ggml_type]
    return -(-num_columns // (GGML_QUANT_SIZES[ggml_type][0] * kind.blocks))


def _source_halves(ggml_type: GGMLQuantizationType) -> int:
    """16-bit units of native blocks that make one record."""
    return TILE_TYPES[ggml_type].blocks * GGML_QUANT_SIZES[ggml_type][1] // 2


@kernel
def _pack_groups(data, order, source_halves, words, begin, end):  # type: ignore[no-untyped-def]
    """data uint16[rows, halves of a row] to words uint32[groups, records, words, 16]; what is missing is 0."""
    for group in range(begin, end):
        for record in range(words.shape[1]):
            target = words[group, record]
            for lane in range(ROWS):
                row = group * ROWS + lane
                if row >= data.shape[0]:
                    for word in range(target.shape[0]):
                        target[word, lane] = 0
                    continue
                source = data[row, record * source_halves :]
                for word in range(target.shape[0]):
                    low, high = order[2 * word], order[2 * word + 1]
                    value = np.uint32(0)
                    if 0 <= low < source.shape[0]:
                        value = np.uint32(source[low])
                    if 0 <= high < source.shape[0]:
                        value = np.uint32(value | np.uint32(np.uint32(source[high]) << np.uint32(16)))
                    target[word, lane] = value
