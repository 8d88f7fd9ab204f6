"""The engine under fire: cancellations in every state, faults below it, and that it costs nothing when idle."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from engine_helpers import assert_baseline

from cllm import LLM, BackendError, QueueFullError, SamplingParams
from cllm.backends.mock import MockBackend, MockScript
from cllm.stats import Histogram

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.fixture
def llm(script: MockScript) -> Iterator[LLM]:
    with LLM(backend="mock", context_length=512, max_num_seqs=3, max_num_batched_tokens=16) as llm:
        yield llm


def text(llm: LLM, prompt: str) -> str:
    return llm.generate(prompt, GREEDY)[0].outputs[0].text


def test_a_hundred_cancels_with_the_slot_reused_at_once(llm: LLM, script: MockScript) -> None:
    """Two of three slots stay busy, so that each new request takes the slot that the last one left."""
    expected = {prompt: text(llm, prompt) for prompt in ("left neighbour", "right neighbour", "after")}
    script.delay = 0.001
    landed: Counter[str] = Counter()
    for round in range(100):
        neighbours: dict[str, str] = {}

        def run(prompt: str, neighbours: dict[str, str] = neighbours) -> None:
            neighbours[prompt] = text(llm, prompt)

        threads = [threading.Thread(target=run, args=(f"{side} neighbour",)) for side in ("left", "right")]
        for thread in threads:
            thread.start()
        prompt = "x" * (480 if round % 2 else 5)  # 480 tokens take over thirty steps of prefill
        inbox: SimpleQueue[list[Any]] = SimpleQueue()
        victim = llm.make_request(
            prompt, SamplingParams(max_tokens=30, ignore_eos=True), inbox.put, streaming=True
        )
        sequence = victim.sequences[0]

        def cancel(sequence: Any = sequence, victim: Any = victim) -> str:
            state = (
                "waiting" if sequence.slot is None else "decoding" if sequence.num_output else "prefilling"
            )
            llm._engine._abort([victim.request_id])
            return state

        llm._engine.submit([victim])
        for _ in range(round % 5):
            llm._engine.call(lambda: None)  # let a few steps go by
        if round % 2 == 0:
            inbox.get(timeout=60)
        landed[llm._engine.call(cancel)] += 1
        assert text(llm, "after") == expected["after"]
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert neighbours == {side: expected[side] for side in neighbours}
        assert len(neighbours) == 2
    assert landed["prefilling"] >= 30, landed
    assert landed["decoding"] >= 30, landed
    assert_baseline(llm)


def test_kv_cache_full_changes_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that says that it is full, though the scheduler counted on room."""
    prompts = ["one", "two", "three"]
    expected = [text(llm, prompt) for prompt in prompts]
    backend = llm._engine._executor.backend
    launch, calls = backend.launch, []

    def full_twice(batch: Any) -> Any:
        calls.append(len(batch.token_ids))
        if len(calls) in (3, 9):
            raise BackendError("KV cache full", nothing_changed=True)
        return launch(batch)

    monkeypatch.setattr(backend, "launch", full_twice)
    assert [output.outputs[0].text for output in llm.generate(prompts, GREEDY)] == expected
    assert_baseline(llm)


def test_a_backend_that_always_raises(llm: LLM, script: MockScript) -> None:
    expected = text(llm, "fine")
    step = llm._engine._executor.backend.num_steps
    script.failures |= set(range(step, step + 50))
    outputs = llm.generate(["one", "two", "three"], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * 3
    assert all("scripted failure" in str(output.error) for output in outputs)
    script.failures.clear()
    assert text(llm, "fine") == expected
    assert_baseline(llm)


def test_nan_in_one_row_ends_that_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [text(llm, prompt) for prompt in ("one", "three")]
    backend = llm._engine._executor.backend
    history_logits = backend.history_logits

    def poisoned(histories: list[list[int]], positions: list[int]) -> Any:
        logits = history_logits(histories, positions)
        for row, history in zip(logits, histories, strict=True):
            if bytes(history[:3]) == b"two" and len(history) > 10:
                row[:] = float("nan")
        return logits

    monkeypatch.setattr(backend, "history_logits", poisoned)
    outputs = llm.generate(["one", "two", "three"], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert [outputs[0].outputs[0].text, outputs[2].outputs[0].text] == expected
    assert_baseline(llm)


def test_the_queue_has_a_limit(script: MockScript) -> None:
    script.delay = 0.01
    with LLM(backend="mock", max_num_seqs=1, max_queue=4) as llm:
        requests = [llm.make_request("x", GREEDY, lambda updates: None) for _ in range(6)]
        with pytest.raises(QueueFullError, match="limit is 4"):
            llm._engine.submit(requests)
        llm._engine.submit(requests[:4])


def test_drain_waits_and_refuses(llm: LLM, script: MockScript) -> None:
    script.delay = 0.005
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(text(llm, "one")))
    thread.start()
    while not llm.health()["num_running"]:
        time.sleep(0.001)
    assert not llm._engine.drain(timeout=0.001)
    assert llm.health()["status"] == "draining"
    with pytest.raises(BackendError, match="draining"):
        llm.generate("two", GREEDY)
    assert llm._engine.drain(timeout=60)
    thread.join(60)
    assert len(found[0]) > 0


def test_a_failing_receiver_harms_nobody(llm: LLM) -> None:
    def broken(updates: list[Any]) -> None:
        raise RuntimeError("receiver")

    expected = text(llm, "one")
    llm._engine.submit([llm.make_request("x", GREEDY, broken, streaming=True)])
    assert text(llm, "one") == expected


def test_pieces_that_may_wait_come_together(llm: LLM) -> None:
    """Those of a stream become one, until they may wait no longer or there is nothing left to compute."""
    pieces: list[list[Any]] = []
    answers: list[bool] = []

    def may_wait() -> bool:
        answers.append(len(answers) % 10 != 9)
        return answers[-1]

    def request(prompt: str) -> Any:
        return llm.make_request(prompt, GREEDY, pieces.append, streaming=True, may_wait=may_wait)

    expected = [text(llm, "left"), text(llm, "right")]
    llm.submit([request("left"), request("right")])
    assert llm.drain(60)
    assert len(answers) == 29  # not after the last step
    assert [len(delivered) for delivered in pieces] == [2, 2, 2]
    for at, answer in enumerate(expected):
        assert "".join(delivered[at].text for delivered in pieces) == answer
        assert [len(delivered[at].token_ids) for delivered in pieces] == [10, 10, 10]
        assert [delivered[at].finish_reason for delivered in pieces] == [None, None, "length"]


@pytest.mark.parametrize("end", ["cancel", "deadline", "close", "dies"])
def test_pieces_that_wait_are_not_lost(
    llm: LLM, script: MockScript, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    pieces: list[Any] = []
    has_waited = threading.Semaphore(0)

    def may_wait() -> bool:
        has_waited.release()
        return True

    script.delay = 0.001
    deadline_s = 0.1 if end == "deadline" else None
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, deadline_s=deadline_s)
    request = llm.make_request("x", params, pieces.extend, streaming=True, may_wait=may_wait)
    llm.submit([request])
    for _ in range(5):
        assert has_waited.acquire(timeout=60)
    assert not pieces
    if end == "cancel":
        llm.cancel([request.request_id])
    elif end == "close":
        llm.close()
    elif end == "dies":
        monkeypatch.setattr(llm._scheduler, "commit", None)
    assert llm.drain(60)
    (piece,) = pieces
    assert piece.finish_reason == ("error" if end == "dies" else "abort")
    assert len(piece.token_ids) >= 5
    assert piece.token_ids == request.sequences[0].token_ids[1:]


def test_who_was_answered_together_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine that last had two requests at once waits a moment for a second one, else for none."""
    monkeypatch.setattr("cllm.engine.GATHER_S", 60.0)
    ended: SimpleQueue[list[Any]] = SimpleQueue()
    llm = LLM(backend="mock", max_num_seqs=3)
    backend = llm._engine._executor.backend
    assert isinstance(backend, MockBackend)

    def submit(*prompts: str) -> None:
        llm.submit([llm.make_request(prompt, GREEDY, ended.put) for prompt in prompts])

    for prompt in ("one", "two"):
        submit(prompt)
        ended.get(timeout=30)
    assert backend.num_steps == 60
    submit("one", "two")
    ended.get(timeout=30)  # both end in the same step
    assert backend.num_steps == 90
    submit("three")
    time.sleep(0.02)
    assert (llm.health()["num_waiting"], backend.num_steps) == (1, 90)
    submit("four")
    ended.get(timeout=30)
    assert backend.num_steps == 120
    monkeypatch.setattr("cllm.engine.GATHER_S", 0.01)
    submit("five")
    ended.get(timeout=30)  # alone, after a moment
    monkeypatch.setattr("cllm.engine.GATHER_S", 60.0)
    submit("six")
    ended.get(timeout=30)
    submit("one", "two")
    ended.get(timeout=30)
    submit("seven")
    started = time.perf_counter()
    llm.close()  # nothing is awaited any more
    assert time.perf_counter() - started < 30


def test_health_of_a_dead_engine(script: MockScript, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(backend="mock")
    assert llm.health() == {"status": "ready", "error": None, "num_running": 0, "num_waiting": 0}
    monkeypatch.setattr(llm._scheduler, "schedule", None)
    started = time.perf_counter()
    assert llm.generate("x", GREEDY)[0].outputs[0].finish_reason == "error"
    assert time.perf_counter() - started < 1
    health = llm.health()
    assert (health["status"], health["error"]) == ("dead", "'NoneType' object is not callable")
    llm.close()


def test_the_backend_is_used_on_one_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library may keep threads for each thread that calls it; warming up counts."""
    threads: list[str] = []
    for name in ("warm_up", "launch", "free", "close"):
        method = getattr(MockBackend, name)

        def noted(self: Any, *arguments: Any, method: Any = method) -> Any:
            threads.append(threading.current_thread().name)
            return method(self, *arguments)

        monkeypatch.setattr(MockBackend, name, noted)
    with LLM(backend="mock", enable_prefix_caching=False) as llm:
        text(llm, "a")
    assert len(threads) > 30
    assert set(threads) == {"cllm-engine"}


def test_a_failing_warm_up_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise BackendError("cold")

    monkeypatch.setattr(MockBackend, "warm_up", fail)
    with pytest.raises(BackendError, match="cold"):
        LLM(backend="mock")
    assert "cllm-engine" not in {thread.name for thread in threading.enumerate()}


def test_calls_run_between_steps(llm: LLM) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert llm._engine.call(lambda: threading.current_thread().name) == "cllm-engine"
    with pytest.raises(ZeroDivisionError):
        llm._engine.call(lambda: 1 / 0)
    with pytest.raises(KeyboardInterrupt):
        llm._engine.call(interrupted)
    assert text(llm, "after")
    llm.close()
    with pytest.raises(BackendError, match="closed"):
        llm._engine.call(lambda: None)


def test_a_dead_engine_fails_the_calls_that_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, go = threading.Event(), threading.Event()

    def die(now: float) -> None:
        reached.set()
        assert go.wait(60)
        raise RuntimeError("a bug")

    monkeypatch.setattr(llm._engine, "_expire", die)
    caller = threading.Thread(target=lambda: text(llm, "never"))
    caller.start()
    assert reached.wait(60)
    found: list[BaseException] = []

    def call() -> None:
        try:
            llm._engine.call(lambda: None)
        except BackendError as error:
            found.append(error)

    waiting = threading.Thread(target=call)
    waiting.start()
    while not llm._engine._calls:
        time.sleep(0.001)
    go.set()
    waiting.join(60)
    caller.join(60)
    assert "a bug" in str(found[0])


def test_idle_costs_no_cpu(llm: LLM) -> None:
    text(llm, "warm")
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.01


def test_two_engines_in_one_process(script: MockScript) -> None:
    with LLM(backend="mock", max_num_seqs=2) as one, LLM(backend="mock", max_num_seqs=2) as two:
        expected = text(one, "prompt")
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda llm=llm: found.append(text(llm, "prompt"))) for llm in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert found == [expected] * 2


def test_metrics_count_what_happened(script: MockScript) -> None:
    script.delay = 0.002
    with LLM(backend="mock", max_num_seqs=2, context_length=256) as llm:
        llm.generate(["a prompt of some length", "another", "third"], GREEDY)
        llm.generate("a prompt of some length, continued", GREEDY)
        assert llm._engine.drain(60)
        metrics = llm.metrics()
    assert metrics["cllm:generation_tokens_total"] == 4 * 30
    assert metrics["cllm:request_success_total"] == {"length": 4}
    assert metrics["cllm:num_requests_running"] == metrics["cllm:num_requests_waiting"] == 0
    assert metrics["cllm:prompt_tokens_total"] == 23 + 7 + 5 + 34
    assert metrics["cllm:prefix_cache_hits_total"] == 16
    assert metrics["cllm:time_to_first_token_seconds"].count == 4
    between = metrics["cllm:inter_token_latency_seconds"]
    assert between.count == 4 * 29
    assert between.total / between.count >= 0.002
    assert metrics["cllm:iteration_tokens_total"].total == (23 + 7 + 5 + 34 - 16) + 4 * 29
    assert metrics["cllm:request_queue_time_seconds"].count == 4


def test_histogram_buckets() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.total) == ([2, 2, 1], 14.0)


def test_aborting_choices_delivers_each_end_once(llm: LLM, script: MockScript) -> None:
    """Of three choices one has ended when the request is cancelled."""
    script.delay = 0.002  # else the other two may end before they are cancelled
    inbox: SimpleQueue[list[Any]] = SimpleQueue()
    params = SamplingParams(n=3, max_tokens=100, temperature=0, ignore_eos=True)
    request = llm.make_request("x", params, inbox.put, streaming=True)
    request.sequences[1].max_tokens = 2
    llm._engine.submit([request])
    pieces: list[Any] = []
    while not any(piece.finish_reason for piece in pieces):
        pieces += inbox.get(timeout=60)
    llm._engine.cancel([request.request_id])
    assert llm._engine.drain(60)
    while not inbox.empty():
        pieces += inbox.get()
    ends = sorted((piece.index, piece.finish_reason) for piece in pieces if piece.finish_reason)
    assert ends == [(0, "abort"), (1, "length"), (2, "abort")]


def early_llm(script: MockScript, **config: Any) -> LLM:
    """On a mock that is served as a GPU is."""
    script.launches_early = True
    return LLM(backend="mock", **config)


class Events(list[str]):
    """What happens in an engine, in order: "launch 1 of 3 tokens", "logits 1", "commit", "piece"."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        executor = llm._engine._executor
        backend, commit = executor.backend, executor.scheduler.commit
        launch = backend.launch
        self.on_logits: Callable[[int], None] = lambda number: None

        def logged_launch(batch: Any) -> Any:
            step, number = launch(batch), backend.num_steps
            self.append(f"launch {number} of {len(batch.token_ids)} tokens")

            def logits() -> Any:
                self.append(f"logits {number}")
                self.on_logits(number)
                return step.logits()

            return SimpleNamespace(logits=logits)

        def logged_commit(*args: Any) -> Any:
            self.append("commit")
            return commit(*args)

        monkeypatch.setattr(backend, "launch", logged_launch)
        monkeypatch.setattr(executor.scheduler, "commit", logged_commit)


def test_a_step_is_launched_ahead_and_outputs_are_delivered_while_it_is_computed(
    script: MockScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    with early_llm(script) as llm:
        events = Events(llm, monkeypatch)
        for piece in delivered(llm, "x", SamplingParams(max_tokens=3, ignore_eos=True), events):
            assert piece.token_ids
    assert events == [
        *("launch 1 of 1 tokens", "logits 1"),
        *("launch 2 of 1 tokens", "commit", "piece", "logits 2"),
        *("launch 3 of 1 tokens", "commit", "piece", "logits 3"),
        *("commit", "piece"),  # nothing is left to launch
    ]


def test_who_comes_while_a_step_is_computed_is_in_the_next_one(
    script: MockScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step is launched ahead of somebody who waits."""
    with early_llm(script) as llm:
        events, ended = Events(llm, monkeypatch), SimpleQueue[Any]()
        first, second = (
            llm.make_request(prompt, SamplingParams(max_tokens=number, ignore_eos=True), ended.put)
            for prompt, number in (("x", 5), ("yz", 1))
        )
        events.on_logits = lambda number: llm.submit([second]) if number == 3 else None
        llm.submit([first])
        assert [ended.get(timeout=60)[0].prompt for _ in range(2)] == ["yz", "x"]
    launches = [event for event in events if event.startswith("launch")]
    assert launches == [f"launch {n} of {3 if n == 4 else 1} tokens" for n in range(1, 6)]


@pytest.mark.parametrize("faulty", ["scheduler.commit", "stats.count_step"])
@pytest.mark.parametrize("max_tokens", [2, 6])
def test_a_fault_with_a_step_launched_ahead_leaves_no_hole(
    script: MockScript, monkeypatch: pytest.MonkeyPatch, faulty: str, max_tokens: int
) -> None:
    """The engine dies between the launch of a step and the commit of the one before: what came is a beginning."""
    script.tokens = {length: ord("a") + length for length in range(1, 20)}
    with early_llm(script) as llm:
        owner, _, name = faulty.partition(".")
        executor = llm._engine._executor

        def fail(*_: Any) -> None:
            raise RuntimeError("a bug")

        monkeypatch.setattr(getattr(executor, owner), name, fail)
        ended = SimpleQueue[Any]()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        llm.submit([llm.make_request("x", params, ended.put)])
        (output,) = ended.get(timeout=60)
        answer = output.outputs[0]
        assert answer.finish_reason == "error"
        assert "a bug" in str(output.error)
        assert answer.text == bytes(answer.token_ids).decode()
        assert "bcdefg".startswith(answer.text)


def test_nothing_is_launched_ahead_of_an_end(script: MockScript, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's end is a sampled token: what was reserved for a step more is given back."""
    script.tokens = {3: 258}  # <|endoftext|>, the third token
    with early_llm(script) as llm:
        events = Events(llm, monkeypatch)
        (*_, last) = delivered(llm, "x", SamplingParams(max_tokens=9, temperature=0), events)
        assert last.finish_reason == "stop"
        assert_baseline(llm)
    assert events[-4:] == ["piece", "logits 3", "commit", "piece"]


def delivered(llm: LLM, prompt: str, params: SamplingParams, events: list[str]) -> list[Any]:
    """The pieces of a stream; each adds "piece" to `events` when the engine's thread delivers it."""
    pieces: list[Any] = []

    def deliver(updates: list[Any]) -> None:
        events.extend("piece" for _ in updates)
        pieces.extend(updates)

    llm.submit([llm.make_request(prompt, params, deliver, streaming=True)])
    assert llm.drain(60)
    return pieces


@pytest.mark.parametrize("fails", [False, True])
def test_the_token_after_a_stop_string_is_dropped(script: MockScript, fails: bool) -> None:
    """On a GPU it is under way when the stop string is found; so it is when that step fails."""
    script.tokens = {length: ord("a") + length for length in range(1, 20)}
    params = SamplingParams(temperature=0, max_tokens=15, stop=["ef"], ignore_eos=True)
    with early_llm(script, max_num_seqs=2) as llm:
        backend = llm._engine._executor.backend
        if fails:
            script.failures |= {5, 6}  # the step that computes the surplus token
        events: list[str] = []
        pieces = delivered(llm, "x", params, events)
        assert "".join(piece.text for piece in pieces) == "bcd"
        assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["stop"]
        assert [token_id for piece in pieces for token_id in piece.token_ids] == [*b"bcdef"]
        assert backend.num_steps == 6
        assert_baseline(llm)


def test_cancelling_finds_what_has_been_computed(script: MockScript) -> None:
    """A token whose text is still to be made when its request is cancelled is part of the answer."""
    script.tokens = dict.fromkeys(range(200), ord("a"))
    with early_llm(script) as llm:
        pieces: list[Any] = []
        request = llm.make_request("x", GREEDY, pieces.extend, streaming=True)

        def cancel_with_the_tenth(updates: list[Any]) -> None:
            pieces.extend(updates)
            if len(pieces) == 10:
                llm.cancel([request.request_id])  # the eleventh token is under way

        request.deliver = cancel_with_the_tenth
        llm.submit([request])
        assert llm.drain(60)
        assert pieces[-1].finish_reason == "abort"
        tokens = [token_id for piece in pieces for token_id in piece.token_ids]
        assert "".join(piece.text for piece in pieces) == "a" * 11 == bytes(tokens).decode()
        assert_baseline(llm)
