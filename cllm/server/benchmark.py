"""`POST /benchmark`: load made inside the server, so that the engine is measured without HTTP. Off unless asked for.

It must not know the scheduler; it uses the way that every request goes.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import InvalidRequestError
from ..outputs import RequestOutput
from ..params import SamplingParams
from .failures import HTTPError
from .schemas import BenchmarkBody
from .service import Service
from .web import read_body, reply

_MAX_REQUESTS = 10_000


async def benchmark(request: Request) -> Response:
    """Answers random prompts, `concurrency` at a time, and replies tokens/s and times in seconds."""
    if not request.app.state.has_benchmark:
        raise HTTPError(404, "the benchmark is off; start the server with --enable-benchmark")
    service: Service = request.app.state.service
    body, _ = await read_body(request, BenchmarkBody)
    _check(body)
    started = time.perf_counter()
    numbers, found = iter(range(body.num_requests)), list[RequestOutput]()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(body.concurrency, body.num_requests)):
                group.create_task(_client(service, body, numbers, found, request))
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return reply(_report(body, found, time.perf_counter() - started))


async def _client(
    service: Service,
    body: BenchmarkBody,
    numbers: Iterator[int],
    found: list[RequestOutput],
    request: Request,
) -> None:
    params = SamplingParams(temperature=0, max_tokens=body.output_tokens, ignore_eos=True)
    for number in numbers:
        draw = random.Random(number)
        prompt = [draw.randrange(service.llm.info.vocab_size) for _ in range(body.prompt_tokens)]
        make = partial(service.make_request, prompt, params)
        requests = [await service.prepare(make)]
        call = service.submit(requests, request.receive)
        try:
            found += await call.outputs()
        finally:
            call.close()


def _check(body: BenchmarkBody) -> None:
    for name in BenchmarkBody.__struct_fields__:
        if not 1 <= getattr(body, name) <= _MAX_REQUESTS:
            raise InvalidRequestError(f"{name} must be a whole number from 1 to {_MAX_REQUESTS}", field=name)


def _report(body: BenchmarkBody, found: list[RequestOutput], seconds: float) -> dict[str, Any]:
    num_tokens = sum(len(output.outputs[0].token_ids) for output in found)
    first = [output.metrics.time_to_first_token_s or 0.0 for output in found]
    return {
        "num_requests": len(found),
        "concurrency": body.concurrency,
        "seconds": seconds,
        "output_tokens": num_tokens,
        "output_tokens_per_s": num_tokens / seconds,
        "requests_per_s": len(found) / seconds,
        "mean_time_to_first_token_s": statistics.fmean(first),
        "median_time_to_first_token_s": statistics.median(first),
        "mean_total_s": statistics.fmean(output.metrics.total_s for output in found),
    }
