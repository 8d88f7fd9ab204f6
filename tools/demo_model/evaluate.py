"""Measures GGUF files of the demo model on held-out stories: bits per byte and perplexity.

    python tools/demo_model/evaluate.py build/demo/data.npz build/demo/f16.gguf cllm/assets/demo.gguf

The weights are decoded and run in PyTorch in float32, so that what differs between two files is the rounding of
weights alone. It owns the measure; it must not know training.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from gguf import GGUFReader, dequantize
from model import CONTEXT, Model

HELD_OUT = ("heldout_stories", "heldout_simple")


def load_model(path: Path) -> Model:
    """The network in float32 with the decoded tensors of a GGUF file."""
    state = {}
    for tensor in GGUFReader(path).tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        state[tensor.name] = torch.from_numpy(
            dequantize(tensor.data, tensor.tensor_type).reshape(shape).copy()
        )
    model = Model().eval()
    model.load_state_dict(state)
    return model


@torch.no_grad()
def nats_per_token(model: Model, tokens: np.ndarray) -> float:
    """The mean over whole windows of `CONTEXT` tokens, each predicted from its own window only."""
    count = (len(tokens) - 1) // CONTEXT
    total = 0.0
    for begin in range(0, count * CONTEXT, CONTEXT):
        window = torch.from_numpy(tokens[begin : begin + CONTEXT + 1].astype(np.int64))
        total += float(F.cross_entropy(model(window[None, :-1])[0], window[1:]))
    return total / count


def main() -> None:
    """Prints one line for each file and kind of story."""
    parser = argparse.ArgumentParser(description="Measure the demo model.")
    parser.add_argument("data", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    args = parser.parse_args()
    data = np.load(args.data)
    for path in args.models:
        model = load_model(path)
        for name in HELD_OUT:
            tokens, num_bytes = data[name], int(data[f"{name}_bytes"])
            nats = nats_per_token(model, tokens)
            bits = nats / math.log(2) * len(tokens) / num_bytes
            print(f"{path} {name}: {bits:.4f} bits per byte, perplexity {math.exp(nats):.3f}", flush=True)


if __name__ == "__main__":
    main()
