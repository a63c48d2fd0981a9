"""Concurrent sessions against a server, and what their requests and replies consist of.

Every client has one connection and one session at a time. Sessions are created before the measurement, so the figures
are of turns only.
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
from collections.abc import Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol

import msgspec

from ops.bench.client import Broken, Connection, Response
from ops.simulator.tokenizer import WORDS

SIM = b'{"completion_tokens":11,"tool_calls":false,"reasoning":false}'
"""Makes replies of about 2 KiB for requests of 2 KiB; most of a reply are the prompt's token ids."""

HISTORY_MESSAGE_BYTES = 8192
"""Size of the messages of which large requests consist, as in a long history of tool results."""

TURN_GROWTH_BYTES = 130
"""Approximate bytes that a turn adds to the next request: the reply's message and a short question."""

BYTES_PER_TOKEN, TEMPLATE_TOKENS = 4.9, 10
"""Of a question's text, and what a turn's prompt has beside it."""

CREATE_AHEAD = 1.25
"""Factor for the number of sessions created before a measurement, over the number that the warm-up's rate predicts."""


HEAD_BYTES = 65536
"""In a longer reply the message is searched within this many bytes; the rest are ids and payloads."""


class _Choice(msgspec.Struct):
    message: msgspec.Raw


class _Reply(msgspec.Struct):
    choices: tuple[_Choice]


_decode_reply = msgspec.json.Decoder(_Reply).decode
_decode_head = json.JSONDecoder().raw_decode
_MESSAGE = re.compile(rb'"choices": ?\[\{"index": ?0, ?"message": ?')


def reply_message(body: bytes) -> bytes:
    """The assistant message of a chat reply, as raw JSON.

    The simulator writes it before ids and payloads, so that finding it does not require reading 50 MiB.
    """
    begin = _MESSAGE.search(body, 0, HEAD_BYTES) if len(body) > HEAD_BYTES else None
    if begin is None:
        return bytes(_decode_reply(body).choices[0].message)
    text = body[begin.end() : begin.end() + HEAD_BYTES].decode("latin-1")  # one character for each byte
    return body[begin.end() : begin.end() + _decode_head(text)[1]]


class _Content(msgspec.Struct):
    content: msgspec.Raw


class _Items(msgspec.Struct):
    output: msgspec.Raw


def _messages_reply(body: bytes) -> bytes:
    return b'{"role":"assistant","content":' + bytes(msgspec.json.decode(body, type=_Content).content) + b"}"


def _responses_reply(body: bytes) -> bytes:
    return bytes(msgspec.json.decode(body, type=_Items).output).strip()[1:-1]


class _Sampled(msgspec.Struct):
    token_ids: msgspec.Raw


class _SampledReply(msgspec.Struct):
    choices: tuple[_Sampled]


class _Output(msgspec.Struct):
    output_ids: msgspec.Raw


def _completions_ids(body: bytes) -> bytes:
    return bytes(msgspec.json.decode(body, type=_SampledReply).choices[0].token_ids).strip()[1:-1]


def _generate_ids(body: bytes) -> bytes:
    return bytes(msgspec.json.decode(body, type=_Output).output_ids).strip()[1:-1]


def _question(number: int) -> bytes:
    return b'{"role":"user","content":"And then, after step %d?"}' % number


def _question_ids(number: int) -> bytes:
    return b"20,21,22,23,24,25,26,27,28,29,30,%d" % (31 + number)


class Wire(NamedTuple):
    """A protocol: its route, the field of a request's history, fields that it needs, what a reply adds to the history,
    and the question of a number, both as raw JSON. `has_ids`: the history is token ids. `key`: the field that marks a
    retry, if the protocol has one."""

    route: str
    history: bytes
    needed: bytes
    added: Callable[[bytes], bytes]
    question: Callable[[int], bytes] = _question
    has_ids: bool = False
    key: str | None = None


CHAT = Wire("/v1/chat/completions", b"messages", b"", reply_message)
COMPLETIONS = Wire(
    *("/v1/completions", b"prompt", b',"max_tokens":16,"logprobs":0,"return_token_ids":true', _completions_ids),
    *(_question_ids, True),
)
VLLM = Wire(
    *("/inference/v1/generate", b"token_ids", b',"sampling_params":{"max_tokens":16}', _completions_ids),
    *(_question_ids, True, "request_id"),
)
SGLANG = Wire(
    *("/generate", b"input_ids", b',"sampling_params":{"max_new_tokens":16},"return_logprob":true', _generate_ids),
    *(_question_ids, True, "rid"),
)
WIRES = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "vllm": VLLM,
    "sglang": SGLANG,
    "messages": Wire("/v1/messages", b"messages", b',"max_tokens":4096', _messages_reply),
    "responses": Wire("/v1/responses", b"input", b"", _responses_reply),
}


def error_code(body: bytes) -> str:
    """The `code` of an error reply; "?" if it has none."""
    found = re.search(rb'"code":\s*"([a-z_]+)"', body)
    return found[1].decode() if found else "?"


class Conversation:
    """The requests of one session: each repeats the previous one and adds the reply's message and a question."""

    def __init__(self, opening: list[bytes], sim: bytes = SIM, more: bytes = b"", wire: Wire = CHAT) -> None:
        self._front = b'{"model":"simulator","sim":%b%b%b,"%b":[' % (sim, more, wire.needed, wire.history)
        self._messages = list(opening)
        self._question = wire.question
        self.turns = 0

    def body(self) -> tuple[bytes, ...]:
        """The next request's body, in pieces."""
        return (self._front, self.history, b"]}")

    @property
    def history(self) -> bytes:
        """The items of the next request's history, as raw JSON."""
        return b",".join(self._messages)

    def answered(self, message: bytes, question: bytes | None = None) -> None:
        """Add a reply's message and the next question."""
        self.turns += 1
        self._messages += [message, question or self._question(self.turns)]


def opening_messages(size: int, seed: int = 0) -> list[bytes]:
    """Messages of about `size` bytes in total, in the simulator's vocabulary, so that they compress like prose."""
    rng = random.Random(seed)
    messages: list[bytes] = []
    while size > 0:
        wanted = max(40, min(size, HISTORY_MESSAGE_BYTES) - 30)
        text = " ".join(rng.choices(WORDS, k=wanted // 3))[:wanted]
        messages.append(msgspec.json.encode({"role": "user", "content": text}))
        size -= len(messages[-1])
    return messages


def question_bytes(tokens: int) -> int:
    """About how many bytes a question has in the simulator's vocabulary that adds so many tokens to a prompt."""
    return int((tokens - TEMPLATE_TOKENS) * BYTES_PER_TOKEN)


def opening_ids(size: int, seed: int = 0) -> list[bytes]:
    """Token ids that take about `size` bytes, as one item of a history."""
    rng = random.Random(seed)
    return [b",".join(b"%d" % rng.randrange(100, 1000) for _ in range(size // 4))]


def opening_of(wire: Wire, size: int, seed: int = 0) -> list[bytes]:
    return (opening_ids if wire.has_ids else opening_messages)(size, seed)


class Dialogue(Protocol):
    """The requests of one session, of which `turns` were answered."""

    @property
    def turns(self) -> float: ...

    def body(self) -> tuple[bytes, ...]:
        """The next request's body, in pieces."""

    def answered(self, message: bytes) -> None:
        """Go on with a reply's message, as raw JSON."""


class Source(Protocol):
    """What the clients of a load say: `Script`, or recorded runs of programs."""

    @property
    def wire(self) -> Wire: ...

    @property
    def is_known(self) -> bool: ...

    def dialogues(self) -> Iterator[Dialogue]:
        """Without end, one for each session."""


class Script(NamedTuple):
    """The content of each session of a load: its first messages, and the `sim` and other fields of every request.

    `is_known`: sessions have taken their first turn before they are measured, so every request repeats a history that
    the server knows.
    """

    opening: list[bytes]
    sim: bytes = SIM
    more: bytes = b""
    wire: Wire = CHAT
    is_known: bool = False

    def begin(self) -> Conversation:
        return Conversation(self.opening, self.sim, self.more, self.wire)

    def dialogues(self) -> Iterator[Conversation]:
        while True:
            yield self.begin()


def short_turns(request_bytes: int, turns_per_session: int, wire: Wire = CHAT) -> Script:
    """A script with requests of `request_bytes` on average."""
    growth = TURN_GROWTH_BYTES * (turns_per_session - 1) // 2
    return Script(opening_of(wire, max(64, request_bytes - growth - 140)), wire=wire)


REQUESTED_FIELDS = (
    b',"logprobs":true,"top_logprobs":0,"return_meta_info":true,"return_prompt_token_ids":true,"return_token_ids":true'
)
"""The fields that Turnlog adds to a request for an engine. The client sends them too, so that an engine called directly
has the same work."""

EXPERTS = {"layers": 48, "top_k": 4, "experts": 128}
"""Shape of a large reply's `routed_experts`, which are most of it: 1 KiB for each token of prompt and output but the
last, in base64."""


class Size(NamedTuple):
    """Replies of a size, on the average over a session, and the load to measure them with."""

    prompt_bytes: int
    completion_tokens: int
    clients: int
    turns_per_session: int
    has_payload: bool = True

    def script(self) -> Script:
        sim: dict[str, object] = {"completion_tokens": self.completion_tokens, "tool_calls": False, "reasoning": False}
        more = REQUESTED_FIELDS
        if self.has_payload:
            sim["experts"] = EXPERTS
            more += b',"return_routed_experts":true'
        return Script(opening_messages(self.prompt_bytes), msgspec.json.encode(sim), more)


SIZES = {
    "2KiB": Size(450, 5, 64, 8, has_payload=False),
    "100KiB": Size(240, 10, 64, 4),
    "1.3MiB": Size(5850, 32, 64, 8),
    "50MiB": Size(268_000, 200, 2, 4),
}


class Session(NamedTuple):
    """A session of a server: its calls go to `root` and a protocol's route, with these headers (whole lines, each with
    CRLF)."""

    id: str
    root: str
    headers: str = ""


Open = Callable[[Connection, str], Awaitable[Session]]


async def open_session(connection: Connection, name: str, **more: str) -> Session:
    """Create a session of Turnlog, with more of its fields. Raises Broken."""
    await connection.json("POST", "/sessions", {"session_id": name, **more})
    return Session(name, f"/sessions/{name}")


class Tally(msgspec.Struct):
    """What the clients measured in one period. `latencies` are in seconds; `late` turns ended after the period."""

    latencies: list[float] = []
    late: int = 0
    errors: dict[str, int] = {}
    reply_bytes: int = 0
    created_within: int = 0
    seconds: float = 0.0

    def failed(self, what: str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1


class Load:
    """`clients` concurrent clients of `base_url`, created once and measured over any number of periods.

    `headers` are added to each request: whole lines, each with CRLF.
    """

    def __init__(
        self,
        base_url: str,
        script: Source,
        *,
        clients: int,
        turns_per_session: int,
        headers: str = "",
        opens: Open = open_session,
    ) -> None:
        self._base_url = base_url
        self._open = opens
        self._headers = headers
        self._name = f"bench-{secrets.token_hex(3)}"
        self._script = script
        self._dialogues = script.dialogues()
        self._clients = clients
        self._turns_per_session = turns_per_session
        self._ready: deque[tuple[Session, Dialogue]] = deque()
        self._names: Iterator[int] = itertools.count()
        self._tally = Tally()
        self._until = 0.0

    async def run(self, seconds: float) -> Tally:
        """Run all clients for `seconds` and count the turns that end within that time."""
        self._tally = tally = Tally()
        began = time.perf_counter()
        self._until = began + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clients):
                group.create_task(self._client())
        tally.seconds = time.perf_counter() - began
        return tally

    async def create_ahead(self, turns: float) -> None:
        """Create sessions for about `turns` turns."""
        wanted = int(turns * CREATE_AHEAD / self._turns_per_session) + self._clients - len(self._ready)
        shares = [wanted // self._clients + (index < wanted % self._clients) for index in range(self._clients)]
        async with asyncio.TaskGroup() as group:
            for share in shares:
                group.create_task(self._create(share))

    async def _create(self, count: int) -> None:
        async with await Connection.connect(self._base_url, self._headers) as connection:
            for _ in range(count):
                self._ready.append(await self._new_session(connection))

    async def _new_session(self, connection: Connection) -> tuple[Session, Dialogue]:
        session = await self._open(connection, f"{self._name}-{next(self._names)}")
        conversation = next(self._dialogues)
        if self._script.is_known:
            response = await self._ask(connection, session, conversation)
            if response.status != 200:
                raise Broken(f"the first turn: {response.status} {error_code(response.body)}")
            conversation.answered(self._script.wire.added(response.body))
        return session, conversation

    async def _ask(self, connection: Connection, session: Session, conversation: Dialogue) -> Response:
        path = session.root + self._script.wire.route
        return await connection.request("POST", path, conversation.body(), session.headers)

    async def _client(self) -> None:
        """Run turns until the time is over. After an error of the connection, continue on a new one."""
        while time.perf_counter() < self._until:
            try:
                async with await Connection.connect(self._base_url, self._headers) as connection:
                    while time.perf_counter() < self._until:
                        await self._session(connection)
            except (Broken, OSError) as error:
                self._tally.failed(type(error).__name__)

    async def _session(self, connection: Connection) -> None:
        if self._ready:
            session, conversation = self._ready.popleft()
        else:
            self._tally.created_within += 1
            session, conversation = await self._new_session(connection)
        while conversation.turns < self._turns_per_session:
            if time.perf_counter() >= self._until:
                if self._script.is_known:
                    self._ready.append((session, conversation))
                return
            began = time.perf_counter()
            response = await self._ask(connection, session, conversation)
            ended = time.perf_counter()
            if response.status != 200:
                self._tally.failed(f"{response.status} {error_code(response.body)}")
                return
            if ended > self._until:
                self._tally.late += 1
            else:
                self._tally.latencies.append(ended - began)
                self._tally.reply_bytes += len(response.body)
            conversation.answered(self._script.wire.added(response.body))


async def timed_turn(connection: Connection, path: str, body: tuple[bytes, ...]) -> tuple[bytes, float]:
    """Send a request; returns the reply's body and the seconds. Raises Broken if the status is not 200."""
    began = time.perf_counter()
    response = await connection.request("POST", path, body)
    seconds = time.perf_counter() - began
    if response.status != 200:
        raise Broken(f"{path} answered {response.status}: {response.body[:200]!r}")
    return response.body, seconds
