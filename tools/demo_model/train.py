"""Trains the demo model for a given time on one GPU, on a learning rate that follows the clock.

    python tools/demo_model/train.py build/demo/data.npz weights.npz --seconds 360 --log loss.csv

It owns the mixture of texts, the optimisers and the schedule. Needs PyTorch and NumPy; without a GPU it runs,
slowly, to be tried out. It must not know text or GGUF files.
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from model import CONTEXT, Model
from torch import Tensor

MUON_LR, ADAM_LR, MUON_DECAY, MOMENTUM, DROPOUT = 0.01, 3e-3, 0.4, 0.95, 0.2
WARM_UP, DECAY_FROM = 0.02, 0.4  # parts of the time; the rate then falls to 0 in a line
LAST_PART_FROM = 0.9
FIRST_MIX = {"stories": 0.84, "simple": 0.04, "tidy": 0.06, "chat": 0.06}
LAST_MIX = {"stories": 0.20, "tidy": 0.60, "chat": 0.20}
MAX_TEXTS = 64  # that one window is packed of, at most
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Stream:
    """The tokens of one kind of text, on the device."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray) -> None:
        self.tokens = torch.from_numpy(tokens.astype(np.int32)).to(DEVICE)
        self.starts = torch.from_numpy(starts.astype(np.int64)).to(DEVICE)
        self.is_long = starts[-1] / (len(starts) - 1) > CONTEXT

    def windows(self, count: int) -> Tensor:
        """[count, CONTEXT + 1]: long texts from any place on, short ones packed whole in random order."""
        at = torch.arange(CONTEXT + 1, device=DEVICE)
        if self.is_long:
            begins = torch.randint(len(self.tokens) - CONTEXT, (count, 1), device=DEVICE)
            return self.tokens[begins + at]
        chosen = torch.randint(len(self.starts) - 1, (count, MAX_TEXTS), device=DEVICE)
        ends = (self.starts[chosen + 1] - self.starts[chosen]).cumsum(1)  # of each text, in the window
        which = torch.searchsorted(ends, at.expand(count, -1).contiguous(), right=True)
        which.clamp_(max=MAX_TEXTS - 1)
        # A token lies as far before its text's end in the stream as in the window.
        source = self.starts[chosen.gather(1, which) + 1] + at - ends.gather(1, which)
        return self.tokens[source.clamp(max=len(self.tokens) - 1)]


def sample_batch(
    streams: dict[str, Stream], mix: dict[str, float], size: int, rng: np.random.Generator
) -> Tensor:
    """[size, CONTEXT + 1] token ids; each row is of one kind, drawn from `mix`."""
    counts = rng.multinomial(size, list(mix.values()))
    return torch.cat([streams[name].windows(int(n)) for name, n in zip(mix, counts, strict=True) if n]).long()


class Muon:
    """Momentum whose update is made orthogonal by five Newton-Schulz steps (Jordan et al., 2024).

    Matrices of one shape are updated together. The update of an [n, m] matrix is scaled by max(1, n/m)^0.5.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        shapes = dict.fromkeys(p.shape for p in parameters)
        self.groups = [[p for p in parameters if p.shape == shape] for shape in shapes]
        self.momentum = [torch.zeros_like(torch.stack(group)) for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, momentum in zip(self.groups, self.momentum, strict=True):
            grad = torch.stack([p.grad for p in group])
            momentum.lerp_(grad, 1 - MOMENTUM)
            update = orthogonalize(grad.lerp(momentum, MOMENTUM))
            scale = max(1, grad.shape[1] / grad.shape[2]) ** 0.5
            torch._foreach_mul_(group, 1 - lr * MUON_DECAY)
            torch._foreach_add_(group, list(update.float().unbind()), alpha=-lr * scale)


def orthogonalize(x: Tensor) -> Tensor:
    """[k, n, m], each matrix with its singular values brought near 1, in bfloat16."""
    x = x.bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if is_tall else x


def loss_of(model: torch.nn.Module, windows: Tensor) -> Tensor:
    """The mean cross-entropy in nats, computed in bfloat16 on a GPU."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=DEVICE.type == "cuda"):
        logits = model(windows[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: Model, tokens: np.ndarray, num_bytes: int) -> float:
    """Over whole windows of the tokens, each predicted from its own window only."""
    model.eval()
    count = (len(tokens) - 1) // CONTEXT
    at = np.arange(count)[:, None] * CONTEXT + np.arange(CONTEXT + 1)
    windows = torch.from_numpy(tokens[at].astype(np.int64)).to(DEVICE)
    loss = sum(float(loss_of(model, part)) * len(part) for part in windows.split(16)) / count
    model.train()
    return loss / math.log(2) * len(tokens) / num_bytes


def rate_at(part: float) -> float:
    """The learning rate's factor when `part` of the time has gone."""
    return min(1.0, part / WARM_UP, (1 - part) / (1 - DECAY_FROM))


def train(data: dict[str, np.ndarray], seconds: float, batch_size: int, log_path: Path) -> Model:
    """Trains for `seconds`, compilation apart, and logs the loss and the held-out bits per byte."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    streams = {name: Stream(data[name], data[f"{name}_starts"]) for name in FIRST_MIX}
    model = Model(DROPOUT).to(DEVICE)
    matrices = [p for p in model.blk.parameters() if p.ndim == 2]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or name == "token_embd.weight"]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    fast_loss = torch.compile(loss_of) if DEVICE.type == "cuda" else loss_of
    fast_loss(model, sample_batch(streams, FIRST_MIX, batch_size, rng)).backward()  # compiles
    log = csv.writer(log_path.open("w"))
    log.writerow(["seconds", "tokens", "train_loss", "stories_bits_per_byte", "simple_bits_per_byte"])
    started, step, paused, logged = time.monotonic(), 0, 0.0, 0.0
    while (part := (time.monotonic() - started - paused) / seconds) < 1:
        mix = FIRST_MIX if part < LAST_PART_FROM else LAST_MIX
        model.zero_grad()
        loss = fast_loss(model, sample_batch(streams, mix, batch_size, rng))
        loss.backward()
        muon.step(MUON_LR * rate_at(part))
        for group in adam.param_groups:
            group["lr"] = ADAM_LR * rate_at(part)
        adam.step()
        step += 1
        if step % 20 == 0:
            float(loss.detach())  # waits, so that the clock is the GPU's
        if part >= logged:
            before = time.monotonic()
            write_log(log, model, data, [part * seconds, step * batch_size * CONTEXT, float(loss.detach())])
            paused, logged = paused + time.monotonic() - before, logged + 0.05
    write_log(log, model, data, [seconds, step * batch_size * CONTEXT, float(loss.detach())])
    return model


def write_log(log: Any, model: Model, data: dict[str, np.ndarray], row: list[float]) -> None:
    """One line: `row`, and the bits per byte of both kinds of held-out stories."""
    names = ("heldout_stories", "heldout_simple")
    row += [bits_per_byte(model, data[name], int(data[f"{name}_bytes"])) for name in names]
    log.writerow([f"{value:.4f}".rstrip("0").rstrip(".") for value in row])
    print(*(f"{value:.4f}" for value in row), flush=True)


def main() -> None:
    """Reads the command line; writes the weights as float16 (norms float32) under their GGUF names."""
    parser = argparse.ArgumentParser(description="Train the demo model.")
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=360)
    parser.add_argument("--batch-size", type=int, default=32, help="windows of 1,024 tokens")
    parser.add_argument("--log", type=Path, default=Path("loss.csv"))
    args = parser.parse_args()
    model = train(dict(np.load(args.data)), args.seconds, args.batch_size, args.log)
    weights = {name: p.detach().cpu().numpy() for name, p in model.named_parameters()}
    np.savez(
        args.out, **{name: w.astype(np.float16 if w.ndim == 2 else np.float32) for name, w in weights.items()}
    )


if __name__ == "__main__":
    main()
