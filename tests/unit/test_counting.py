"""The memory that a request to count tokens holds."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from app.api.head import Head, request_ids
from app.api.models import count
from app.api.requests import Request
from app.api.routes import Route
from app.domain.request import ChatRequest
from app.fleet.engines import COUNT_TOKENS
from app.request_memory import RequestMemory
from app.services import Services
from app.turn.large_bodies import LargeBodies

BODY = b'{"model":"m","messages":[{"role":"user","content":"Hi"}]}'


def test_a_body_is_accounted_for_until_it_is_counted() -> None:
    """Large bodies are parsed one at a time: those that wait must not exceed the limit together."""
    memory, held = RequestMemory(1 << 20), []

    class TokenIn:
        async def count(self, request: ChatRequest) -> int:
            held.append(memory.size)
            return 3

    app = SimpleNamespace(
        inflight=memory,
        settings=SimpleNamespace(max_request_bytes=1 << 20),
        turns=SimpleNamespace(large_bodies=LargeBodies()),
        token_in=TokenIn(),
    )

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": BODY, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": COUNT_TOKENS, "headers": [], "client": ("127.0.0.1", 1)}
    place = Route(methods=("POST",), path=COUNT_TOKENS, who="session")
    request = Request(cast(Services, app), place, Head(scope, request_ids()), receive)
    assert asyncio.run(count(request)) == {"input_tokens": 3}
    assert (held, memory.size) == ([len(BODY)], 0)
