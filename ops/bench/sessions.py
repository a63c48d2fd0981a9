"""Concurrent sessions of short turns against a running server.

Every client owns one connection and one session at a time, and replaces the session after a few turns so
that histories stay short. Sessions are created ahead, outside what is measured: the figures are of turns.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import secrets
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ops.bench.client import Broken, Connection
from ops.simulator.tokenizer import WORDS

SIM = b'{"completion_tokens":11,"tool_calls":false,"reasoning":false}'
"""About 2 KiB of reply to 2 KiB of request, most of it the prompt's ids."""

HISTORY_MESSAGE_BYTES = 8192
"""Large requests are made of messages of this size, as a long history of tool results is."""

TURN_GROWTH_BYTES = 130
"""What a turn adds to the next request: the reply's message and a short question."""

CREATE_AHEAD = 1.25
"""Sessions created for the sessions that the warm-up's pace would use."""


HEAD_BYTES = 65536
"""A longer reply is bulk behind its message, which is looked for within so many bytes."""


class _Choice(msgspec.Struct):
    message: msgspec.Raw


class _Reply(msgspec.Struct):
    choices: tuple[_Choice]


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_head = json.JSONDecoder().raw_decode
_MESSAGE = re.compile(rb'"choices": ?\[\{"index": ?0, ?"message": ?')


def reply_message(body: bytes) -> bytes:
    """The assistant's message of a chat reply, as the engine spelled it.

    The simulator writes it in front of ids and payloads, so that 50 MiB need not be read for 100 bytes.
    """
    begin = _MESSAGE.search(body, 0, HEAD_BYTES) if len(body) > HEAD_BYTES else None
    if begin is None:
        return bytes(_decode_reply(body).choices[0].message)
    text = body[begin.end() : begin.end() + HEAD_BYTES].decode("latin-1")  # a character a byte
    return body[begin.end() : begin.end() + _decode_head(text)[1]]


def error_code(body: bytes) -> str:
    """The `code` of an error's body."""
    found = re.search(rb'"code":\s*"([a-z_]+)"', body)
    return found[1].decode() if found else "?"


class Conversation:
    """One session's requests: each repeats the last, the reply's message, and asks on."""

    def __init__(self, opening: list[bytes], sim: bytes = SIM, more: bytes = b"") -> None:
        self._front = b'{"model":"simulator","sim":' + sim + more + b',"messages":['
        self._messages = list(opening)
        self.turns = 0

    def body(self) -> tuple[bytes, ...]:
        """The next request's body, in pieces."""
        return (self._front, b",".join(self._messages), b"]}")

    def answered(self, message: bytes, question: bytes | None = None) -> None:
        """Go on behind a reply's message."""
        self.turns += 1
        self._messages += [message, question or b'{"role":"user","content":"And then, after step %d?"}' % self.turns]


def opening_messages(size: int, seed: int = 0) -> list[bytes]:
    """Messages of about `size` bytes of words, of the simulator's vocabulary, so that they compress as prose does."""
    rng = random.Random(seed)
    messages: list[bytes] = []
    while size > 0:
        wanted = max(40, min(size, HISTORY_MESSAGE_BYTES) - 30)
        text = " ".join(rng.choices(WORDS, k=wanted // 3))[:wanted]
        messages.append(msgspec.json.encode({"role": "user", "content": text}))
        size -= len(messages[-1])
    return messages


class Script(NamedTuple):
    """What each session of a load says: its first messages, the wishes and fields of every request."""

    opening: list[bytes]
    sim: bytes = SIM
    more: bytes = b""

    def begin(self) -> Conversation:
        return Conversation(self.opening, self.sim, self.more)


def short_turns(request_bytes: int, turns_per_session: int) -> Script:
    """Requests of `request_bytes` on the average, and replies that follow from them."""
    growth = TURN_GROWTH_BYTES * (turns_per_session - 1) // 2
    return Script(opening_messages(max(64, request_bytes - growth - 140)))


class Tally(msgspec.Struct):
    """What the clients saw within a stretch of time; `late` turns ended after it."""

    latencies: list[float] = []
    late: int = 0
    errors: dict[str, int] = {}
    request_bytes: int = 0
    reply_bytes: int = 0
    created_within: int = 0
    seconds: float = 0.0

    def failed(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


class Load:
    """`clients` concurrent clients of `base_url`, started once, tallied over any number of stretches.

    `headers` are further ones of each request: whole lines, each with CRLF.
    """

    def __init__(
        self, base_url: str, script: Script, *, clients: int, turns_per_session: int, headers: str = ""
    ) -> None:
        self._base_url = base_url
        self._headers = headers
        self._name = f"bench-{secrets.token_hex(3)}"
        self._script = script
        self._clients = clients
        self._turns_per_session = turns_per_session
        self.answered = 0
        self._ready: deque[str] = deque()
        self._names: Iterator[int] = itertools.count()
        self._tally = Tally()
        self._until = 0.0

    async def run(self, seconds: float) -> Tally:
        """All clients at work for so long; the turns that end within it are tallied."""
        self._tally = tally = Tally()
        began = time.perf_counter()
        self._until = began + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client())
        tally.seconds = time.perf_counter() - began
        return tally

    async def create_ahead(self, turns: float) -> None:
        """Sessions for about `turns` turns."""
        wanted = int(turns * CREATE_AHEAD / self._turns_per_session) + self._clients - len(self._ready)
        shares = [wanted // self._clients + (index < wanted % self._clients) for index in range(self._clients)]
        async with asyncio.TaskGroup() as group:
            for share in shares:
                group.create_task(self._create(share))

    async def _create(self, count: int) -> None:
        async with await Connection.connect(self._base_url, self._headers) as connection:
            for _ in range(count):
                self._ready.append(await self._new_session(connection))

    async def _new_session(self, connection: Connection) -> str:
        name = f"{self._name}-{next(self._names)}"
        await connection.json("POST", "/sessions", {"session_id": name})
        return name

    async def _client(self) -> None:
        """Turns until the time is over, on a new connection after one has broken."""
        while time.perf_counter() < self._until:
            try:
                async with await Connection.connect(self._base_url, self._headers) as connection:
                    while time.perf_counter() < self._until:
                        await self._session(connection)
            except (Broken, OSError) as error:
                self._tally.failed(type(error).__name__)

    async def _session(self, connection: Connection) -> None:
        if self._ready:
            name = self._ready.popleft()
        else:
            self._tally.created_within += 1
            name = await self._new_session(connection)
        conversation = self._script.begin()
        path = f"/sessions/{name}/v1/chat/completions"
        while conversation.turns < self._turns_per_session and time.perf_counter() < self._until:
            body = conversation.body()
            began = time.perf_counter()
            response = await connection.request("POST", path, body)
            ended = time.perf_counter()
            if response.status != 200:
                self._tally.failed(f"{response.status} {error_code(response.body)}")
                return
            self.answered += 1
            if ended > self._until:
                self._tally.late += 1
            else:
                self._tally.latencies.append(ended - began)
                self._tally.request_bytes += sum(map(len, body))
                self._tally.reply_bytes += len(response.body)
            conversation.answered(reply_message(response.body))
