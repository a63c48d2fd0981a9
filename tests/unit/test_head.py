from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from starlette.types import Message, Send

from app.api.head import HARDENING, Head, request_ids

Headers = list[tuple[bytes, bytes]]

IDS = request_ids()


def served(path: str, *sent: tuple[bytes, bytes], replied: Headers | None = None) -> tuple[Head, Headers]:
    """The request's head, and its reply's headers."""
    scope = {"type": "http", "method": "GET", "root_path": "/below", "path": "/below" + path, "client": None}
    head = Head({**scope, "headers": list(sent)}, IDS)
    return head, started(head.naming, replied or [])


def started(wrap: Callable[[Send], Send], headers: Headers) -> Headers:
    """The headers of a reply that goes through `wrap`."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def start() -> None:
        await wrap(send)({"type": "http.response.start", "status": 200, "headers": headers})

    asyncio.run(start())
    return list(messages[0]["headers"])


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
    assert len({served("/health")[0].request_id for _ in range(20)}) == 20


def test_an_anthropic_client_reads_its_own_header() -> None:
    head, headers = served("/sessions/s-1/v1/messages")
    assert [name for name, _ in headers] == [b"x-request-id", b"request-id"]
    assert {value for _, value in headers} == {head.request_id.encode()}


@pytest.mark.parametrize(
    ("path", "session", "route"),
    [
        *((path, None, path) for path in ("/sessions", "/sessions/", "/sessions//v1/chat/completions", "/export")),
        ("/sessions/s", "s", ""),
        ("/sessions/s/", "s", "/"),
        ("/sessions/s-1/v1/chat/completions", "s-1", "/v1/chat/completions"),
        ("/sessions/" + "x" * 500, "x" * 500, ""),
        ("/v1/chat/completions", None, "/v1/chat/completions"),
    ],
)
def test_a_path_is_a_session_that_the_request_is_about_and_a_route(path: str, session: str | None, route: str) -> None:
    head, _ = served(path)
    assert (head.path, head.session_id, head.path_session, head.route) == (path, session, session, route)


def test_what_keeps_a_browser_from_running_a_reply_is_added_unless_it_is_set() -> None:
    own = (b"Content-Security-Policy", b"script-src 'self'")
    headers = started(served("/health")[0].hardening, [own])
    assert [header for header in headers if header[0].lower() == b"content-security-policy"] == [own]
    assert set(HARDENING) - set(headers) == {HARDENING[-1]}
