"""An engine that answers in vLLM's shape, chunk by chunk where it is asked to, and the same messages alike each time.

Each token's text is four hexadecimal digits, its id, so that a message's tokens follow from its text. The first three
are the digest of the messages, from which the others follow, as does the logprob from a token's place: whoever reads a
turn's tokens can tell whether one is missing, doubled, or of another generation.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from app.upstream.body import Body
from app.upstream.client import EngineReply, Grow
from app.upstream.headers import Headers
from app.upstream.http import Lost, NotSent, TimedOut
from app.upstream.streams import StreamReader
from tests.tools.simulation.engine import CHAT, LONG_S, Engines, Sample, SimulatedEngine, digest, token_ids
from tests.tools.simulation.spelling import Message

OF_DIGEST = 3
"""So many tokens of a generation name the messages."""

MOST_MORE = 24
TOKENS_A_CHUNK = 3

MIDWAY = ("died", "cut", "stalled", "error")
"""What may befall a generation when some of its tokens have come."""

FAULTS = ("not_sent", "lost", "timed_out", "slow", "500", "429", "400", "307", "no_ids", "nan", *MIDWAY, *MIDWAY)

RENDER = "v1/chat/completions/render"

JSON = [("content-type", "application/json")]


def sampled(named: str) -> list[int]:
    """All that is generated for messages with this digest."""
    raw = hashlib.sha256(named.encode()).digest()
    more = hashlib.shake_256(raw).digest(2 * (1 + raw[0] % MOST_MORE))
    return ids_in(named + more.hex())


def ids_in(text: str) -> list[int]:
    return [int(text[at : at + 4], 16) for at in range(0, len(text), 4)]


def logprob(token: int, place: int) -> float:
    """Of the token at this place of a turn's output."""
    return -((token + 7919 * place) % 9973 + 1) / 9973


def prompt_of(messages: Sequence[Message]) -> list[int]:
    """Prompts continue: a reply's ids are those that were sampled."""
    found: list[int] = []
    for message in messages:
        is_reply = message["role"] == "assistant"
        found += ids_in(message["content"]) if is_reply else token_ids(message["content"])
    return found


class VllmEngine(SimulatedEngine):
    """`Engines.sampled` says which engine sampled a token, and with which weights."""

    faults = FAULTS

    async def get(self, url: str, headers: Headers) -> EngineReply:
        await self._sleep(self._world.weather.network_s)
        engine, _, route = url.removeprefix("http://").partition("/")
        if self._world.happens(self._world.weather.engine_faults / 4):
            raise NotSent("refused")
        told = {"weight_version": self._engines.version(engine)} if route == "weight_info" else {}
        return EngineReply(200, JSON, Body([msgspec.json.encode(told)]))

    def _adapter(self, request: Mapping[str, Any]) -> str | None:
        return None if request["model"] == "simulated" else str(request["model"])

    async def _generate(
        self,
        engine: str,
        headers: Mapping[str, str],
        request: Mapping[str, Any],
        number: int,
        how: str | None,
        grow: Grow,
        stream: StreamReader | None,
    ) -> EngineReply:
        rng, weather, rid = self._world.rng, self._world.weather, headers["x-request-id"]
        seconds = LONG_S if how == "slow" else rng.expovariate(1 / weather.engine_s)
        if how is not None and how.isdigit():
            await asyncio.sleep(seconds)
            return EngineReply(int(how), JSON, Body([b'{"error":{"message":"no"}}']))
        made = _Generation(request, rid, self._engines, engine, self._engines.sent[number])
        self._world.must(made.fits, f"a generation of {rid} continues tokens that are not its own")
        wire = None if stream is None or not request.get("stream") else _Wire(rng, grow, stream)
        if wire is not None:
            wire.write(made.begun())
        strikes = rng.randrange(made.chunks) if how in MIDWAY else None
        while made.finish is None:
            if made.place == strikes:
                await self._strike(how, wire)
                break
            goes_on = await self._engines.generate(engine, rid, seconds / made.chunks)
            made.go_on() if goes_on else made.abort()
            if wire is not None:
                wire.write(made.chunk(how))
        if stream is None or wire is None:
            raw = msgspec.json.encode(made.whole(how))
            grow(len(raw))
            return EngineReply(200, JSON, Body([raw]))
        if made.finish is not None:
            wire.end(made.counted())
        return EngineReply(200, JSON, Body([stream.reply()]))

    async def _strike(self, how: str | None, wire: _Wire | None) -> None:
        """Raises Lost or TimedOut, unless the engine ends its stream in good order."""
        if how == "stalled":
            await asyncio.sleep(LONG_S)
            raise TimedOut("no answer in time")
        if how == "died" or wire is None:
            raise Lost("reset")
        if how == "error":
            wire.write({"error": {"message": "no", "type": "InternalServerError", "code": 500}})

    def _told(self, engine: str, route: str, order: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        if route == CHAT:
            return 200, {"prompt_token_ids": order["kv_transfer_params"]["prompt_token_ids"], "choices": [{}]}
        if route.startswith("pause?mode="):
            self._engines.pause(engine, route.removeprefix("pause?mode="))
        elif route == "resume":
            self._engines.go_on(engine)
        elif route == "abort_requests":
            for name in order["request_ids"]:
                if name.startswith("chatcmpl-"):
                    self._engines.abort(engine, name.removeprefix("chatcmpl-"))
        return 200 if route != RENDER else 404, {}


class _Generation:
    """One request's tokens, as they come. `fits`: its prompt is that of the messages, with the beginning of what they
    are answered. `finish` says why it has ended."""

    def __init__(self, request: Mapping[str, Any], rid: str, engines: Engines, engine: str, sent: str) -> None:
        self.finish: str | None = None
        self.place = 0
        self._rid, self._number = rid, next(engines.generations)
        self._engines, self._engine, self._sent = engines, engine, sent
        self._model, self._spells_versions = request["model"], "return_weight_versions" in request
        self._named = digest(request["messages"])
        prompt, whole = prompt_of(request["messages"]), sampled(self._named)
        self._prompt: list[int] = (request.get("kv_transfer_params") or {}).get("prompt_token_ids", prompt)
        self._had = len(self._prompt) - len(prompt)
        self._rest = whole[self._had :]
        self.fits = self._prompt == prompt + whole[: self._had] and bool(self._rest)
        self._new: list[int] = []
        self._versions: list[str] = []

    @property
    def chunks(self) -> int:
        return -(-len(self._rest) // TOKENS_A_CHUNK)

    def go_on(self) -> None:
        self._new = self._rest[len(self._versions) :][:TOKENS_A_CHUNK]
        self.place += 1
        version, now = self._engines.version(self._engine), asyncio.get_running_loop().time()
        for _ in self._new:
            self._engines.sampled[self._named, self._had + len(self._versions)].append(
                Sample(self._engine, self._number, version, now, self._sent)
            )
            self._versions.append(version)
        if len(self._versions) == len(self._rest):
            self.finish = "stop"

    def abort(self) -> None:
        self.finish, self._new = "abort", []

    def begun(self) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return {**self._root("chat.completion.chunk"), "choices": [choice], "prompt_token_ids": self._prompt}

    def chunk(self, how: str | None) -> dict[str, Any]:
        """The newest tokens."""
        first = len(self._versions) - len(self._new)
        choice = {"index": 0, "delta": {"content": text_of(self._new)} if self._new else {}, **self._tokens(first, how)}
        return {**self._root("chat.completion.chunk"), "choices": [choice]}

    def whole(self, how: str | None) -> dict[str, Any]:
        count = len(self._versions)
        message = {"role": "assistant", "content": text_of(self._rest[:count])}
        choice = {"index": 0, "message": message, **self._tokens(0, how)}
        root = {**self._root("chat.completion"), "prompt_token_ids": self._prompt, "usage": self._usage()}
        return {**root, "choices": [choice]}

    def counted(self) -> dict[str, Any]:
        """A stream's last event."""
        return {**self._root("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _usage(self) -> dict[str, int]:
        prompt, count = len(self._prompt), len(self._versions)
        return {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}

    def _root(self, what: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self._rid}", "object": what, "created": 1, "model": self._model}

    def _tokens(self, first: int, how: str | None) -> dict[str, Any]:
        """What a choice says of its tokens, from `first` on."""
        ids = self._rest[first : len(self._versions)]
        entries = [
            {
                "token": f"{token:04x}",
                "logprob": None if how == "nan" else logprob(token, self._had + first + place),
                "bytes": list(b"%04x" % token),
                "top_logprobs": [],
            }
            for place, token in enumerate(ids)
        ]
        told: dict[str, Any] = {"logprobs": {"content": entries}, "finish_reason": self.finish}
        if how != "no_ids":
            told["token_ids"] = ids
        if self.finish is not None:
            told["stop_reason"] = None
            if self._spells_versions:
                told["weight_versions"] = [
                    {"version": version, "start": place, "end": place + 1}
                    for place, version in enumerate(self._versions)
                ]
        return told


class _Wire:
    """A stream's bytes on their way, which come in pieces that are cut anywhere. What is behind a cut comes with the
    next event: one that is held back for longer could not be staged."""

    def __init__(self, rng: random.Random, grow: Grow, stream: StreamReader) -> None:
        self._rng, self._grow, self._stream = rng, grow, stream
        self._left = b""

    def write(self, event: Mapping[str, Any]) -> None:
        """Raises BadStream."""
        data = b"data: " + msgspec.json.encode(event) + b"\n\n"
        end = len(data) if self._rng.random() < 0.5 else self._rng.randrange(len(data))
        left, self._left = self._left, data[end:]
        self._feed(left + data[:end])

    def end(self, last: Mapping[str, Any]) -> None:
        self._feed(self._left + b"data: " + msgspec.json.encode(last) + b"\n\ndata: [DONE]\n\n")

    def _feed(self, piece: bytes) -> None:
        self._grow(len(piece))
        self._stream.feed(piece)


def text_of(ids: Sequence[int]) -> str:
    return "".join(f"{token:04x}" for token in ids)
