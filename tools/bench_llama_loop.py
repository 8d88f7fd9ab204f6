"""How much of llama.cpp's speed is left at `LLM`: eight greedy requests against a bare `llama_decode` loop.

    python tools/bench_llama_loop.py -m MODEL.gguf [--rounds 5] [--threads 2]

Both sides compute the same tokens: prompts of 32, then 128 steps of eight sequences, over the same unified KV cache.
The bare loop has its tokens preset and samples nothing. Rounds alternate; the ratio is taken round by round.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from pathlib import Path

import llama_cpp

sys.path.insert(0, str(Path(__file__).parent.parent))

from cllm import LLM, SamplingParams

SEQUENCES, PROMPT, ANSWER = 8, 32, 128


class BareLoop:
    """A context with the engine's settings, and nothing above it."""

    def __init__(self, path: str, threads: int, num_tokens: int) -> None:
        llama_cpp.llama_log_set(_SILENT, None)
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = num_tokens, 512, 512, 4 * SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def decode(self, tokens: list[tuple[int, int, int, bool]]) -> None:
        """One `llama_decode` of (token, position, sequence, logits wanted)."""
        batch = self.batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        assert llama_cpp.llama_decode(self.context, batch) == 0
        llama_cpp.llama_get_logits(self.context)

    def run(self) -> float:
        """Tokens of the answers a second."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        started = time.perf_counter()
        self.decode([(100 + s + p, p, s, p == PROMPT - 1) for s in range(SEQUENCES) for p in range(PROMPT)])
        for step in range(ANSWER - 1):
            self.decode([(200 + step + s, PROMPT + step, s, True) for s in range(SEQUENCES)])
        return SEQUENCES * ANSWER / (time.perf_counter() - started)


@llama_cpp.llama_log_callback
def _SILENT(level: int, text: bytes, data: ctypes.c_void_p) -> None:  # noqa: N802
    pass


def engine_run(llm: LLM) -> float:
    prompts = [[100 + s + p for p in range(PROMPT)] for s in range(SEQUENCES)]
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with LLM(
        args.model,
        backend="llama",
        num_threads=args.threads,
        context_length=256,
        max_num_seqs=SEQUENCES,
        enable_prefix_caching=False,  # each round computes its prompts
    ) as llm:
        bare = BareLoop(args.model, args.threads, llm.info.kv_capacity)
        bare.run()
        engine_run(llm)
        ratios = []
        for number in range(args.rounds):
            sides = {"bare": bare.run, "engine": lambda: engine_run(llm)}
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            speed = {name: sides[name]() for name in order}
            ratios.append(speed["engine"] / speed["bare"])
            print(f"bare {speed['bare']:7.1f}  LLM {speed['engine']:7.1f} tokens/s  ratio {ratios[-1]:.3f}")
        print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
