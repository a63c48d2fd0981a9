from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from app.api.request_ids import RequestIds
from app.logs import CURRENT, LogContext

Headers = list[tuple[bytes, bytes]]


def served(path: str, *sent: tuple[bytes, bytes], replied: Headers | None = None) -> tuple[LogContext, Headers]:
    """What the request is about, as its handler knows it, and the reply's headers."""
    seen: list[LogContext] = []
    messages: list[Message] = []

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        about = CURRENT.get()
        assert about is not None
        assert not about.has_ended
        seen.append(about)
        await send({"type": "http.response.start", "status": 200, "headers": replied or []})
        await send({"type": "http.response.body", "body": b""})

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        messages.append(message)

    scope = {"type": "http", "root_path": "/below", "path": "/below" + path, "headers": list(sent)}
    asyncio.run(RequestIds(handle)(scope, receive, send))
    assert seen[0].has_ended
    return seen[0], list(messages[0]["headers"])


def test_a_sane_name_is_kept_and_given_back() -> None:
    about, headers = served("/health", (b"host", b"x"), (b"x-request-id", b"Rollout_7.a-b"))
    assert about.request_id == "Rollout_7.a-b"
    assert headers == [(b"x-request-id", b"Rollout_7.a-b")]


@pytest.mark.parametrize("name", [b"", b"a b", b"a\r\nset-cookie: x", b"x" * 65, b"\xff", b'"'])
def test_any_other_name_is_replaced(name: bytes) -> None:
    about, headers = served("/health", (b"x-request-id", name))
    assert headers == [(b"x-request-id", about.request_id.encode())]
    assert about.request_id.encode() != name
    assert about.request_id.replace("-", "").isalnum()


def test_the_engine_s_own_name_passes() -> None:
    _, headers = served("/health", (b"x-request-id", b"mine"), replied=[(b"X-Request-Id", b"engine's")])
    assert headers == [(b"X-Request-Id", b"engine's")]


def test_no_two_requests_have_one_name() -> None:
    assert len({served("/health")[0].request_id for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("path", "session_id"),
    [
        ("/sessions/s-1/v1/chat/completions", "s-1"),
        ("/sessions/s-1", "s-1"),
        ("/sessions", None),
        ("/sessions/", None),
        ("/export", None),
        ("/sessions/" + "x" * 500, "x" * 128),
    ],
)
def test_a_session_in_the_path_is_what_the_request_is_about(path: str, session_id: str | None) -> None:
    assert served(path)[0].session_id == session_id
