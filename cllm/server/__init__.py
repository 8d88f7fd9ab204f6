"""The HTTP server: OpenAI's API and our own over one `LLM`. `cllm.serve` is its command; see docs/server.md.

Needs the extra `server` (starlette, uvicorn with httptools and uvloop, msgspec, prometheus-client).
"""
