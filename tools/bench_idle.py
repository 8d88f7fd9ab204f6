"""What idle cached tokens cost the running sequences: eight streams beside 0, 1,000 and 4,000 idle tokens.

    python tools/bench_idle.py -m MODEL.gguf [--backend llama] [--rounds 5] [--threads 2]

In a unified cache llama.cpp's attention on a CPU scans the mask of all cells up to the highest used one, and llama has
one here, since the cells are too few for each sequence to have its own. kylin touches only the blocks of the sequences
that run. Prints medians of rounds, and the ratio to no idle tokens, round by round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cllm.backends import load_backend
from cllm.bench.speed import Runner, Test
from cllm.config import EngineConfig

SEQUENCES, IDLE = 8, (0, 1000, 4000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--backend", default="llama")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    config = EngineConfig(
        model=args.model,
        backend=args.backend,
        num_threads=args.threads,
        max_num_seqs=SEQUENCES,
        context_length=max(IDLE) + 256,
        kv_cache_tokens=max(IDLE) + 2048,
    )
    backend, _ = load_backend(config)
    backend.warm_up()
    runner, test = Runner(backend), Test("tg32 x8", 32, True, batch=SEQUENCES)
    speeds: dict[int, list[float]] = {idle: [] for idle in IDLE}
    for number in range(args.rounds + 1):
        for idle in IDLE:  # the idle tokens come first, so that they lie below those that run
            runner.clear()
            if idle:
                runner.fill(SEQUENCES, idle)
            speed = runner.run(test)
            if number:
                speeds[idle].append(speed)
    for idle, samples in speeds.items():
        ratio = statistics.median(a / b for a, b in zip(samples, speeds[0], strict=True))
        print(f"{idle:5} idle tokens: {statistics.median(samples):7.1f} tokens/s, {ratio - 1:+.1%}")
    backend.close()


if __name__ == "__main__":
    main()
