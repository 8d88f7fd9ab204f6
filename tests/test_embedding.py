"""The compiled look-up of embedding rows gives the bits of NumPy's decoders."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cllm.kylin.embedding import _DECODERS, Embedding
from cllm.kylin.quants import DECODERS, dequantize


def embedding(ggml_type: GGMLQuantizationType, num_rows: int, num_blocks: int) -> SimpleNamespace:
    """Rows of random bytes: every code and scale, NaN and infinities among them. As in a mapped file, read only."""
    block_size, block_bytes = GGML_QUANT_SIZES[ggml_type]
    data = np.random.default_rng(1).integers(0, 256, (num_rows, num_blocks * block_bytes), np.uint8)
    data.flags.writeable = False
    return SimpleNamespace(type=ggml_type, shape=(num_rows, num_blocks * block_size), data=data)


@pytest.mark.parametrize("ggml_type", sorted(DECODERS), ids=lambda ggml_type: ggml_type.name)
def test_rows_have_the_bits_of_the_decoder(ggml_type: GGMLQuantizationType) -> None:
    tensor = embedding(ggml_type, 40, 3)
    for ids in ([39], [0, 39, 7, 7, 20]):
        rows = Embedding(tensor).rows(np.array(ids, np.int32))
        expected = dequantize(tensor.data[ids], ggml_type)
        assert (rows.shape, rows.dtype) == (expected.shape, np.float32)
        is_nan = np.isnan(expected)
        np.testing.assert_array_equal(np.isnan(rows), is_nan)
        np.testing.assert_array_equal(rows.view(np.uint32)[~is_nan], expected.view(np.uint32)[~is_nan])


def test_the_usual_types_are_compiled() -> None:
    assert {kind.name for kind in _DECODERS} == {"Q4_K", "Q5_K", "Q6_K", "Q8_0"}
