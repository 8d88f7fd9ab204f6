"""The GGUF reader and files that are not as they should be: each kind is refused in clear words, and no file,
however damaged, makes it crash, hand out bytes outside the file or take memory out of proportion."""

from __future__ import annotations

import builtins
import os
import re
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_builder import (
    Q,
    Typed,
    V,
    assemble,
    build_gguf,
    encode_entry,
    encode_pair,
    write_gguf,
)
from gguf_checks import check_views, file_of, read_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from cllm.errors import ModelFileError
from cllm.kylin.gguf import read_gguf


def header(num_tensors: int, num_pairs: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + rest


def array(kind: int, count: int, payload: bytes = b"") -> bytes:
    """A file of one key, an array whose elements are given as bytes."""
    pair = encode_pair("key", Typed(V.ARRAY, struct.pack("<IQ", kind, count) + payload))
    return assemble([pair], alignment=1)


def entry(
    shape: tuple[int, ...] = (4,), type: int = Q.F32, offset: int = 0, name: str | bytes = "t"
) -> bytes:
    return encode_entry(name, shape, type, offset)


def table(*entries: bytes, size: int = 32, pairs: tuple[bytes, ...] = ()) -> bytes:
    """A file of these entries and `size` bytes of data."""
    return assemble(pairs, entries, bytes(size))


def aligned(alignment: Any, *entries: bytes) -> bytes:
    return table(*entries, pairs=(encode_pair("general.alignment", alignment),))


U64_MAX = 2**64 - 1
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
KEYS, ELEMENTS = "the number of metadata keys is", "the number of elements is"
REFUSED = [
    (header(0, 0, version=1), "expected GGUF version 2 or 3, found 1; convert the model again"),
    (header(0, 0, version=4), "expected GGUF version 2 or 3, found 4; upgrade cLLM"),
    (header(0, 0, version=0), "expected GGUF version 2 or 3, found 0"),
    (build_gguf({"a": 1}, order=">"), "expected little-endian numbers, found big-endian ones"),
    (b"GGUF", "header (byte 4): the version takes 4 bytes, but 0 are left; the file is cut short"),
    (header(2**60, 0), f"the number of tensors is {2**60}, at least {2**65} bytes, but 8 are left"),
    (header(0, U64_MAX, encode_pair("k", 1)), f"{KEYS} {U64_MAX}, at least {U64_MAX * 13} bytes, but 17"),
    (header(0, 1, struct.pack("<Q", 2**63) + bytes(9)), f"the name takes {2**63} bytes, but 9 are left"),
    # Metadata.
    (build_gguf({"k": 1, b"k": 2}), "metadata key 'k' (byte 50): it occurs twice"),
    (build_gguf({b"\xff": 1}), "metadata key 1 of 1 (byte 33): the name is not UTF-8"),
    (build_gguf({b"\xed\xa0\x80": 1}), "the name is not UTF-8"),
    (build_gguf({"k": Typed(13, b"\0")}), "metadata key 'k' (byte 37): value type 13 is unknown; upgrade"),
    (header(0, 1, encode_pair("k", Typed(V.UINT64, bytes(7)))), "the value takes 8 bytes, but 7 are left"),
    (build_gguf({"k": Typed(V.BOOL, b"\2")}), "expected bools to be 0 or 1, found 2"),
    (array(V.BOOL, 3, b"\0\1\xff"), "expected bools to be 0 or 1, found 255"),
    (header(0, 1, encode_pair("k", "ab")[:-1]), "string 1 of 1 passes the end of the file"),
    (array(V.STRING, 2, struct.pack("<QQ", 0, 1)), "string 2 of 2 passes the end of the file"),
    (array(V.STRING, 2, struct.pack("<QQ", 8, 1)), "string 2 of 2 passes the end of the file"),
    (array(V.STRING, 1, struct.pack("<Q", U64_MAX)), "string 1 of 1 passes the end of the file"),
    (array(V.UINT8, 2**40), f"{ELEMENTS} {2**40}, at least {2**40} bytes, but 0 are left"),
    (array(V.UINT64, 2**61 + 1, bytes(8)), f"{ELEMENTS} {2**61 + 1}, at least {2**64 + 8} bytes, but 8"),
    (array(V.ARRAY, 2, bytes(23)), f"{ELEMENTS} 2, at least 24 bytes, but 23 are left"),
    (array(99, 1, bytes(8)), "value type 99 is unknown"),
    (array(V.ARRAY, 1, struct.pack("<IQ", 13, 0)), "value type 13 is unknown"),
    (aligned(0), "metadata key 'general.alignment' (byte 57): expected a power of two, found 0"),
    (aligned(24), "expected a power of two, found 24"),
    (aligned(-32), "expected a power of two, found -32"),
    (aligned(True), "expected a power of two, found True"),
    (aligned("x" * 100), f"expected a power of two, found '{'x' * 64}';"),
    (aligned(["32"]), "expected a power of two, found a list"),
    (aligned(2**63, entry()), "its data end at byte 16 of a data section of 0"),
    # Tensors.
    (table(entry(())), "tensor 't' (byte 37): expected 1 to 4 dimensions, found 0"),
    (table(entry((1,) * 5)), "expected 1 to 4 dimensions, found 5"),
    (table(entry((0, 8))), "expected dimensions of at least 1, found [8, 0]"),
    (table(entry(type=31)), "type id 31 is unknown to the gguf package; upgrade it (`pip install -U gguf`)"),
    (table(entry((48,), Q.Q8_0)), "expected Q8_0 rows of a multiple of 32, found 48"),
    (table(entry(offset=16)), "expected an offset of a multiple of 32, found 16"),
    (table(entry((9,))), "its data end at byte 36 of a data section of 32"),
    (table(entry(offset=2**64 - 32)), f"its data end at byte {2**64 - 16} of a data section of 32"),
    (table(entry((2**32, 2**32), Q.I8)), f"its data end at byte {2**64} of a data section of 32"),
    (table(entry((2**63, 1, 2**63, 32), Q.Q8_0)), f"its data end at byte {2**126 * 34} of a data"),
    (table(entry(), size=0), "its data end at byte 16 of a data section of 0; the file is cut short"),
    (
        table(entry(offset=32, name="a"), entry((9,)), size=64),
        "tensor 'a' (byte 90): its data overlap those of",
    ),
    (table(entry(name="a"), entry(name="b")), "tensor 'b' (byte 90): its data overlap those of tensor 'a'"),
    (table(entry(), entry(offset=32), size=64), "tensor 't' (byte 90): it occurs twice"),
    (table(entry(name=b"\x80")), "tensor 1 of 1 (byte 33): the name is not UTF-8"),
    # Other formats.
    (b"", "the file is empty; download it again"),
    (b"G", "expected its first bytes to be b'GGUF', found b'G'"),
    (b"hello world", "expected its first bytes to be b'GGUF', found b'hello wo'; check the path"),
    (bytes(4096), "not GGUF but filled with zeros, as an unfinished download is"),
    (LFS, "not GGUF but a git-LFS pointer; run `git lfs pull`"),
    (b"\n<!DOCTYPE html><html>", "not GGUF but a web page (HTML); use the link"),
    (b"\xef\xbb\xbf<html lang='en'>", "not GGUF but a web page (HTML)"),
    (b"lmgg" + bytes(64), "not GGUF but a model file from before GGUF (2023)"),
    (b"fmgg" + bytes(64), "not GGUF but a model file from before GGUF (2023)"),
    (b"tjgg" + bytes(64), "not GGUF but a model file from before GGUF (2023)"),
    (struct.pack("<Q", 8) + b'{"a":{}}', "not GGUF but a safetensors file; convert the model"),
    (b"PK\3\4" + bytes(64), "not GGUF but a zip archive, such as a PyTorch checkpoint; convert"),
    (b"\x80\x02\x8a\nl\xfc\x9cF", "not GGUF but a Python pickle"),
    (b'{\n  "version": "1.0",', "not GGUF but a JSON file, such as tokenizer.json"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=range(len(REFUSED)))
def test_bad_file_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ModelFileError, match=re.escape(message)) as caught:
        read_bytes(data)
    assert str(caught.value).startswith(f"{caught.value.path}: ")


def test_what_is_no_readable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelFileError, match=r"nowhere\.gguf: no such file; check the path"):
        read_gguf(tmp_path / "nowhere.gguf")
    with pytest.raises(ModelFileError, match=r"this is a directory; name the \.gguf file in it"):
        read_gguf(tmp_path)
    with pytest.raises(ModelFileError, match="cannot open this file: embedded null"):
        read_gguf("a\0b")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="expected a regular file, found a pipe"):
        read_gguf(tmp_path / "pipe")

    def denied(*_: object) -> None:  # chmod would not stop root
        raise PermissionError

    path = write_gguf(tmp_path / "model.gguf", {})
    monkeypatch.setattr(builtins, "open", denied)
    with pytest.raises(ModelFileError, match="no permission to read this; change its owner or mode"):
        read_gguf(path)


# Damage: whatever the bytes, the file opens or is refused.


def sample() -> bytes:
    """A small file with one of everything."""
    numbers = {kind.name: Typed(kind, 1) for kind in V if kind not in (V.STRING, V.ARRAY)}
    values = {
        "s": "naïve",
        "l": ["a", "bc", ""],
        "i": [1, -2, 3],
        "b": [True, False],
        "n": [[1], [], [["x"]]],
    }
    raws = {
        "x": (Q.Q4_0, (2, 64), (2, 36)),
        "y": (Q.F16, (5,), (10,)),
        "z": (Q.Q6_K, (1, 1, 2, 256), (1, 1, 2, 210)),
    }
    tensors = {name: (np.full(size, 7, np.uint8), shape, type) for name, (type, shape, size) in raws.items()}
    return build_gguf(numbers | values, tensors, alignment=8)


PEAK_FACTOR, PEAK_CONSTANT = 24, 64 * 1024  # memory to file size: Python's objects for the shortest items
SAMPLE = sample()
HEAD_BYTES = len(SAMPLE) - 2 * 210  # all but the last tensor's data, whose bytes mean nothing to the reader
EXTREMES = [0, 1, 2, 8, 9, 13, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**61, 2**63 - 1, 2**63, 2**64 - 1]


def opens(data: bytes) -> bool:
    """Whether it opens; otherwise it is refused. Memory is bounded by the file's size either way."""
    with file_of(data) as path:
        tracemalloc.start()
        try:
            file = read_gguf(path)
        except ModelFileError:
            return False
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= PEAK_FACTOR * len(data) + PEAK_CONSTANT
        check_views(file, len(data))
        return True


def test_every_truncation_is_refused() -> None:
    assert opens(SAMPLE)
    for length in range(len(SAMPLE)):
        with pytest.raises(ModelFileError):
            read_bytes(SAMPLE[:length])


@pytest.mark.parametrize("code", ["B", "I", "Q"])
def test_extreme_values_at_every_byte(code: str) -> None:
    size = struct.calcsize(code)
    outcomes = set()
    for position in range(4, HEAD_BYTES - size):
        value = EXTREMES[position % len(EXTREMES)] % 256**size
        patch = struct.pack("<" + code, value)
        outcomes.add(opens(SAMPLE[:position] + patch + SAMPLE[position + size :]))
    assert outcomes == {True, False}


patches = st.tuples(
    st.integers(4, HEAD_BYTES),
    st.one_of(
        st.sampled_from(EXTREMES).map(lambda value: struct.pack("<Q", value)),
        st.sampled_from(EXTREMES).map(lambda value: struct.pack("<Q", value)[:4]),
        st.binary(min_size=1, max_size=12),
    ),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(patches, min_size=1, max_size=4), st.integers(HEAD_BYTES, len(SAMPLE)))
def test_mutated_files(changes: list[tuple[int, bytes]], length: int) -> None:
    data = bytearray(SAMPLE)
    for position, patch in changes:
        data[position : position + len(patch)] = patch
    opens(bytes(data[:length]))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 3), st.integers(0, 3))
def test_random_bytes_after_a_valid_header(rest: bytes, num_tensors: int, num_pairs: int) -> None:
    opens(header(num_tensors, num_pairs, rest))


SHORT = [f"{n:x}" for n in range(5000)]
DENSE = {
    "keys": header(0, 5000, b"".join(encode_pair(name, Typed(V.UINT8, 200)) for name in SHORT)),
    "tensors": assemble(
        [encode_pair("general.alignment", 1)],
        [entry((1,), Q.I8, n, name) for n, name in enumerate(SHORT)],
        bytes(5000),
        alignment=1,
    ),
    "arrays": array(V.ARRAY, 5000, struct.pack("<IQ", V.UINT64, 0) * 5000),
    "unaligned arrays": array(V.ARRAY, 5000, struct.pack("<IQH", V.UINT16, 1, 7) * 5000),
    "deep arrays": array(V.ARRAY, 1, struct.pack("<IQ", V.ARRAY, 1) * 5000 + struct.pack("<IQ", V.INT8, 0)),
    "wide strings": array(V.STRING, 5000, (struct.pack("<Q", 5) + "🙂a".encode()) * 5000),
}


@pytest.mark.parametrize("name", DENSE)
def test_densest_files_take_bounded_memory(name: str) -> None:
    assert opens(DENSE[name])
