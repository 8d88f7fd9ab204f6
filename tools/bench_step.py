"""What a step costs in Python: schedule, build and commit on the mock, without any model.

    python tools/bench_step.py [--sequences 8] [--waiting 0] [--steps 10000]

Prints the median and the 99th percentile in microseconds. Stop checks and text are part of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from cllm import LLM, SamplingParams
from cllm.batch import BatchManager
from cllm.sampler import Sampled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--steps", type=int, default=10_000)
    args = parser.parse_args()
    context = args.steps + 1000
    with LLM(
        backend="mock",
        max_num_seqs=args.sequences,
        context_length=context,
        max_num_batched_tokens=max(512, args.sequences),
    ) as llm:
        scheduler, batches = llm._scheduler, BatchManager(max(512, args.sequences))
        params = SamplingParams(temperature=0, max_tokens=args.steps + 900, ignore_eos=True, stop=["zzzz"])
        for number in range(args.sequences + args.waiting):
            request = llm.make_request(f"prompt {number}", params, print)
            scheduler.add(request.sequences[0])
        sample, times = Sampled(ord("h")), []
        while len(times) < args.steps:
            started = time.perf_counter_ns()
            plan = scheduler.schedule()
            batches.build(plan)
            for sequence in scheduler.commit(plan, [sample] * len(plan.sampled), 0.0):
                sequence.read()
            if len(plan.sampled) == args.sequences:  # all prompts are done
                times.append((time.perf_counter_ns() - started) / 1000)
        scheduler.take_operations()
        for sequence in [*scheduler.running, *scheduler.waiting]:
            sequence.finish("abort")
            scheduler.retire(sequence)
    print(
        f"{args.sequences} sequences, {args.waiting} waiting: median {statistics.median(times):.1f}, "
        f"99 % {statistics.quantiles(times, n=100)[98]:.1f} microseconds a step"
    )


if __name__ == "__main__":
    main()
