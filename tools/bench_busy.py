"""What one stream keeps of its speed beside a process that keeps one core busy.

    python tools/bench_busy.py -m MODEL.gguf [-t 2] [--rounds 8] [--backends kylin llama]

Each round measures every backend alone and beside the busy process, 64 steps to get used to it and 128 that count.
Prints medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cllm import LLM, SamplingParams

_BUSY = [sys.executable, "-c", "while True: pass"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--backends", nargs="+", default=["kylin", "llama"])
    args = parser.parse_args()
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in args.backends}
    models = {
        name: LLM(args.model, backend=name, num_threads=args.threads, context_length=512, max_num_seqs=1)
        for name in args.backends
    }
    for _ in range(args.rounds):
        alone = {name: _speed(llm) for name, llm in models.items()}
        with subprocess.Popen(_BUSY) as busy:
            time.sleep(0.2)
            for name, llm in models.items():
                speeds[name].append((alone[name], _speed(llm)))
            busy.kill()
    for name, llm in models.items():
        llm.close()
        alone, beside = map(statistics.median, zip(*speeds[name], strict=True))
        share = statistics.median(beside / alone for alone, beside in speeds[name])
        print(f"{name}: {alone:.1f} tokens/s alone, {beside:.1f} beside a busy process: {100 * share:.0f} %")


def _speed(llm: LLM) -> float:
    """Tokens a second of one stream."""
    for num_tokens in (64, 128):
        params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
        (output,) = llm.generate([[1, 2, 3]], params, use_tqdm=False)
    return output.metrics.decode_tokens_per_s


if __name__ == "__main__":
    main()
