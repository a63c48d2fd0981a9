from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Send

from app.api.head import HARDENING, Head, request_ids

Headers = list[tuple[bytes, bytes]]

IDS = request_ids()


def served(path: str, *sent: tuple[bytes, bytes], replied: Headers | None = None) -> tuple[Head, Headers]:
    """The request's head, and its reply's headers."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "root_path": "/below",
        "path": "/below" + path,
        "headers": list(sent),
        "client": None,
    }
    head = Head(scope, IDS)
    naming = head.naming(send)
    asyncio.run(_send(naming, {"type": "http.response.start", "status": 200, "headers": replied or []}))
    return head, list(messages[0]["headers"])


async def _send(send: Send, message: Message) -> None:
    await send(message)


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
        ("/sessions/" + "x" * 500, "x" * 500),
    ],
)
def test_a_session_in_the_path_is_what_the_request_is_about(path: str, session_id: str | None) -> None:
    assert served(path)[0].session_id == session_id


def test_an_anthropic_client_reads_its_own_header() -> None:
    head, headers = served("/sessions/s-1/v1/messages")
    assert [name for name, _ in headers] == [b"x-request-id", b"request-id"]
    assert {value for _, value in headers} == {head.request_id.encode()}


@pytest.mark.parametrize(
    ("path", "session", "route"),
    [
        ("/sessions", None, "/sessions"),
        ("/sessions/", None, "/sessions/"),
        ("/sessions//v1/chat/completions", None, "/sessions//v1/chat/completions"),
        ("/sessions/s", "s", ""),
        ("/sessions/s/", "s", "/"),
        ("/sessions/s/v1/chat/completions", "s", "/v1/chat/completions"),
        ("/v1/chat/completions", None, "/v1/chat/completions"),
    ],
)
def test_a_path_is_a_session_and_a_route(path: str, session: str | None, route: str) -> None:
    head, _ = served(path)
    assert (head.path, head.path_session, head.route) == (path, session, route)


def test_what_keeps_a_browser_from_running_a_reply_is_added_unless_it_is_set() -> None:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    head, _ = served("/health")
    own = (b"Content-Security-Policy", b"script-src 'self'")
    asyncio.run(_send(head.hardening(send), {"type": "http.response.start", "status": 200, "headers": [own]}))
    headers = messages[0]["headers"]
    assert [header for header in headers if header[0].lower() == b"content-security-policy"] == [own]
    assert set(HARDENING) - set(headers) == {HARDENING[-1]}
