"""Makes GGUF bytes for tests, independently of the reader: a writer that can also write files that are wrong
on purpose, and random quantised blocks whose scales are finite. It knows the container, no architecture.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

Q = GGMLQuantizationType
V = GGUFValueType

# The float16 fields of each block type: (byte offset, what a code times its sub-scale typically is).
# Layouts: the `block_*` structs of ggml-common.h.
F16_FIELDS: dict[GGMLQuantizationType, tuple[tuple[int, float], ...]] = {
    Q.Q4_0: ((0, 5),),
    Q.Q4_1: ((0, 9), (2, 1)),
    Q.Q5_0: ((0, 9),),
    Q.Q5_1: ((0, 18), (2, 1)),
    Q.Q8_0: ((0, 74),),
    Q.Q2_K: ((80, 17), (82, 9)),
    Q.Q3_K: ((108, 42),),
    Q.Q4_K: ((0, 320), (2, 37)),
    Q.Q5_K: ((0, 660), (2, 37)),
    Q.Q6_K: ((208, 1370),),
    Q.IQ4_NL: ((0, 70),),
    Q.IQ4_XS: ((0, 1300),),
}


def random_blocks(
    rng: np.random.Generator, type: GGMLQuantizationType, shape: tuple[int, ...], *, magnitude: float = 0.1
) -> np.ndarray:
    """Valid random data of `type`: uint8 [*shape[:-1], row bytes]; every decoded value is finite.

    All bits are uniformly random but those of the float16 scales (either sign, subnormals among them), which
    are set so that decoded values are of the order of `magnitude`. Float types hold normal deviates.
    """
    block_size, block_bytes = GGML_QUANT_SIZES[type]
    assert shape[-1] % block_size == 0, f"{type.name} rows are multiples of {block_size}, not {shape[-1]}"
    if type in (Q.F32, Q.F16, Q.BF16):
        values = (magnitude * rng.standard_normal(shape)).astype(np.float32)
        if type == Q.BF16:
            return np.ascontiguousarray(values.view(np.uint16)[..., 1::2]).view(np.uint8)
        return values.astype(np.float32 if type == Q.F32 else np.float16).view(np.uint8)
    num_blocks = shape[-1] // block_size
    blocks = rng.integers(0, 256, (*shape[:-1], num_blocks, block_bytes), dtype=np.uint8)
    for offset, typical in F16_FIELDS[type]:
        sign = rng.choice([-1.0, 1.0], blocks.shape[:-1])
        scale = sign * rng.uniform(0.2, 1.5, blocks.shape[:-1]) * (magnitude / typical)
        blocks[..., offset : offset + 2] = scale.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], num_blocks * block_bytes)


class Typed(NamedTuple):
    """A metadata value of an explicit type. A list becomes an array of elements of `kind`.

    Bytes are written as they are, without a check, except for a STRING, which gets its length in front.
    """

    kind: int
    value: Any


RawTensor = tuple[np.ndarray, tuple[int, ...], int]  # uint8 data, shape in NumPy's order, type

CODES = {
    V.UINT8: "B",
    V.INT8: "b",
    V.UINT16: "H",
    V.INT16: "h",
    V.UINT32: "I",
    V.INT32: "i",
    V.FLOAT32: "f",
    V.BOOL: "?",
    V.UINT64: "Q",
    V.INT64: "q",
    V.FLOAT64: "d",
}


def _integer_kind(values: Sequence[int], kinds: Iterable[GGUFValueType]) -> GGUFValueType:
    """The first of `kinds` that holds all values."""
    for kind in kinds:
        limits = np.iinfo(kind.name.lower())
        if limits.min <= min(values, default=0) and max(values, default=0) <= limits.max:
            return kind
    raise OverflowError(f"no integer type holds all of {values}")


def infer(value: Any) -> Typed:
    """bool, int (UINT32 first), float (FLOAT32), str or bytes; lists of one of these (ints INT32 first) or of
    lists; a NumPy array keeps its dtype; a Typed stays."""
    if isinstance(value, Typed):
        return value
    if isinstance(value, np.ndarray):
        return Typed(V[value.dtype.name.upper()], value.tolist())
    if isinstance(value, list):
        if not value or (isinstance(value[0], int) and not isinstance(value[0], bool)):
            return Typed(_integer_kind(value, (V.INT32, V.INT64, V.UINT64)), value)
        if isinstance(value[0], list | np.ndarray) or (
            isinstance(value[0], Typed) and isinstance(value[0].value, list)
        ):
            return Typed(V.ARRAY, value)
        return Typed(infer(value[0]).kind, value)
    if isinstance(value, bool):
        return Typed(V.BOOL, value)
    if isinstance(value, int):
        return Typed(_integer_kind([value], (V.UINT32, V.INT32, V.UINT64, V.INT64)), value)
    return Typed(V.FLOAT32 if isinstance(value, float) else V.STRING, value)


def encode_string(text: str | bytes, order: str = "<") -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack(order + "Q", len(data)) + data


def encode_payload(kind: int, value: Any, order: str = "<") -> bytes:
    """A value without its type."""
    if kind == V.STRING:
        return encode_string(value, order)
    if isinstance(value, bytes):
        return value
    if kind == V.ARRAY:
        return encode_array(infer(value), order)
    return struct.pack(order + CODES[V(kind)], value)


def encode_array(array: Typed, order: str = "<") -> bytes:
    payloads = b"".join(encode_payload(array.kind, element, order) for element in array.value)
    return struct.pack(order + "IQ", array.kind, len(array.value)) + payloads


def encode_pair(key: str | bytes, value: Any, order: str = "<") -> bytes:
    kind, plain = typed = infer(value)
    if isinstance(plain, list):
        return encode_string(key, order) + struct.pack(order + "I", V.ARRAY) + encode_array(typed, order)
    return encode_string(key, order) + struct.pack(order + "I", kind) + encode_payload(kind, plain, order)


def encode_entry(
    name: str | bytes, shape: tuple[int, ...], type: int, offset: int, order: str = "<"
) -> bytes:
    """A line of the tensor table. `shape` is in NumPy's order."""
    dims = struct.pack(f"{order}I{len(shape)}Q", len(shape), *reversed(shape))
    return encode_string(name, order) + dims + struct.pack(order + "IQ", type, offset)


def assemble(
    pairs: Sequence[bytes] = (),
    entries: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    order: str = "<",
) -> bytes:
    """A file of encoded pieces, with the padding between them."""
    header = b"GGUF" + struct.pack(order + "IQQ", version, len(entries), len(pairs))
    head = header + b"".join(pairs) + b"".join(entries)
    return head + bytes(-len(head) % alignment) + data


def build_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, RawTensor] | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
    order: str = "<",
) -> bytes:
    """A whole file. `general.alignment` is added when it is not 32; `order` is struct's `<` or `>`."""
    if alignment != 32:
        metadata = {"general.alignment": alignment, **metadata}
    pairs = [encode_pair(key, value, order) for key, value in metadata.items()]
    entries, data = [], b""
    for name, (raw, shape, type) in (tensors or {}).items():
        data += bytes(-len(data) % alignment)
        entries.append(encode_entry(name, shape, type, len(data), order))
        data += raw.tobytes()
    return assemble(pairs, entries, data, version=version, alignment=alignment, order=order)


def write_gguf(
    path: str | os.PathLike[str],
    metadata: Mapping[str, Any],
    tensors: Mapping[str, RawTensor] | None = None,
    **options: Any,
) -> Path:
    """`build_gguf` into a file; returns its path."""
    Path(path).write_bytes(build_gguf(metadata, tensors, **options))
    return Path(path)
