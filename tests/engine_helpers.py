"""What tests look at inside an engine."""

from __future__ import annotations

from typing import Any

from cllm import LLM


def assert_baseline(llm: LLM) -> None:
    """Slots and cache are back where they were (law 6). Looks on the engine's thread, after all that came before."""

    def look() -> tuple[bool, Any, Any]:
        llm._scheduler.check_integrity()
        llm._scheduler.clear_cache()
        llm._engine._executor.apply_operations()
        return llm._scheduler.has_work, llm._engine._executor.backend.histories, llm._engine._open

    has_work, histories, open_requests = llm._engine.call(look)
    assert not has_work
    assert not any(histories)
    assert not open_requests
