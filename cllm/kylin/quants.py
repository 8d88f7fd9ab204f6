"""Owns the meaning of GGUF's number formats in plain NumPy: decoders of weight blocks, and the rounding of
activations that belongs to each weight type. It is the oracle that every kernel is tested against, and must
not know kernels, files or models. Block layouts follow ggml's `ggml-common.h`; all fields are
little-endian."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from ..errors import ModelFileError

F32Array = NDArray[np.float32]
U8Array = NDArray[np.uint8]

# The 16 values of the non-linear 4-bit types (ggml's `kvalues_iq4nl`).
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def dequantize(data: U8Array, ggml_type: GGMLQuantizationType) -> F32Array:
    """Decode uint8[..., row_bytes] of GGUF blocks to float32[..., n], bit for bit as gguf-py does.

    Raises ModelFileError for a type that has no decoder, or a row that is not a whole number of blocks."""
    decode = DECODERS.get(ggml_type)
    if decode is None:
        supported = ", ".join(t.name for t in DECODERS)
        raise ModelFileError(
            f"weights of type {ggml_type.name} are not supported: use a file with types among {supported}"
        )
    block_size, type_size = GGML_QUANT_SIZES[ggml_type]
    if data.shape[-1] % type_size:
        raise ModelFileError(
            f"a row of {ggml_type.name} weights is made of blocks of {type_size} bytes, "
            f"found {data.shape[-1]} bytes: the file is damaged"
        )
    n = data.shape[-1] // type_size * block_size
    with np.errstate(invalid="ignore", over="ignore"):  # damaged scales decode to NaN or inf, in silence
        return decode(np.ascontiguousarray(data).reshape(-1, type_size)).reshape(*data.shape[:-1], n)


def _f16(blocks: U8Array, offset: int) -> F32Array:
    """The half at byte `offset` of each block: float32[B, 1]."""
    return blocks[:, offset : offset + 2].view("<f2").astype(np.float32)


def _fields(packed: U8Array, run: int, width: int) -> U8Array:
    """Unpack uint8[B, bytes] into fields of `width` bits: uint8[B, bytes * 8 / width].

    Each `run` of bytes holds 8 / width runs of values: first the lowest bits of its bytes, then the next."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    fields = (packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8((1 << width) - 1)
    return fields.reshape(len(packed), -1)


def _scaled(scales: F32Array, quants: NDArray[np.generic]) -> F32Array:
    """quants[B, n] times scales[B, n / s], each scale for s values in a row: float32[B, n / s, s]."""
    return scales[:, :, None] * quants.reshape(*scales.shape, -1).astype(np.float32)


def _decode_f32(blocks: U8Array) -> F32Array:
    return blocks.view("<f4").astype(np.float32)


def _decode_f16(blocks: U8Array) -> F32Array:
    return _f16(blocks, 0)


def _decode_bf16(blocks: U8Array) -> F32Array:
    """A bf16 is the upper half of a float32."""
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(blocks: U8Array) -> F32Array:
    """| d f16 | q 16 bytes | -> d * (q - 8); byte i holds values i and i + 16."""
    quants = _fields(blocks[:, 2:], 16, 4).astype(np.int8) - np.int8(8)
    return _f16(blocks, 0) * quants.astype(np.float32)


def _decode_q4_1(blocks: U8Array) -> F32Array:
    """| d f16 | m f16 | q 16 bytes | -> d * q + m"""
    return _f16(blocks, 0) * _fields(blocks[:, 4:], 16, 4).astype(np.float32) + _f16(blocks, 2)


def _decode_q5_0(blocks: U8Array) -> F32Array:
    """| d f16 | qh 32 bits | ql 16 bytes | -> d * (q - 16); bit i of qh is bit 4 of value i."""
    quants = _fields(blocks[:, 6:], 16, 4) | (_fields(blocks[:, 2:6], 1, 1) << 4)
    return _f16(blocks, 0) * (quants.astype(np.int8) - np.int8(16)).astype(np.float32)


def _decode_q5_1(blocks: U8Array) -> F32Array:
    """| d f16 | m f16 | qh 32 bits | ql 16 bytes | -> d * q + m"""
    quants = _fields(blocks[:, 8:], 16, 4) | (_fields(blocks[:, 4:8], 1, 1) << 4)
    return _f16(blocks, 0) * quants.astype(np.float32) + _f16(blocks, 2)


def _decode_q8_0(blocks: U8Array) -> F32Array:
    """| d f16 | q 32 x int8 | -> d * q"""
    return _f16(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _decode_q2_k(blocks: U8Array) -> F32Array:
    """| scales 16 bytes, sc low, m high | q 64 bytes | d f16 | dmin f16 | -> d * sc * q - dmin * m, per 16"""
    scales = _f16(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    mins = _f16(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    values = _scaled(scales, _fields(blocks[:, 16:80], 32, 2)) - mins[:, :, None]
    return values.reshape(-1, 256)


def _decode_q3_k(blocks: U8Array) -> F32Array:
    """| qh 32 bytes | ql 64 bytes | scales 12 bytes | d f16 | -> d * (sc - 32) * (q - 4), per 16 values

    q is ql plus 4 where its bit of qh is set. Of the 16 6-bit scales, the first 8 bytes hold the low nibbles
    of scales i and i + 8, the last 4 bytes the upper two bits of scales i, i + 4, i + 8, i + 12."""
    quants = _fields(blocks[:, 32:96], 32, 2) | (_fields(blocks[:, :32], 32, 1) << 2)
    packed = _fields(blocks[:, 96:104], 8, 4) | (_fields(blocks[:, 104:108], 4, 2) << 4)
    scales = _f16(blocks, 108) * (packed.astype(np.int8) - np.int8(32)).astype(np.float32)
    return _scaled(scales, quants.astype(np.int8) - np.int8(4)).reshape(-1, 256)


def _scales_and_mins(blocks: U8Array) -> tuple[F32Array, F32Array]:
    """The head of Q4_K and Q5_K: | d f16 | dmin f16 | 12 bytes | -> d * sc and dmin * m, float32[B, 8].

    Of the 12, bytes 0-3 hold sc 0-3 in their low 6 bits, bytes 4-7 m 0-3, bytes 8-11 the low nibbles of sc
    4-7 and m 4-7, whose upper two bits lie on top of bytes 0-3 and 4-7."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.hstack([first & 63, (third & 15) | (first >> 6 << 4)])
    mins = np.hstack([second & 63, (third >> 4) | (second >> 6 << 4)])
    return _f16(blocks, 0) * scales.astype(np.float32), _f16(blocks, 2) * mins.astype(np.float32)


def _decode_q4_k(blocks: U8Array) -> F32Array:
    """| head 16 bytes | q 128 bytes | -> d * sc * q - dmin * m, per 32 values; 32 bytes hold 2 x 32."""
    scales, mins = _scales_and_mins(blocks)
    return (_scaled(scales, _fields(blocks[:, 16:], 32, 4)) - mins[:, :, None]).reshape(-1, 256)


def _decode_q5_k(blocks: U8Array) -> F32Array:
    """| head 16 bytes | qh 32 bytes | ql 128 bytes |, as Q4_K; bit j of qh[i] is bit 4 of value 32 j + i."""
    scales, mins = _scales_and_mins(blocks)
    quants = _fields(blocks[:, 48:], 32, 4) | (_fields(blocks[:, 16:48], 32, 1) << 4)
    return (_scaled(scales, quants) - mins[:, :, None]).reshape(-1, 256)


def _decode_q6_k(blocks: U8Array) -> F32Array:
    """| ql 128 bytes | qh 64 bytes | scales 16 x int8 | d f16 | -> d * sc * (q - 32), per 16 values

    Each half (128 values) has 64 bytes of low nibbles and 32 bytes of upper bit pairs."""
    quants = _fields(blocks[:, :128], 64, 4) | (_fields(blocks[:, 128:192], 32, 2) << 4)
    scales = _f16(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(scales, quants.astype(np.int8) - np.int8(32)).reshape(-1, 256)


def _decode_iq4_nl(blocks: U8Array) -> F32Array:
    """| d f16 | q 16 bytes | -> d * IQ4_VALUES[q]"""
    return _f16(blocks, 0) * np.array(IQ4_VALUES, np.float32)[_fields(blocks[:, 2:], 16, 4)]


def _decode_iq4_xs(blocks: U8Array) -> F32Array:
    """| d f16 | scales_h 8 x 2 bits | scales_l 8 x 4 bits | q 128 bytes |
    -> d * (sc - 32) * IQ4_VALUES[q], per 32 values; 16 bytes hold 2 x 16 values."""
    packed = _fields(blocks[:, 4:8], 1, 4) | (_fields(blocks[:, 2:4], 1, 2) << 4)
    scales = _f16(blocks, 0) * (packed.astype(np.int8) - np.int8(32)).astype(np.float32)
    values = np.array(IQ4_VALUES, np.float32)[_fields(blocks[:, 8:], 16, 4)]
    return _scaled(scales, values).reshape(-1, 256)


_T = GGMLQuantizationType

# For each supported type the function from uint8[B, block bytes] to float32[B, block size].
DECODERS: MappingProxyType[GGMLQuantizationType, Callable[[U8Array], F32Array]] = MappingProxyType(
    {
        _T.F32: _decode_f32,
        _T.F16: _decode_f16,
        _T.BF16: _decode_bf16,
        _T.Q4_0: _decode_q4_0,
        _T.Q4_1: _decode_q4_1,
        _T.Q5_0: _decode_q5_0,
        _T.Q5_1: _decode_q5_1,
        _T.Q8_0: _decode_q8_0,
        _T.Q2_K: _decode_q2_k,
        _T.Q3_K: _decode_q3_k,
        _T.Q4_K: _decode_q4_k,
        _T.Q5_K: _decode_q5_k,
        _T.Q6_K: _decode_q6_k,
        _T.IQ4_NL: _decode_iq4_nl,
        _T.IQ4_XS: _decode_iq4_xs,
    }
)

# How the kernels round the activations that meet weights of a type: ggml's `vec_dot_type` where there is an
# integer (or half) dot product, "none" where the weights are decoded to float32.
ACTIVATION_ROUNDING: MappingProxyType[GGMLQuantizationType, str] = MappingProxyType(
    {
        **dict.fromkeys((_T.Q4_K, _T.Q5_K, _T.Q6_K), "q8_K"),
        **dict.fromkeys((_T.Q8_0, _T.Q5_0, _T.Q4_0), "q8_0"),
        **dict.fromkeys((_T.Q4_1, _T.Q5_1), "q8_1"),
        _T.F16: "f16",
        _T.BF16: "bf16",
        **dict.fromkeys((_T.F32, _T.Q2_K, _T.Q3_K, _T.IQ4_NL, _T.IQ4_XS), "none"),
    }
)

# Values that share one scale, for the roundings to int8.
ROUNDING_BLOCK = MappingProxyType({"q8_K": 256, "q8_0": 32, "q8_1": 32})


def round_activations(x: F32Array, rounding: str) -> F32Array:
    """The values, float32[T, n], that kernels really multiply with in place of x, float32[T, n].

    `rounding` is a value of ACTIVATION_ROUNDING; "none" returns x itself. Raises ValueError if it is another
    string, or if n is not a whole number of blocks."""
    if rounding in ROUNDING_BLOCK:
        quants, scales = quantize_activations(x, rounding)
        return _scaled(scales, quants).reshape(x.shape)
    if rounding == "f16":
        with np.errstate(over="ignore", under="ignore"):
            return x.astype(np.float16).astype(np.float32)
    if rounding == "bf16":
        return _round_bf16(x)
    if rounding == "none":
        return x
    names = sorted(set(ACTIVATION_ROUNDING.values()))
    raise ValueError(f"unknown activation rounding {rounding!r}: expected one of {names}")


def quantize_activations(x: F32Array, rounding: str) -> tuple[NDArray[np.int8], F32Array]:
    """Round float32[T, n] to (quants int8[T, n], scales float32[T, n / block]); x is about scale * quant.

    "q8_K" is ggml's `quantize_row_q8_K_ref`: the signed value of largest magnitude (the first of equals)
    becomes -127. "q8_0" and "q8_1" are its x86 code: the largest magnitude becomes 127, the scale is stored
    as f16. A block that holds NaN or infinity, or whose scale overflows f16, has scale NaN and quants 0;
    one that is all zeros, or so small that 127 / magnitude overflows (below 4e-37), has zeros for both."""
    block = ROUNDING_BLOCK[rounding]
    if x.ndim != 2 or x.shape[1] % block:
        raise ValueError(f"{rounding} rounds blocks of {block}: expected [T, n * {block}], found {x.shape}")
    blocks = x.reshape(x.shape[0], -1, block)  # [T, B, block]
    with np.errstate(all="ignore"):
        if rounding == "q8_K":
            first = np.abs(blocks).argmax(axis=-1)[..., None]
            inverse = np.float32(-127) / np.take_along_axis(blocks, first, axis=-1)[..., 0]
            scales = np.float32(1) / inverse
        else:
            amax = np.abs(blocks).max(axis=-1)
            inverse = np.float32(127) / amax
            scales = (amax / np.float32(127)).astype(np.float16).astype(np.float32)
        valid = np.isfinite(blocks).all(axis=-1) & np.isfinite(scales)
        used = valid & np.isfinite(inverse)
        quants = np.rint(np.where(used[..., None], inverse[..., None] * blocks, 0))
    scales = np.where(used, scales, np.where(valid, np.float32(0), np.float32(np.nan)))
    return quants.astype(np.int8).reshape(x.shape), scales


def _round_bf16(x: F32Array) -> F32Array:
    """Round to the nearest bf16, ties to even, as float32. NaN stays NaN."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), np.float32(np.nan), rounded.view(np.float32))
