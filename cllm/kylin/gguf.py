"""Opens GGUF files: metadata as Python values, tensors as read-only views of the mapped file. It owns the
container (header, metadata, tensor table, split files) and nothing else: it knows no architecture and decodes
no weight. Files come from strangers, so every count, length, type and offset is checked, in Python integers,
against the bytes that are there before it is used; no allocation is sized by an unchecked number.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
Split files: the `split.*` keys and file names of llama.cpp's gguf-split.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType

from cllm.errors import ModelFileError

from .gguf_cursor import LEAST_STRING, U64, Cursor, show

_SUPPORTED_VERSIONS = (2, 3)
_MAX_DIMS = 4  # GGML_MAX_DIMS
_REJOIN = "download all parts again, from one place, under their published names"

_TENSOR_TYPES = {int(type): type for type in GGML_QUANT_SIZES}

# The fewest bytes an item can take: what a count is checked against before its items are read.
_LEAST_PAIR = LEAST_STRING + 4 + 1  # key, value type, value
_LEAST_TENSOR = LEAST_STRING + 4 + 8 + 4 + 8  # name, number of dimensions, one dimension, type, offset

_OLD_GGML = "a model file from before GGUF (2023); download the model as GGUF, or convert it again"
_WEB_PAGE = "a web page (HTML); use the link that downloads the file itself"
_JSON = "a JSON file, such as tokenizer.json or config.json; name the model's .gguf file instead"
_FOREIGN_STARTS = {  # in lower case
    b"version https://git-lfs": "a git-LFS pointer; run `git lfs pull`, or download the file itself",
    b"<!doctype": _WEB_PAGE,
    b"<html": _WEB_PAGE,
    b"lmgg": _OLD_GGML,
    b"fmgg": _OLD_GGML,
    b"tjgg": _OLD_GGML,
    b"pk\x03\x04": "a zip archive, such as a PyTorch checkpoint; convert the model to GGUF",
    b"\x80\x02": "a Python pickle, such as an old PyTorch checkpoint; convert the model to GGUF",
    b"{": _JSON,
    b"[": _JSON,
}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """One tensor, still encoded. `shape` is in NumPy's order (rows first; a GGUF file lists it reversed).

    `data` is a read-only, zero-copy view of the file: uint8 [*shape[:-1], bytes of one row].
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    data: np.ndarray = field(repr=False)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, eq=False)
class GGUFFile:
    """What a file holds. The mapping lives as long as any view of it.

    `metadata` values: int, float, bool, str; arrays of numbers or bools are read-only 1-D NumPy arrays, those
    of strings are list[str], those of arrays lists of these. `tensors` keeps the order of the file.
    """

    path: str
    version: int
    metadata: dict[str, Any] = field(repr=False)
    tensors: dict[str, Tensor] = field(repr=False)


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Open a GGUF file of any architecture and tensor types; any part of a split file opens all its parts.

    Of a split file, `path` is the part named and `metadata` the first part's. No tensor is decoded or copied;
    the file must not shrink while it is in use. Raises ModelFileError when it is missing, of another format,
    damaged or cut short.
    """
    opened = _read_file(os.fspath(path))
    num_parts = _split_key(opened, "split.count") if "split.count" in opened.metadata else 1
    return opened if num_parts <= 1 else _read_parts(opened, num_parts)


def _read_parts(opened: GGUFFile, num_parts: int) -> GGUFFile:
    """All parts of the split file that `opened` is one of, as one file."""
    number = _split_key(opened, "split.no")
    suffix = _part_suffix(number, num_parts)
    if not 0 <= number < num_parts or not opened.path.endswith(suffix):
        message = f"this is part {number + 1} of {num_parts}, so its name must end in {suffix}; {_REJOIN}"
        raise ModelFileError(message, path=opened.path)
    stem = opened.path.removesuffix(suffix)
    parts = [opened if n == number else _read_part(stem, n, num_parts) for n in range(num_parts)]
    tensors: dict[str, Tensor] = {}
    for part in parts:
        if repeated := tensors.keys() & part.tensors.keys():
            message = f"tensor {show(min(repeated))} is in an earlier part too; {_REJOIN}"
            raise ModelFileError(message, path=part.path)
        tensors |= part.tensors
    expected = _split_key(parts[0], "split.tensors.count")
    if len(tensors) != expected:
        message = f"expected {expected} tensors in {num_parts} parts, found {len(tensors)}; {_REJOIN}"
        raise ModelFileError(message, path=opened.path)
    return GGUFFile(opened.path, parts[0].version, parts[0].metadata, tensors)


def _read_part(stem: str, number: int, num_parts: int) -> GGUFFile:
    path = stem + _part_suffix(number, num_parts)
    if not os.path.exists(path):
        message = f"part {number + 1} of {num_parts} is missing; download it to the folder of the others"
        raise ModelFileError(message, path=path)
    part = _read_file(path)
    found = _split_key(part, "split.no"), _split_key(part, "split.count")
    if found != (number, num_parts):
        message = f"expected part {number + 1} of {num_parts}, found {found[0] + 1} of {found[1]}; {_REJOIN}"
        raise ModelFileError(message, path=path)
    return part


def _part_suffix(number: int, num_parts: int) -> str:
    return f"-{number + 1:05d}-of-{num_parts:05d}.gguf"


def _split_key(file: GGUFFile, key: str) -> int:
    value = file.metadata.get(key)
    if type(value) is not int:
        message = f"expected a whole number as {key}, found {show(value)}; {_REJOIN}"
        raise ModelFileError(message, path=file.path)
    return value


def _read_file(path: str) -> GGUFFile:
    """One file by itself, a part or not."""
    cursor = Cursor(path, _map_file(path))
    version = _read_version(cursor)
    num_tensors = cursor.count("the number of tensors", _LEAST_TENSOR)
    num_pairs = cursor.count("the number of metadata keys", _LEAST_PAIR)
    metadata: dict[str, Any] = {}
    for number in range(1, num_pairs + 1):
        cursor.context = f"metadata key {number} of {num_pairs}"
        key = cursor.name()
        cursor.context = f"metadata key {show(key)}"
        if key in metadata:
            raise cursor.error("it occurs twice")
        metadata[key] = cursor.value()
    entries: dict[str, _TensorEntry] = {}
    for number in range(1, num_tensors + 1):
        cursor.context = f"tensor {number} of {num_tensors}"
        entry = _read_tensor_entry(cursor)
        if entry.name in entries:
            raise cursor.error("it occurs twice")
        entries[entry.name] = entry
    cursor.context = "metadata key 'general.alignment'"
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.error(f"expected a power of two, found {show(alignment)}")
    return GGUFFile(path, version, metadata, _map_tensors(cursor, list(entries.values()), alignment))


def _map_file(path: str) -> mmap.mmap:
    """The bytes of a regular file that is not empty."""
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError("this is a directory; name the .gguf file in it", path=path)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would block
            raise ModelFileError("expected a regular file, found a pipe, socket or device", path=path)
        if status.st_size == 0:
            raise ModelFileError("the file is empty; download it again", path=path)
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise ModelFileError("no such file; check the path", path=path) from error
    except PermissionError as error:
        raise ModelFileError("no permission to read this; change its owner or mode", path=path) from error
    except (OSError, ValueError) as error:
        raise ModelFileError(f"cannot open this file: {error}", path=path) from error


def _read_version(cursor: Cursor) -> int:
    """Check that the file is GGUF, in a byte order and a version that can be read."""
    if cursor.buffer[:4] != b"GGUF":
        raise ModelFileError(f"this is not GGUF but {_describe_foreign(cursor.buffer)}", path=cursor.path)
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version and version & 0xFFFF == 0:
        raise cursor.error(
            "expected little-endian numbers, found big-endian ones",
            "download a little-endian file, or convert this one with `gguf-convert-endian FILE little`",
        )
    if version not in _SUPPORTED_VERSIONS:
        advice = "convert the model again" if version == 1 else "upgrade cLLM, or download the file again"
        raise cursor.error(f"expected GGUF version 2 or 3, found {version}", advice)
    return version


def _describe_foreign(buffer: mmap.mmap) -> str:
    """What a file that is not GGUF seems to be, and what to do."""
    head = buffer[:256]
    if head[8:9] == b"{" and U64.unpack_from(head)[0] <= len(buffer) - 8:
        return "a safetensors file; convert the model to GGUF"
    if not any(head):
        return "filled with zeros, as an unfinished download is; download it again"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for start, description in _FOREIGN_STARTS.items():
        if text.startswith(start):
            return description
    return f"of an unknown format: expected its first bytes to be b'GGUF', found {head[:8]!r}; check the path"


class _TensorEntry(NamedTuple):
    """A line of the tensor table. `offset` counts bytes from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    row_bytes: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape[:-1]) * self.row_bytes


def _read_tensor_entry(cursor: Cursor) -> _TensorEntry:
    name = cursor.name()
    cursor.context = f"tensor {show(name)}"
    num_dims = cursor.u32("the number of dimensions")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise cursor.error(f"expected 1 to {_MAX_DIMS} dimensions, found {num_dims}")
    dims = [cursor.u64("a dimension") for _ in range(num_dims)]
    if min(dims) < 1:
        raise cursor.error(f"expected dimensions of at least 1, found {dims}")
    type_id = cursor.u32("the tensor type")
    if type_id not in _TENSOR_TYPES:
        raise cursor.error(
            f"type id {type_id} is unknown to the gguf package",
            "upgrade it (`pip install -U gguf`), or download the model in another quantisation",
        )
    type = _TENSOR_TYPES[type_id]
    block_size, block_bytes = GGML_QUANT_SIZES[type]
    if dims[0] % block_size:
        raise cursor.error(f"expected {type.name} rows of a multiple of {block_size}, found {dims[0]}")
    row_bytes = dims[0] // block_size * block_bytes
    return _TensorEntry(name, tuple(reversed(dims)), type, row_bytes, cursor.u64("the offset"))


def _map_tensors(cursor: Cursor, entries: list[_TensorEntry], alignment: int) -> dict[str, Tensor]:
    """Views of the data section, which begins at the first multiple of `alignment` after the tensor table."""
    data = cursor.bytes[-(-cursor.position // alignment) * alignment :]
    previous: _TensorEntry | None = None
    for entry in sorted(entries, key=lambda entry: entry.offset):
        cursor.context = f"tensor {show(entry.name)}"
        if entry.offset % alignment:
            raise cursor.error(f"expected an offset of a multiple of {alignment}, found {entry.offset}")
        if entry.end > data.size:
            raise cursor.error(f"its data end at byte {entry.end} of a data section of {data.size}")
        if previous is not None and entry.offset < previous.end:
            raise cursor.error(f"its data overlap those of tensor {show(previous.name)}")
        previous = entry
    views = (data[entry.offset : entry.end].reshape(*entry.shape[:-1], entry.row_bytes) for entry in entries)
    return {e.name: Tensor(e.name, e.shape, e.type, view) for e, view in zip(entries, views, strict=True)}
