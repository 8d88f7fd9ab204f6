"""A place in the bytes of a GGUF file: numbers, names and values are read there, checked against what there is.

It knows how GGUF writes values, and not what they mean.
"""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
from gguf.constants import GGUFValueType

from cllm.errors import ModelFileError

_DAMAGED = "the file is cut short or damaged, download it again"

_U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
_NUMBERS = {  # all value types but two; they are named as in NumPy, and stored little-endian
    int(kind): np.dtype("<" + np.dtype(kind.name.lower()).str[1:])
    for kind in GGUFValueType
    if kind not in (GGUFValueType.STRING, GGUFValueType.ARRAY)
}

# The fewest bytes an item can take: what a count is checked against before its items are read.
LEAST_STRING = 8  # its length
_LEAST_ARRAY = 4 + 8  # element type, count
_LEAST_VALUE = {kind: dtype.itemsize for kind, dtype in _NUMBERS.items()}
_LEAST_VALUE |= {GGUFValueType.STRING: LEAST_STRING, GGUFValueType.ARRAY: _LEAST_ARRAY}


class Cursor:
    """A place in the bytes of one file; every read is checked against their end first.

    `context` says what is being read, for messages.
    """

    def __init__(self, path: str, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.bytes = np.frombuffer(buffer, np.uint8)
        self.position = 0
        self.context = "header"

    def error(self, message: str, advice: str = _DAMAGED) -> ModelFileError:
        return ModelFileError(f"{self.context} (byte {self.position}): {message}; {advice}", path=self.path)

    def take(self, num_bytes: int, what: str) -> int:
        """Move past `num_bytes`; returns the position where they begin."""
        start, left = self.position, len(self.buffer) - self.position
        if num_bytes > left:
            raise self.error(f"{what} takes {num_bytes} bytes, but {left} are left")
        self.position += num_bytes
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.buffer, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(U64.unpack_from(self.buffer, self.take(8, what))[0])

    def count(self, what: str, least_bytes: int) -> int:
        """A number of items of at least `least_bytes` each, all of which must fit in the rest of the file."""
        count, left = self.u64(what), len(self.buffer) - self.position
        if count * least_bytes > left:
            raise self.error(f"{what} is {count}, at least {count * least_bytes} bytes, but {left} are left")
        return count

    def name(self) -> str:
        length = self.u64("the length of the name")
        start = self.take(length, "the name")
        try:
            return self.buffer[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"the name is not UTF-8 ({error.reason})") from error

    def value(self) -> Any:
        """A value type and the value."""
        kind = self.value_type()
        if kind == GGUFValueType.ARRAY:
            return self.array()
        if kind == GGUFValueType.STRING:
            return self.strings(1)[0]
        return self.numbers(kind, 1).item()

    def value_type(self) -> int:
        kind = self.u32("the value type")
        if kind not in _LEAST_VALUE:
            raise self.error(f"value type {kind} is unknown", "upgrade cLLM, or download the file again")
        return kind

    def array(self) -> Any:
        """An array of arrays to any depth, without recursion: `unfilled` are the lists that lack elements."""
        outermost: list[Any] = []
        unfilled = [(outermost, 1)]
        while unfilled:
            target, num_missing = unfilled.pop()
            if num_missing > 1:
                unfilled.append((target, num_missing - 1))
            kind = self.value_type()
            count = self.count("the number of elements", _LEAST_VALUE[kind])
            if kind == GGUFValueType.ARRAY:
                target.append([])
                if count:
                    unfilled.append((target[-1], count))
            elif kind == GGUFValueType.STRING:
                target.append(self.strings(count))
            else:
                target.append(self.numbers(kind, count))
        return outermost[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings. Vocabularies hold hundreds of thousands, so the loop looks up no attributes."""
        buffer, size, end = self.buffer, len(self.buffer), self.position
        unpack, length_bytes = U64.unpack_from, U64.size
        strings: list[str] = []
        for _ in range(count):
            start = end + length_bytes
            if start > size:
                break
            end = start + unpack(buffer, end)[0]
            if end > size:
                break
            try:
                strings.append(buffer[start:end].decode())
            except UnicodeDecodeError:
                strings.append(buffer[start:end].decode(errors="replace"))
        else:
            self.position = end
            return strings
        raise self.error(f"string {len(strings) + 1} of {count} passes the end of the file")

    def numbers(self, kind: int, count: int) -> np.ndarray:
        """`count` numbers or bools, read-only: a view of the file where they are aligned in it, or a copy."""
        dtype = _NUMBERS[kind]
        start = self.take(count * dtype.itemsize, "the value")
        stored = self.bytes[start : self.position]
        if kind == GGUFValueType.BOOL and count and stored.max() > 1:
            raise self.error(f"expected bools to be 0 or 1, found {stored.max()}")
        values = stored.view(dtype)
        if start % dtype.itemsize:
            values = values.copy()
            values.setflags(write=False)
        return values


def show(value: Any) -> str:
    """A value from the file, short enough for a message: strings are cut, arrays only named."""
    if isinstance(value, str):
        return repr(value[:64])
    return repr(value) if value is None or isinstance(value, int | float) else f"a {type(value).__name__}"
