"""An engine that answers in SGLang's shape what follows from the messages, after a while, and sometimes otherwise.

A reply's content names the messages that were asked, and mostly the generation: whoever gets it can tell whether it is
the answer to his own question. Logprobs always tell two generations of one request apart.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import math
import random
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from app.upstream.body import Body
from app.upstream.client import EngineClient, EngineReply, Grow, Withheld
from app.upstream.headers import Headers
from app.upstream.http import Lost, NotSent, TimedOut
from app.upstream.streams import StreamReader
from tests.tools.simulation.spelling import THOUGHT, Message, meaning

if TYPE_CHECKING:
    from tests.tools.simulation.world import World

LONG_S = 30.0
"""A generation that takes longer than any lease."""

CHAT = "v1/chat/completions"

EXPERTS = 2
"""Ids in a row of `routed_experts`."""


def digest(messages: Sequence[Message]) -> str:
    """What a reply to these messages names them by."""
    return hashlib.sha256(msgspec.json.encode([meaning(message) for message in messages])).hexdigest()[:12]


def ids_of(message: Message) -> list[int]:
    """A message's ids, however it is spelled."""
    _, text, calls, _ = meaning(message)
    return token_ids(f"{text}{calls}" if calls else text)


def token_ids(text: str) -> list[int]:
    """Two to five ids that follow from the text."""
    raw = hashlib.sha256(text.encode()).digest()
    return [raw[at] << 8 | raw[at + 1] for at in range(2, 6 + 2 * (raw[0] % 4), 2)]


class Sample(NamedTuple):
    """By which engine with which weights a token was sampled, in which of its generations, and when. `sent`: the
    weights when the request was sent."""

    engine: str
    generation: int
    version: str
    at: float
    sent: str


class Manner(msgspec.Struct, frozen=True):
    """What is special about a schedule's engines. Some replies have thoughts or `calls`; all are the same for every
    generation (`repeats`). `drifts` is how often a prompt's ids are not those that were sampled, `wavers` how often a
    prompt's tokens get other experts than in the generation before."""

    thinks: bool = False
    calls: bool = False
    repeats: bool = False
    drifts: float = 0.0
    wavers: float = 0.0


def draw_manner(rng: random.Random) -> Manner:
    return Manner(
        thinks=rng.random() < 0.4,
        calls=rng.random() < 0.4,
        repeats=rng.random() < 0.4,
        drifts=rng.choice((0.0, 0.0, 0.2)),
        wavers=rng.choice((0.0, 0.3)),
    )


PLAIN = Manner()


class Generated(msgspec.Struct, frozen=True):
    """What came of a generation: its ids, the logprobs of the output, its body, and the experts of its tokens from
    `first_row` on, if it was asked for them."""

    prompt: Sequence[int]
    output: Sequence[int]
    logprobs: Sequence[float]
    version: int
    first_row: int
    experts: Sequence[int] | None
    body: bytes


class Engines:
    """What the engines of a schedule are at, whichever process asked for it.

    `begun` are the sessions' generations, `last` the engines that had the newest of each, `generated` the sound replies
    by the rid that asked for them. `aborted` counts the generations that were. `sampled`, of those that sample the same
    each time: how often each token was, by the digest of the messages and its place. `ordered` is what befalls a
    session's next generation. `closed`: how often an engine was told to end a session of its own. `sent`: the engine's
    weights when a request was sent, by its number.
    """

    def __init__(self, rng: random.Random, *, is_plain: bool) -> None:
        self.manner = PLAIN if is_plain else draw_manner(rng)
        self.rng = rng
        self.numbers = itertools.count(1)
        self.generated: dict[str, list[Generated]] = {}
        self.begun: Counter[str] = Counter()
        self.aborted = 0
        self.last: dict[str, str] = {}
        self.ordered: dict[str, str] = {}
        self.sampled: defaultdict[tuple[str, int], list[Sample]] = defaultdict(list)
        self.generations = itertools.count(1)
        self.sent: dict[int, str] = {}
        self._updates: Counter[str] = Counter()
        self._held: dict[tuple[str, str], float] = {}
        self.closed: Counter[tuple[str, str]] = Counter()
        self._running: dict[tuple[str, str], asyncio.Future[None]] = {}
        self._paused: dict[str, asyncio.Event] = {}

    async def generate(self, url: str, rid: str, seconds: float) -> bool:
        """Did it come to its end? Otherwise somebody has aborted it. Where the engine is paused it begins later."""
        while url in self._paused:
            await self._paused[url].wait()
        ended = self._running[url, rid] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await ended
        except TimeoutError:
            return True
        return False

    def abort(self, url: str, prefix: str) -> None:
        """By rid, of which engines look at the beginning."""
        for (engine, rid), ended in self._running.items():
            if engine == url and rid.startswith(prefix) and not ended.done():
                ended.set_result(None)
                self.aborted += 1

    def die(self) -> None:
        """All of them, in the middle of what they generate; they are there again at once."""
        for ended in self._running.values():
            if not ended.done():
                ended.set_exception(Lost("reset"))

    def pause(self, url: str, mode: str) -> None:
        self._paused.setdefault(url, asyncio.Event())
        if mode == "abort":
            self.abort(url, "")

    def go_on(self, url: str) -> None:
        """Meanwhile the engine got new weights."""
        if url in self._paused:
            self._updates[url] += 1
            self._paused.pop(url).set()

    def version(self, url: str) -> str:
        """The engine's weight version."""
        return str(1 + self._updates[url])

    def open(self, url: str, name: str, seconds: float) -> bool:
        """False where the engine holds a session of that name."""
        if self.holds(url, name):
            return False
        self._held[url, name] = asyncio.get_running_loop().time() + seconds
        return True

    def close(self, url: str, name: str) -> None:
        self.closed[url, name] += 1
        self._held.pop((url, name), None)

    def holds(self, url: str, name: str) -> bool:
        """An engine ends a session by itself after the time that it was given."""
        return self._held.get((url, name), -math.inf) > asyncio.get_running_loop().time()

    @property
    def paused(self) -> list[str]:
        return list(self._paused)


class SimulatedEngine(EngineClient):
    """Stands where a process's HTTP client does. The weather says how often it fails, and how slow it is.

    `is_shut` says of an adapter whether the process's gates are shut to it: then no generation may begin.
    """

    faults: tuple[str, ...] = (
        *("not_sent", "lost", "timed_out", "slow", "500", "429", "400"),
        *("cut", "no_ids", "nan", "not_json", "307"),
    )

    def __init__(self, world: World, is_shut: Callable[[str | None], bool]) -> None:
        self._world = world
        self._engines = world.engines
        self._is_shut = is_shut

    async def close(self) -> None:
        return

    async def get(self, url: str, headers: Headers) -> EngineReply:
        await self._sleep(self._world.weather.network_s)
        return EngineReply(200, [], Body([b"{}"]))

    async def post(
        self,
        url: str,
        body: bytes | Sequence[bytes | memoryview],
        headers: Headers,
        grow: Grow = lambda size: None,
        may_send: Callable[[], bool] | None = None,
        stream: StreamReader | None = None,
    ) -> EngineReply:
        if may_send is not None and not may_send():
            raise Withheld
        engine, _, route = url.removeprefix("http://").partition("/")
        request = msgspec.json.decode((body if isinstance(body, bytes) else b"".join(body)) or b"{}")
        if route != CHAT or "x-smg-routing-key" not in dict(headers):
            return await self._control(engine, route, request)
        session_id, adapter = dict(headers)["x-smg-routing-key"], self._adapter(request)
        number = next(self._engines.numbers)
        bad = self._world.happens(self._world.weather.engine_faults)
        how = self._engines.ordered.pop(session_id, self._world.rng.choice(self.faults) if bad else None)
        self._world.note(f"generation {number} of {session_id} at {engine}{'' if how is None else f': {how}'}")
        if self._is_shut(adapter):
            self._world.history.problem(f"a generation of {session_id} began although the gate of {adapter} was shut")
        self._engines.begun[session_id] += 1
        self._engines.last[session_id] = engine
        self._engines.sent[number] = self._engines.version(engine)
        await self._sleep(self._world.weather.network_s)
        if how == "not_sent":
            raise NotSent("refused")
        if how == "lost":
            await self._sleep(self._world.weather.engine_s)
            raise Lost("reset")
        if how == "timed_out":
            await asyncio.sleep(LONG_S)
            raise TimedOut("no answer in time")
        return await self._generate(engine, dict(headers), request, number, how, grow, stream)

    def _adapter(self, request: Mapping[str, Any]) -> str | None:
        return request.get("lora_path")

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
        """What the engine answers, unless it fails as `how` says."""
        seconds = LONG_S if how == "slow" else self._world.rng.expovariate(1 / self._world.weather.engine_s)
        is_whole = await self._engines.generate(engine, request.get("rid", ""), seconds) and how != "aborted"
        if how is not None and how.isdigit():
            return EngineReply(int(how), [("content-type", "application/json")], Body([b'{"error":{"message":"no"}}']))
        cut = None if is_whole else self._world.rng.randrange(3)
        sound = reply(request, number, cut, self._engines.manner, self._engines.rng)
        raw = _broken(sound, how)
        if how in (None, "slow", "aborted"):
            self._engines.generated.setdefault(request["rid"], []).append(_generated(request, sound, raw))
        grow(len(raw))
        return EngineReply(200, [("content-type", "application/json")], Body([raw]))

    async def _control(self, engine: str, route: str, order: Mapping[str, Any]) -> EngineReply:
        """An order, or a question whether the engine takes ids; it may fail, or be done although nobody is told."""
        await self._sleep(self._world.weather.network_s)
        bad = self._world.happens(self._world.weather.engine_faults / 4)
        if bad and self._world.rng.random() < 0.5:
            raise NotSent("refused")
        status, said = self._told(engine, route, order)
        self._world.note(
            f"{engine} is told {route} {order.get('session_id', '')}{': nobody hears of it' if bad else ''}"
        )
        if bad:
            raise Lost("reset")
        return EngineReply(status, [], Body([msgspec.json.encode(said)]))

    def _told(self, engine: str, route: str, order: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        """The engine does what it is told: status and reply."""
        if route == CHAT:
            return 200, reply(order, 0)
        if route == "open_session":
            return 200 if self._engines.open(engine, order["session_id"], order["timeout"]) else 400, {}
        if route == "close_session":
            self._engines.close(engine, order["session_id"])
        elif route == "abort_request":
            self._engines.abort(engine, order["rid"])
        elif route == "pause_generation":
            self._engines.pause(engine, order["mode"])
        elif route == "continue_generation":
            self._engines.go_on(engine)
        return 200, {}

    async def _sleep(self, mean_s: float) -> None:
        await asyncio.sleep(self._world.rng.expovariate(1 / mean_s))


def reply(
    request: Mapping[str, Any],
    number: int,
    cut: int | None = None,
    manner: Manner = PLAIN,
    rng: random.Random | None = None,
) -> dict[str, Any]:
    """A sound reply to a request. Prompts continue, unless they drift: a message's ids are the same wherever it stands.

    `cut`: it was aborted after so many tokens. What goes on behind the ids of such a one says so.
    """
    messages = request["messages"]
    prompt = request.get("input_ids")
    if prompt is None:
        message = _message(digest(messages), number, manner, is_whole=cut is None)
        prompt = [token for one in messages for token in ids_of(one)]
        if rng is not None and rng.random() < manner.drifts:
            prompt[0] += 1
    else:
        message = {"role": "assistant", "content": f"+{number}"}
    whole = ids_of(message)
    most = min(request.get("max_tokens") or len(whole), len(whole))
    output = whole[:most][:cut]
    finish = "abort" if cut is not None else "stop" if most == len(whole) else "length"
    meta: dict[str, Any] = {
        "id": request.get("rid", ""),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
        "weight_version": str(1 + number // 8),
        "finish_reason": {"type": finish},
        "output_token_logprobs": [[-number - 1.0 / (1 + token), token, None] for token in output],
    }
    if request.get("return_routed_experts"):
        known = request.get("routed_experts_start_len", 0)
        changed = number if rng is not None and rng.random() < manner.wavers else 0
        experts = array("i", _experts(prompt, changed) + _experts(output, 0))[known * EXPERTS : -EXPERTS]
        meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish,
        "prompt_token_ids": prompt,
        "meta_info": meta,
    }
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "simulated", "choices": [choice]}


def _message(asked: str, number: int, manner: Manner, *, is_whole: bool) -> dict[str, Any]:
    """What is special about a reply follows from the messages that were asked."""
    chosen = int(asked[:6], 16)
    content = f"{asked}/{'same' if manner.repeats else number}"
    if manner.thinks and chosen % 3 == 0:
        content = f"{THOUGHT}{content}"
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if manner.thinks and chosen % 3 == 1:
        message["reasoning_content"] = "hm"
    if manner.calls and is_whole and chosen % 5 < 3:
        message["tool_calls"] = [_call(asked, place) for place in range(chosen % 5)]
    return message


def _call(asked: str, place: int) -> dict[str, Any]:
    function = {"name": f"tool{place}", "arguments": f'{{"b": [1, 2.0], "a": "{asked}"}}'}
    return {"id": f"call_{place}", "type": "function", "function": function}


def _experts(tokens: Sequence[int], changed: int) -> list[int]:
    """Those of each token; if `changed`, of every third another one."""
    moved = [changed * (place % 3 == 2) for place in range(len(tokens))]
    return [
        ((token >> shift) + move) & 63 for token, move in zip(tokens, moved, strict=True) for shift in range(EXPERTS)
    ]


def _generated(request: Mapping[str, Any], sound: dict[str, Any], body: bytes) -> Generated:
    [choice] = sound["choices"]
    meta = choice["meta_info"]
    experts = array("i", base64.b64decode(meta["routed_experts"])) if "routed_experts" in meta else None
    return Generated(
        choice["prompt_token_ids"],
        [token for _, token, _ in meta["output_token_logprobs"]],
        [logprob for logprob, _, _ in meta["output_token_logprobs"]],
        int(meta["weight_version"]),
        request.get("routed_experts_start_len", 0),
        experts,
        body,
    )


def _broken(sound: dict[str, Any], how: str | None) -> bytes:
    meta = sound["choices"][0]["meta_info"]
    if how == "no_ids":
        del meta["output_token_logprobs"]
    raw = msgspec.json.encode(sound)
    if how == "cut":
        return raw[: len(raw) // 2]
    if how == "nan":
        return raw.replace(b'"output_token_logprobs":[[', b'"output_token_logprobs":[[NaN,', 1)
    return b"<html>busy</html>" if how == "not_json" else raw
