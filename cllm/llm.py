"""`LLM`: the front door. Loads a model, turns prompts into requests and waits for their answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from .backends import load_backend
from .batch import BatchManager
from .chat import ChatPrompt, ChatTemplate
from .config import EngineConfig, make_config
from .engine import Engine
from .executor import Executor, make_scheduler
from .outputs import RequestOutput, StreamPiece
from .params import SamplingParams
from .request_maker import Prompt, RequestMaker
from .sequence import Request

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model.

    `LLM(model, backend=, **config)` takes the fields of `EngineConfig`; a whole `EngineConfig` may stand in
    their place. Safe to use from many threads; also a context manager. Raises `ConfigError` for settings,
    `ModelFileError` for the file.
    """

    def __init__(self, model: str | EngineConfig = "demo", **config: Any) -> None:
        self.config = model if isinstance(model, EngineConfig) else make_config({"model": model, **config})
        backend_, self.tokenizer = load_backend(self.config)
        self.info = info = backend_.info
        keeps_prefixes = self.config.enable_prefix_caching and info.can_truncate
        self._scheduler = make_scheduler(
            info,
            max_num_seqs=self.config.max_num_seqs,
            max_idle_tokens=info.max_idle_tokens if keeps_prefixes else 0,
        )
        batches = BatchManager(info.max_num_batched_tokens)
        executor = Executor(backend_, self._scheduler, batches)
        self._engine = Engine(executor, max_queue=self.config.max_queue)
        try:
            self._engine.call(backend_.warm_up)
        except BaseException:
            self._engine.close()
            raise
        self._template = ChatTemplate(self.tokenizer)
        self._requests = RequestMaker(self.tokenizer, info, self._scheduler.fits)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers each prompt, a text or a list of token ids; one output a prompt, in order.

        `sampling_params`: one for all prompts, or one for each. A prompt that is wrong from the start raises
        `InvalidRequestError` (which names its index) before any work; one that fails later has
        `finish_reason` "error" and its `error`.
        """
        return self._answer(_as_list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers a conversation, or several, rendered by the file's own chat template; else as `generate`.

        `messages`: dicts with "role" and "content", as OpenAI's API has them. `chat_template_kwargs`: variables
        of the template, as `{"enable_thinking": False}` for Qwen3.
        """
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], messages if many else [messages])
        prompts = [
            self.render(one, tools=tools, chat_template_kwargs=chat_template_kwargs) for one in conversations
        ]
        return self._answer(prompts, sampling_params, use_tqdm)

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatPrompt:
        """A conversation as a prompt for `stream`: its text and token ids."""
        return self._template.render(messages, tools=tools, template_kwargs=chat_template_kwargs)

    def stream(
        self, prompt: Prompt | ChatPrompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamPiece]:
        """Answers one prompt (or a conversation from `render`) piece by piece; leaving the loop ends the request.

        The request is checked at the call; it is submitted when the first piece is asked for.
        """
        inbox: SimpleQueue[list[StreamPiece]] = SimpleQueue()
        request = self.make_request(prompt, sampling_params or SamplingParams(), inbox.put, streaming=True)
        return self._pieces(request, inbox)

    def make_request(
        self,
        prompt: Prompt | ChatPrompt,
        params: SamplingParams,
        deliver: Callable[[list[Any]], None],
        *,
        streaming: bool = False,
        may_wait: Callable[[], bool] | None = None,
    ) -> Request:
        """A checked request for `submit`, with its sequences; it computes nothing, and any thread may call it.

        `deliver(updates)` is called on the engine's thread, once a step for all requests that share it: with
        `StreamPiece`s as they are made where `streaming`, else with one `RequestOutput`. It must return at once.
        Where `may_wait()`, asked after each step, is true, pieces come together with those of the next step instead.
        Raises `InvalidRequestError`.
        """
        checked = self._requests.check(prompt, params)
        return self._requests.make(checked, deliver, streaming=streaming, may_wait=may_wait)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queues requests of `make_request`, all or none. Raises `QueueFullError`, or `BackendError` where none is
        taken any more."""
        self._engine.submit(requests)

    def cancel(self, request_ids: Iterable[str]) -> None:
        """Ends requests with finish_reason "abort"; unknown and finished ids are ignored."""
        self._engine.cancel(request_ids)

    def drain(self, timeout: float | None = None) -> bool:
        """Refuses new requests and waits until the others have ended; False where `timeout` seconds went by."""
        return self._engine.drain(timeout)

    def _answer(
        self,
        prompts: Sequence[Prompt | ChatPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Has as many requests under way as the queue takes, and waits for all. Only those hold more than ids."""
        checked = self._requests.check_all(prompts, sampling_params or SamplingParams())
        inbox: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        outputs: list[RequestOutput | None] = [None] * len(checked)
        places: dict[str, int] = {}  # of the requests under way, by id
        waiting = iter(enumerate(checked))

        def submit(count: int) -> None:
            requests = []
            for place, one in itertools.islice(waiting, count):
                requests.append(self._requests.make(one, inbox.put))
                places[requests[-1].request_id] = place
            if requests:
                self._engine.submit(requests)

        num_tokens = 0
        # A bar on a terminal, where it takes long.
        with tqdm(total=len(checked), unit="prompt", delay=1, disable=None if use_tqdm else True) as bar:
            try:
                num_first = min(self.config.max_num_seqs, self.config.max_queue)
                submit(num_first)  # the others are made while these are computed
                submit(self.config.max_queue - num_first)
                while places:
                    finished = inbox.get()
                    for output in finished:
                        outputs[places.pop(output.request_id)] = output
                        num_tokens += sum(len(answer.token_ids) for answer in output.outputs)
                    bar.set_postfix_str(
                        f"{num_tokens / (bar.format_dict['elapsed'] or 1):.1f} tokens/s", False
                    )
                    bar.update(len(finished))
                    submit(len(finished))
            finally:
                self._engine.cancel(list(places))
        return [output for output in outputs if output is not None]

    def _pieces(self, request: Request, inbox: SimpleQueue[list[StreamPiece]]) -> Iterator[StreamPiece]:
        num_open = len(request.sequences)
        try:
            self._engine.submit([request])
            while num_open:
                for piece in inbox.get():
                    num_open -= piece.finish_reason is not None
                    yield piece
        finally:
            self._engine.cancel([request.request_id])

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of `text`. add_bos None: the file's own rule."""
        return self.tokenizer.encode(text, parse_special=parse_special, add_bos=add_bos)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids. Raises `InvalidRequestError` for an id outside the vocabulary."""
        return self.tokenizer.decode(token_ids)

    def warmup(self) -> None:
        """Compiles what loading has not: the kernels of sampling, which greedy requests do without.

        Without it the first request that samples waits for them, some seconds where they are not in the cache.
        """
        params = SamplingParams(top_k=2, top_p=0.5)
        sampler = self._requests.sampler(params, [], 0)
        sampler.sample(np.zeros(self.info.vocab_size, np.float32))

    def metrics(self) -> dict[str, Any]:
        """Counters, gauges and histograms of this engine under vLLM's names with the prefix `cllm:`."""
        return self._engine.metrics()

    def health(self) -> dict[str, Any]:
        """`status` ("ready", "draining", "closed", "dead"), `error`, and how many requests run and wait."""
        return self._engine.health()

    def close(self) -> None:
        """Ends what runs and gives the memory back."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, or a non-empty list whose first item is an integer, is one."""
    if isinstance(prompts, str) or (len(prompts) and not isinstance(prompts[0], str | Sequence)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
