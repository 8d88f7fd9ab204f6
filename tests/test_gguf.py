"""The GGUF reader: what it returns for good files, and how it puts split files together."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_builder import (
    F16_FIELDS,
    Q,
    Typed,
    V,
    assemble,
    build_gguf,
    encode_entry,
    random_blocks,
    write_gguf,
)
from gguf_checks import check_views, read_bytes

from cllm.errors import ModelFileError
from cllm.kylin.gguf import read_gguf


def filled(
    type: GGMLQuantizationType, shape: tuple[int, ...], seed: int = 0
) -> tuple[np.ndarray, tuple[int, ...], int]:
    """A tensor for the builder, of random bytes."""
    block_size, block_bytes = GGML_QUANT_SIZES[type]
    row_bytes = shape[-1] // block_size * block_bytes
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], row_bytes), np.uint8)
    return raw, shape, type


# What it returns.

SCALARS = [
    *[Typed(kind, limit) for kind in V if "INT" in kind.name for limit in (0, 1)],
    *[Typed(kind, int(np.iinfo(kind.name.lower()).min)) for kind in V if "INT" in kind.name],
    *[Typed(kind, int(np.iinfo(kind.name.lower()).max)) for kind in V if "INT" in kind.name],
    Typed(V.FLOAT32, 0.15625),
    Typed(V.FLOAT32, float("-inf")),
    Typed(V.FLOAT64, 0.1),
    Typed(V.BOOL, False),
    Typed(V.BOOL, True),
    Typed(V.STRING, ""),
    Typed(V.STRING, "naïve 漢字 🙂\0"),
]


@pytest.mark.parametrize("version", [2, 3])
def test_scalars_round_trip(version: int) -> None:
    file = read_bytes(build_gguf({f"key.{n}": value for n, value in enumerate(SCALARS)}, version=version))
    assert file.version == version
    assert list(file.metadata.values()) == [value.value for value in SCALARS]
    assert [type(value) for value in file.metadata.values()] == [type(value.value) for value in SCALARS]


@pytest.mark.parametrize(
    "kind", [kind for kind in V if kind not in (V.STRING, V.ARRAY)], ids=lambda kind: kind.name
)
def test_number_arrays_are_read_only_and_typed(kind: gguf.GGUFValueType) -> None:
    dtype = np.dtype(kind.name.lower())
    values = np.arange(7).astype(dtype)
    # A key one byte longer moves the array by one byte, so that some are aligned and some are not.
    pairs = {"k" * n: Typed(kind, values.tolist()) for n in range(1, 17)} | {"empty": Typed(kind, [])}
    data = build_gguf(pairs)
    file = read_bytes(data)
    check_views(file, len(data))
    assert file.metadata.pop("empty").shape == (0,)
    for array in file.metadata.values():
        assert array.dtype == dtype
        assert array.dtype.isnative
        assert array.flags.aligned
        np.testing.assert_array_equal(array, values)
    assert any(array.base is not None for array in file.metadata.values())


def test_strings_that_are_not_utf8_are_replaced() -> None:
    file = read_bytes(
        build_gguf({"one": b"a\xffb", "many": ["x", b"\xe2\x82", "", "é"], "none": Typed(V.STRING, [])})
    )
    assert file.metadata == {"one": "a\ufffdb", "many": ["x", "\ufffd", "", "é"], "none": []}


def test_nested_arrays_become_lists() -> None:
    nested = [[1, 2], ["a", "b"], [[True], []], Typed(V.ARRAY, []), Typed(V.FLOAT32, [0.5])]
    file = read_bytes(build_gguf({"nested": Typed(V.ARRAY, nested), "after": 7}))
    numbers, strings, deeper, empty, floats = file.metadata["nested"]
    np.testing.assert_array_equal(numbers, np.array([1, 2], np.int32), strict=True)
    assert strings == ["a", "b"]
    np.testing.assert_array_equal(deeper[0], np.array([True]), strict=True)
    assert deeper[1].shape == (0,)
    assert empty == []
    np.testing.assert_array_equal(floats, np.array([0.5], np.float32), strict=True)
    assert file.metadata["after"] == 7


def test_nesting_has_no_depth_limit() -> None:
    depth = 100_000
    levels = struct.pack("<IQ", V.ARRAY, 1) * (depth - 1) + struct.pack("<IQB", V.UINT8, 1, 42)
    value = read_bytes(build_gguf({"deep": Typed(V.ARRAY, levels)})).metadata["deep"]
    for _ in range(depth - 1):
        (value,) = value
    assert value.tolist() == [42]


@pytest.mark.parametrize("alignment", [1, 8, 32, 64, 4096])
def test_every_tensor_type_and_rank(alignment: int) -> None:
    tensors = {}
    for number, (type, (block_size, _)) in enumerate(GGML_QUANT_SIZES.items()):
        for rank in range(1, 5):
            tensors[f"{type.name}.{rank}"] = filled(type, (*(2, 1, 3)[: rank - 1], 2 * block_size), number)
    data = build_gguf({"name": "x"}, tensors, alignment=alignment)
    file = read_bytes(data)
    check_views(file, len(data))
    assert list(file.tensors) == list(tensors)
    for name, (raw, shape, type) in tensors.items():
        tensor = file.tensors[name]
        assert (tensor.name, tensor.shape, tensor.type, tensor.nbytes) == (name, shape, type, raw.nbytes)
        np.testing.assert_array_equal(tensor.data, raw, strict=True)


def test_tensors_may_lie_in_any_order() -> None:
    entries = [encode_entry("late", (8,), Q.F32, 64), encode_entry("early", (8,), Q.F32, 0)]
    file = read_bytes(assemble([], entries, bytes(range(96))))
    assert [(name, tensor.data[0]) for name, tensor in file.tensors.items()] == [("late", 64), ("early", 0)]


def test_vocabulary_only_and_empty_files(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "vocab.gguf", {"tokenizer.ggml.tokens": ["a", "b"]})
    file = read_gguf(str(path))
    assert (file.path, file.tensors) == (str(path), {})
    assert file.metadata == {"tokenizer.ggml.tokens": ["a", "b"]}
    assert read_bytes(build_gguf({})).metadata == {}


def test_file_beyond_four_gibibytes(tmp_path: Path) -> None:
    offset = 2**32 + 64
    head = assemble([], [encode_entry("far", (2, 4), Q.F32, offset)])
    path = tmp_path / "sparse.gguf"
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + offset)
        file.write(bytes(range(32)))
    np.testing.assert_array_equal(read_gguf(path).tensors["far"].data.ravel(), np.arange(32))


def test_views_outlive_the_file_and_its_name() -> None:
    tensor = read_bytes(build_gguf({}, {"t": filled(Q.F32, (4,), seed=3)})).tensors["t"]
    np.testing.assert_array_equal(tensor.data, filled(Q.F32, (4,), seed=3)[0])


@pytest.mark.parametrize("type", [*F16_FIELDS, Q.F32, Q.F16, Q.BF16], ids=lambda type: type.name)
def test_random_blocks_decode_to_finite_values(type: GGMLQuantizationType) -> None:
    values = gguf.quants.dequantize(random_blocks(np.random.default_rng(0), type, (3, 512)), type)
    assert values.shape == (3, 512)
    assert 0.05 < values.std() < 0.2


# Agreement with the gguf package's writer.


def test_agrees_with_gguf_py_writer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama")
    writer.add_custom_alignment(64)
    writer.add_uint64("u64", 2**63)
    writer.add_float64("f64", 0.1)
    writer.add_token_list(["<s>", "▁a", "b"])
    writer.add_token_scores([0.0, -1.5, -2.5])
    writer.add_array("nested", [[1, 2], [3]])
    weights = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    writer.add_tensor("float", weights)
    packed = gguf.quants.quantize(weights, Q.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=Q.Q8_0)
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    file = read_gguf(tmp_path / "model.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert (file.metadata["u64"], file.metadata["f64"]) == (2**63, 0.1)
    assert file.metadata["tokenizer.ggml.tokens"] == ["<s>", "▁a", "b"]
    np.testing.assert_array_equal(file.metadata["tokenizer.ggml.scores"], np.float32([0.0, -1.5, -2.5]))
    assert [array.tolist() for array in file.metadata["nested"]] == [[1, 2], [3]]
    np.testing.assert_array_equal(file.tensors["float"].data.view(np.float32), weights)
    np.testing.assert_array_equal(file.tensors["packed"].data, packed)
    assert (file.tensors["packed"].shape, file.tensors["packed"].type) == ((3, 64), Q.Q8_0)


def test_agrees_with_gguf_py_split_writer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "llama", split_max_tensors=2)
    weights = {f"t{n}": np.full((2, 32), n, np.float32) for n in range(5)}
    for name, array in weights.items():
        writer.add_tensor(name, array)
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()
    file = read_gguf(tmp_path / "model-00002-of-00003.gguf")
    assert list(file.tensors) == list(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(file.tensors[name].data.view(np.float32), array)


# Split files.


def write_parts(
    folder: Path, changes: dict[int, dict[str, Any]] | None = None, names: str = "abc"
) -> list[Path]:
    """Three parts of one tensor each; `changes` replaces metadata of a part, by its index."""
    paths = []
    for n in range(3):
        split = {"split.no": n, "split.count": 3, "split.tensors.count": 3, "which": n} | (changes or {}).get(
            n, {}
        )
        metadata = {key: value for key, value in split.items() if value is not None}
        path = folder / f"model-0000{n + 1}-of-00003.gguf"
        paths.append(write_gguf(path, metadata, {names[n]: filled(Q.F32, (4,), n)}))
    return paths


def test_any_part_opens_all_parts(tmp_path: Path) -> None:
    for path in write_parts(tmp_path):
        file = read_gguf(path)
        assert (file.path, file.metadata["which"]) == (str(path), 0)
        for n, name in enumerate("abc"):
            np.testing.assert_array_equal(file.tensors[name].data, filled(Q.F32, (4,), n)[0])


@pytest.mark.parametrize(
    ("changes", "names", "message"),
    [
        ({2: {"split.no": 1}}, "abc", "00003-of-00003.gguf: expected part 3 of 3, found 2 of 3"),
        ({1: {"split.count": 4}}, "abc", "00002-of-00003.gguf: expected part 2 of 3, found 2 of 4"),
        (
            {1: {"split.no": None}},
            "abc",
            "00002-of-00003.gguf: expected a whole number as split.no, found None",
        ),
        ({1: {"split.count": "3"}}, "abc", "expected a whole number as split.count, found '3'"),
        ({0: {"split.count": [3]}}, "abc", "expected a whole number as split.count, found a ndarray"),
        ({0: {"split.no": True}}, "abc", "expected a whole number as split.no, found True"),
        ({0: {"split.no": 1}}, "abc", "this is part 2 of 3, so its name must end in -00002-of-00003.gguf"),
        ({0: {"split.no": 2**64 - 1}}, "abc", "this is part 18446744073709551616 of 3"),
        ({0: {"split.count": 2**32 - 1}}, "abc", "name must end in -00001-of-4294967295.gguf"),
        ({0: {"split.tensors.count": 4}}, "abc", "expected 4 tensors in 3 parts, found 3"),
        (
            {0: {"split.tensors.count": None}},
            "abc",
            "expected a whole number as split.tensors.count, found None",
        ),
        ({}, "aba", "00003-of-00003.gguf: tensor 'a' is in an earlier part too; download all parts again"),
    ],
)
def test_bad_splits_are_refused(
    tmp_path: Path, changes: dict[int, dict[str, Any]], names: str, message: str
) -> None:
    path = write_parts(tmp_path, changes, names)[0]
    with pytest.raises(ModelFileError, match=re.escape(message)):
        read_gguf(path)


def test_missing_and_renamed_parts_are_named(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    paths[1].unlink()
    with pytest.raises(ModelFileError, match="part 2 of 3 is missing; download it") as caught:
        read_gguf(paths[2])
    assert caught.value.path == str(paths[1])
    renamed = paths[0].rename(tmp_path / "model.gguf")
    with pytest.raises(
        ModelFileError, match=r"this is part 1 of 3, so its name must end in -00001-of-00003\.gguf"
    ):
        read_gguf(renamed)


def test_a_part_beyond_the_last_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path)
    path = write_gguf(tmp_path / "model-00004-of-00003.gguf", {"split.no": 3, "split.count": 3})
    with pytest.raises(ModelFileError, match="this is part 4 of 3"):
        read_gguf(path)
