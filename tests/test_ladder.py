"""The ladder's rungs on mocks: each computes the load, and a delay in a layer is found at its rung and no other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest
from command_helpers import clear_environment, patch_mock, run_main
from ladder_helpers import STEP_S, Clock, mock_ladder, mock_llm, steps_take

from cllm import LLM
from cllm.backends.mock import MockBackend, MockScript
from cllm.batch import BatchManager
from cllm.bench import ladder, main
from cllm.bench.ladder.load import PRESETS, Load, full_steps, make_prompts, under_way
from cllm.bench.ladder.measure import climb
from cllm.bench.ladder.rig import Rig, make_rig
from cllm.bench.ladder.rungs import engine_rungs
from cllm.bench.ladder.web import server_process
from cllm.bench.load import Client
from cllm.engine import Engine
from cllm.errors import CLLMError
from cllm.request_maker import RequestMaker
from cllm.scheduler import Scheduler

ALONE = Load(num_prompts=3, input_len=5, output_len=8, concurrency=1)
TOGETHER = Load(num_prompts=8, input_len=5, output_len=10, concurrency=4)
WITHOUT_WARMING: Any = lambda rung: []  # noqa: E731

# Each layer's own work, by the rung at which it comes in: what is delayed, and whether it runs each step or request.
LAYERS: list[tuple[int, Any, str, bool]] = [
    (2, BatchManager, "build", True),
    (3, sys.modules["cllm.executor"], "sample_rows", True),
    (4, Scheduler, "schedule", True),
    (5, Engine, "_expire", True),
    (6, RequestMaker, "make", False),
    (7, "cllm.server.openai", "read_prompts", False),
    (8, Client, "send", False),
    (9, "cllm.server.openai", "stream", False),
]


@pytest.mark.parametrize(
    ("number", "owner", "name", "is_each_step"), LAYERS, ids=lambda value: str(value)[:20]
)
def test_a_delay_is_found_at_its_rung(
    number: int, owner: Any, name: str, is_each_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    delay = 0.004 if is_each_step else 0.004 * ALONE.output_len
    with mock_ladder(ALONE) as (_, rungs, clock):
        if isinstance(owner, str):
            owner = sys.modules[owner]
        monkeypatch.setattr(owner, name, clock.delaying(getattr(owner, name), delay))
        found = climb(rungs, ALONE, 3, 0, warm_up=WITHOUT_WARMING)
    expected = 1 - STEP_S / (STEP_S + 0.004)
    assert found.drift == pytest.approx(0, abs=1e-9)
    losses = {rung.number: found.loss_below(index) for index, rung in enumerate(rungs) if index}
    assert losses[number].value == pytest.approx(expected, abs=0.03)
    assert losses[number].low - 0.03 <= expected <= losses[number].high + 0.03
    for other, loss in losses.items():
        # At most a wake-up of the engine's thread for nothing falls into another rung's run.
        assert other == number or abs(loss.value) < 0.03, other
    assert sum(loss.value for loss in losses.values()) == pytest.approx(found.loss(9).value)
    assert found.microseconds(number, number - 1).value == pytest.approx(4000, rel=0.05)


def test_all_rungs_answer_the_load_alike() -> None:
    with mock_ladder(TOGETHER) as (rig, rungs, _):
        for rung in rungs:
            outcome = rung.run()
            assert outcome.num_good(TOGETHER) == TOGETHER.num_prompts, rung.name
            assert all(timing.is_same is not False for timing in outcome.timings), rung.name
            assert all(timing.is_same for timing in outcome.timings) or rung.number in (0, 1, 2)
            assert outcome.tokens_per_s == pytest.approx(TOGETHER.num_output / outcome.seconds)
        # Nothing is left behind for the next run.
        backend = rig.backend
        assert isinstance(backend, MockBackend)
        assert not any(backend.histories)


def test_a_backend_that_launches_early_is_answered_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_mock(monkeypatch, MockScript(launches_early=True))
    with mock_llm(TOGETHER) as llm:
        rig = make_rig(llm, TOGETHER, seed=0)
        for rung in engine_rungs(rig)[3:]:
            outcome = rung.run()
            assert outcome.num_good(TOGETHER) == TOGETHER.num_prompts, rung.name
            assert all(timing.is_same for timing in outcome.timings), rung.name


@pytest.fixture
def rig() -> Any:
    clock = Clock()
    with mock_llm(TOGETHER) as llm:
        rig = make_rig(llm, TOGETHER, seed=0, clock=clock)
        steps_take(llm, clock)
        yield rig


def test_batches_are_full_but_for_arrivals(rig: Rig) -> None:
    steps = {rung.number: ladder.warm_up(rig, rung) for rung in engine_rungs(rig)}
    for number in (0, 1, 2, 3, 6):
        assert steps[number] == [4.0] * 20, number
    # The first request comes a step before the others, and so does the one that takes its place.
    assert steps[4] == [1.0] + [4.0] * 19 + [3.0]


def test_a_partial_batch_costs_what_it_costs(rig: Rig) -> None:
    rungs = engine_rungs(rig)[:5]
    found = climb(rungs, TOGETHER, 1, 0, warm_up=WITHOUT_WARMING)
    assert [found.loss(index).value for index in range(5)] == pytest.approx([0, 0, 0, 0, 1 - 20 / 21])


def test_times_of_full_batches(rig: Rig) -> None:
    outcome = engine_rungs(rig)[0].run()
    assert outcome.seconds == pytest.approx(20 * STEP_S)
    assert [timing.latency for timing in outcome.timings] == pytest.approx([10 * STEP_S] * 8)
    assert [timing.ttft for timing in outcome.timings] == pytest.approx([STEP_S] * 8)


# --- the load ---


def test_steps_of_full_batches() -> None:
    load = Load(3, 5, 3, 3)
    steps = [[tuple(part) for part in step] for step in full_steps(3, load, budget=8)]
    assert steps == [
        [(0, 0, 5, True), (1, 0, 3, False)],
        [(1, 3, 2, True), (2, 0, 5, True)],
        [(0, 5, 1, True), (1, 5, 1, True), (2, 5, 1, True)],
        [(0, 6, 1, True), (1, 6, 1, True), (2, 6, 1, True)],
    ]
    assert len(list(full_steps(2, load, budget=100))) == 3


def test_prompts_in_several_steps_are_answered_too() -> None:
    load = Load(3, 21, 4, 2)
    llm = LLM(
        backend="mock",
        max_num_seqs=2,
        context_length=64,
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
    )
    with llm:
        rig = make_rig(llm, load, seed=0)
        for rung in engine_rungs(rig):
            assert rung.run().num_good(load) == 3


def test_presets_are_the_loads_that_the_predecessor_had() -> None:
    assert [str(load) for load in PRESETS.values()] == [
        "40 requests of 32 + 50 tokens, 8 at a time",
        "20 requests of 32 + 30 tokens, 4 at a time",
        "160 requests of 32 + 50 tokens, 5 at a time",
        "10 requests of 32 + 50 tokens, one at a time",
    ]
    assert [len(load.waves) for load in PRESETS.values()] == [5, 5, 32, 10]


def test_prompts_are_exact_as_text_and_as_ids() -> None:
    from cllm import load_tokenizer
    from cllm.hub import model_path

    load, tokenizer = Load(20, 32, 2, 1), load_tokenizer(model_path("demo"))
    prompts = make_prompts(tokenizer, load, seed=1)
    assert all(len(prompt.token_ids) == 32 for prompt in prompts)
    assert all(tokenizer.encode(prompt.text) == prompt.token_ids for prompt in prompts)
    assert prompts == make_prompts(tokenizer, load, seed=1) != make_prompts(tokenizer, load, seed=2)


def test_no_text_of_the_length() -> None:
    class Stubborn:
        def encode(self, text: str) -> list[int]:
            return [1]

        def decode(self, ids: list[int], *, skip_special: bool) -> str:
            return ""

    with pytest.raises(CLLMError, match="no text of exactly 2 tokens"):
        make_prompts(Stubborn(), Load(1, 2, 2, 1), 0)  # type: ignore[arg-type]


def test_requests_under_way() -> None:
    assert under_way([(0.0, 1.0), (0.5, 1.0)], points=4) == [1.0, 1.0, 2.0, 2.0]


# --- the command, with a server of its own ---

TINY = ("--backend", "mock", "--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--rounds", "1")


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setenv("CLLM_KV_CACHE_TOKENS", "1")  # for this process and not for the server: flags win
    assert main(["ladder", *TINY, "--kv-cache-tokens", "2048", "--json", "-q"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert not captured.err
    assert [row["rung"] for row in figures["rungs"]] == list(range(10))
    assert all(row["succeeded"] == row["requests"] == 2 for row in figures["rungs"])
    assert all(row["same_answers"] in (None, 1.0) for row in figures["rungs"])
    assert len(figures["guard"]) == 3
    assert figures["load"] == {"num_prompts": 2, "input_len": 4, "output_len": 3, "concurrency": 8}


def test_chosen_rungs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clear_environment(monkeypatch)
    monkeypatch.setattr(ladder, "cllm_serve", None)  # none of these needs a server
    assert main(["ladder", *TINY, "--rungs", "6,2", "--json", "-q"]) == 0
    assert [row["rung"] for row in json.loads(capsys.readouterr().out)["rungs"]] == [0, 2, 6]


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--rungs", "1,10"], "--rungs"),
        (["--rungs", "6,"], "--rungs"),
        (["--output-len", "1"], "--output-len"),
        (["--num-prompts", "0"], "--num-prompts"),
        (["--preset", "9"], "--preset"),
        (["-c", "20"], "--ctx-size"),
        (["-np", "3"], "--concurrency"),
        (["--check", *TINY], "--check"),
        (["--llama-bench", "x"], "mock"),
    ],
)
def test_wrong_usage(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clear_environment(monkeypatch)
    done = run_main(capsys, ladder.main, "--backend", "mock", *argv)
    assert done.status == 2
    assert named in done.error


def test_a_server_that_does_not_start() -> None:
    with pytest.raises(CLLMError, match="did not start: no such thing"):  # noqa: SIM117
        with server_process([sys.executable, "-c", "import sys; sys.exit('no such thing')"]):
            pass
    with pytest.raises(CLLMError, match="cannot start /no/such/program"):  # noqa: SIM117
        with server_process(["/no/such/program"]):
            pass


def test_the_raw_loop_of_llama_is_the_engine_s_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llama_cpp")
    from cllm.backends.llama_context import LlamaContext

    load = Load(4, 6, 4, 2)
    with LLM(backend="llama", max_num_seqs=2, context_length=64, enable_prefix_caching=False) as llm:
        rig = make_rig(llm, load, seed=0)
        rungs = engine_rungs(rig)
        decodes = count_calls(monkeypatch, llm._engine._executor.backend._context._library, "llama_decode")
        through_contract = count_calls(monkeypatch, LlamaContext, "decode")
        for rung in rungs[:3]:
            decodes.clear()
            through_contract.clear()
            outcome = rung.run()
            assert outcome.num_good(load) == 4
            assert len(decodes) == 8
            assert len(through_contract) == (8 if rung.number else 0)
        assert rungs[0].run().occupancy == [2.0] * 8
        assert all(timing.is_same for timing in rungs[3].run().timings)


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    calls: list[None] = []
    function: Callable[..., Any] = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, counted)
    return calls
