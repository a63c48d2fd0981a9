"""The one HTTP client of a session: takes turns, asks again, remembers what it was told."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import NamedTuple

import aiohttp

from app.protocols.registry import ROUTES
from ops.bench.load import CHAT, Wire
from ops.verify import Acknowledged

PAUSE_S = 0.1
"""After a refusal."""


class Answer(NamedTuple):
    """`code` and `message` are those of an error's body, and empty for a success. `is_cut`: a stream that ended
    before `[DONE]`, which is no answer."""

    status: int
    body: bytes
    code: str = ""
    message: str = ""
    turn: int = 0
    replayed: bool = False
    is_stream: bool = False
    is_cut: bool = False


class SessionClient:
    """One session, at whatever server `base_url` names when it is asked.

    `by_header`: the session is named by a header and made by its first turn.
    """

    def __init__(
        self,
        http: aiohttp.ClientSession,
        session_id: str,
        base_url: Callable[[], Awaitable[str]],
        *,
        by_header: bool = False,
    ) -> None:
        self.session_id = session_id
        self._http = http
        self._base_url = base_url
        self._path = "" if by_header else f"/sessions/{session_id}"
        self._headers = {"content-type": "application/json", **({"x-session-id": session_id} if by_header else {})}

    async def create(self) -> AsyncIterator[Answer | None]:
        """Ask until the session is there; each answer, None for a connection that broke."""
        body = json.dumps({"session_id": self.session_id}).encode()
        while True:
            answer = await self._post("/sessions", body, {})
            yield answer
            if answer is not None and answer.status == 200:
                return
            await asyncio.sleep(0 if answer is None else PAUSE_S)

    async def turn(self, body: bytes, key: str, patience: int, wire: Wire = CHAT) -> AsyncIterator[Answer | None]:
        """Ask until the turn is answered 200, or was refused `patience` times; each answer, as `create`."""
        refused, headers = 0, {"idempotency-key": key}
        if wire.key is not None:
            body, headers = body[:-1] + f',"{wire.key}":"{key}"}}'.encode(), {}
        while refused < patience:
            answer = await self._post(f"{self._path}{wire.route}", body, headers)
            yield answer
            if answer is not None and answer.status == 200 and not answer.is_cut:
                return
            if answer is not None and not answer.is_cut:
                refused += 1
                await asyncio.sleep(PAUSE_S)

    async def ask(self, body: bytes) -> Answer:
        """One turn, asked for once. Raises aiohttp.ClientError, TimeoutError."""
        return await self._exchange(f"{self._path}/v1/chat/completions", body, {})

    async def get(self, path: str, *, alone: bool = False) -> bytes:
        """What the server says, on a connection of its own where `alone`. Raises ValueError for an error."""
        headers = {"connection": "close"} if alone else {}
        async with self._http.get(f"{await self._base_url()}{path}", headers=headers) as response:
            body = await response.read()
            if response.status != 200:
                raise ValueError(f"GET {path} answered {response.status}: {body[:300]!r}")
            return body

    async def _post(self, path: str, body: bytes, headers: dict[str, str]) -> Answer | None:
        try:
            return await self._exchange(path, body, headers)
        except (aiohttp.ClientError, OSError):
            return None

    async def _exchange(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        url = f"{await self._base_url()}{path}"
        async with self._http.post(url, data=body, headers={**self._headers, **headers}) as response:
            turn, replayed = int(response.headers.get("x-turnlog-turn", "0")), "x-turnlog-replayed" in response.headers
            if response.status == 200 and response.content_type == "text/event-stream":
                return await _streamed(response, turn, replayed)
            got = await response.read()
            if response.status != 200:
                return Answer(response.status, got, *_error(got))
            return Answer(200, got, turn=turn, replayed=replayed)


async def _streamed(response: aiohttp.ClientResponse, turn: int, replayed: bool) -> Answer:
    """Raises aiohttp.ClientError where the connection ended before the first bytes."""
    got = b""
    try:
        async for piece in response.content.iter_any():
            got += piece
    except (aiohttp.ClientError, OSError):
        if not got:
            raise
    last = got.rstrip().rpartition(b"data: ")[2]
    if last.startswith(b'{"error"'):
        return Answer(response.status, got, *_error(last), is_stream=True, is_cut=True)
    return Answer(200, got, turn=turn, replayed=replayed, is_stream=True, is_cut=last != b"[DONE]")


def streamed_message(body: bytes) -> bytes:
    """The assistant message of a chat's whole stream of text, as raw JSON."""
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return json.dumps({"role": "assistant", "content": text}).encode()


def _error(body: bytes) -> tuple[str, str]:
    """Code and message of an error's body."""
    try:
        error = json.loads(body)["error"]
        return str(error["code"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return "no error object", repr(body[:200])


def acknowledged(session_id: str, answer: Answer, key: str, wire: Wire = CHAT) -> Acknowledged:
    """What a client knows by a 200."""
    # What a stream says, or a protocol that engines are not asked in, is made of the stored reply.
    is_made = answer.is_stream or wire.key is not None
    reply = None if is_made else hashlib.sha256(answer.body).hexdigest()
    if wire.key is not None:
        key = f"{ROUTES[wire.route].name}:{key}"
    stored_key = hashlib.sha256(key.encode()).hexdigest()[:32]  # as the log keeps it
    return Acknowledged(session_id, answer.turn, reply, stored_key)
