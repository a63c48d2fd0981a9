"""Several API processes fight over the same sessions on one PostgreSQL; each session's replies must have one order."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiohttp
import httpx
import pytest
from helpers.clusters import Cluster
from integration.stand import error_of, user

from app.domain.history import RequestHistory
from app.domain.request import canonical_hash
from app.domain.rules import TreeIndex
from app.protocols.chat import parse_chat
from fault.processes import serving
from fault.table import Tally
from fault.verified import verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged
from tests.tools.simulation import linearizable
from tests.tools.simulation.calls import (
    Audit,
    Call,
    Chat,
    Close,
    Done,
    Look,
    Message,
    Refused,
    Reply,
    Request,
    Seen,
    Taken,
    Told,
)

pytestmark = pytest.mark.long

FIGHTS = pytest.mark.fault(8, "processes fight over the same sessions on PostgreSQL")
CRASHES = pytest.mark.fault(8, "processes fight over the same sessions on PostgreSQL, which crashes")
WINDOW = 2
SESSIONS = 4
CLIENTS = 12
LONGEST_LATENCY_S = 0.02


class Fight:
    """Clients that send what they like to whichever process they like, and write down every call.

    `window` None: the sessions are trees.
    """

    def __init__(self, urls: list[str], seed: int, window: int | None = WINDOW) -> None:
        self._window = window
        self.urls = urls
        self.calls: dict[str, list[Call]] = {}
        self._rng = random.Random(seed)
        self._seed = seed
        self._sent: dict[str, list[Chat]] = {}

    async def run(self, steps: int) -> None:
        timeout = aiohttp.ClientTimeout(60)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as self._http:
            names = [f"fight-{self._seed}-{number}" for number in range(SESSIONS)]
            for name in names:
                kind = {"history": "tree"} if self._window is None else {"rollback_window": self._window}
                body = {"session_id": name, **kind}
                async with self._http.post(f"{self.urls[0]}/sessions", json=body) as response:
                    assert response.status == 200
                self.calls[name], self._sent[name] = [], []
            async with asyncio.TaskGroup() as group:
                for client in range(CLIENTS):
                    group.create_task(self._client(random.Random(f"{self._seed} {client}"), f"c{client}", names, steps))
            for name in names:
                await self._call(self.urls[-1], name, Audit())

    async def _client(self, rng: random.Random, own: str, names: list[str], steps: int) -> None:
        views: dict[str, list[Message]] = {name: [] for name in names}
        for step in range(steps):
            name, url = rng.choice(names), rng.choice(self.urls)
            kind = rng.random()
            if kind < 0.15:
                await self._call(url, name, Audit())
            elif kind < 0.15 + 0.2 * (step > 0.8 * steps) / SESSIONS:
                await self._call(url, name, Close())
            elif self._sent[name] and kind < 0.3:
                await self._call(url, name, rng.choice(self._sent[name][-6:]))
            else:
                if rng.random() < 0.6:
                    views[name] = await self._view(url, name) or views[name]
                await self._turn(rng, url, name, views, f"{own} {step}")
            await asyncio.sleep(rng.uniform(0, 0.01))

    async def _view(self, url: str, name: str) -> list[Message] | None:
        """Look at the session, and take its history for one's own."""
        seen = await self._call(url, name, Look())
        if not isinstance(seen, Seen) or not seen.texts:
            return None
        for call in self.calls[name]:
            if isinstance(call.request, Chat) and isinstance(call.reply, Taken) and call.reply.text == seen.texts[-1]:
                return [*call.request.messages, ("assistant", call.reply.text)]
        return None

    async def _turn(self, rng: random.Random, url: str, name: str, views: dict[str, list[Message]], text: str) -> None:
        """A turn after what is known of the history, less some turns; some are sent twice, to two processes."""
        history = views[name][: len(views[name]) - 2 * rng.choice((0, 0, 0, 0, 1, 2, 3))]
        messages = (*history, ("user", text))
        key = f"{name} {text}" if rng.random() < 0.7 else None
        chat = Chat(messages, _body_hash(messages), key)
        self._sent[name] += [chat] if key else []
        if rng.random() < 0.1 and self._sent[name]:
            key = rng.choice(self._sent[name]).key
            chat = Chat(messages, chat.body, key)
        others = [other for other in self.urls if other != url]
        if key is not None and others and rng.random() < 0.3:
            reply, _ = await asyncio.gather(
                self._call(url, name, chat), self._later(rng, rng.choice(others), name, chat)
            )
        else:
            reply = await self._call(url, name, chat)
        if isinstance(reply, Taken):
            views[name] = [*messages, ("assistant", reply.text)]

    async def _later(self, rng: random.Random, url: str, name: str, chat: Chat) -> None:
        await asyncio.sleep(rng.uniform(0, LONGEST_LATENCY_S))
        await self._call(url, name, chat)

    async def _call(self, url: str, name: str, request: Request) -> Reply | None:
        """Ask, and write down what was asked when, and what came."""
        start = time.monotonic()
        reply: Reply | None = None
        with contextlib.suppress(aiohttp.ClientError):
            reply = await self._ask(f"{url}/sessions/{name}", request)
        self.calls[name].append(Call(start, time.monotonic(), request, reply))
        return reply

    async def _ask(self, path: str, request: Request) -> Reply:
        match request:
            case Chat():
                headers = {"content-type": "application/json"}
                headers |= {"idempotency-key": request.key} if request.key else {}
                asked = self._http.post(f"{path}/v1/chat/completions", data=_body(request.messages), headers=headers)
            case Close():
                asked = self._http.delete(path)
            case Look():
                asked = self._http.get(path)
            case Audit():
                asked = self._http.get(f"{path}/events")
        async with asked as response:
            return _reply(request, response, await response.read())

    def explain(self, *, crashes: bool) -> None:
        """Each session's calls have an order that explains them."""
        for name, calls in self.calls.items():
            fault = linearizable.fault(calls, self._window, crashes=crashes)
            assert fault is None, (name, fault)

    def replies(self) -> Counter[str]:
        """How often there was each kind of reply to a chat."""
        counted: Counter[str] = Counter()
        for call in [call for calls in self.calls.values() for call in calls if isinstance(call.request, Chat)]:
            if isinstance(call.reply, Taken):
                counted["replayed" if call.reply.replayed else "taken"] += 1
            else:
                counted[call.reply.code if isinstance(call.reply, Refused) else "broken"] += 1
        return counted

    def acknowledged(self) -> list[Acknowledged]:
        return [
            Acknowledged(name, call.reply.turn, call.reply.digest)
            for name, calls in self.calls.items()
            for call in calls
            if isinstance(call.reply, Taken)
        ]


def _body(messages: tuple[Message, ...]) -> bytes:
    """The same history is the same body; how long the engine takes follows from it."""
    said = [user(text) if role == "user" else {"role": role, "content": text} for role, text in messages]
    latency = random.Random(messages[-1][1]).uniform(0, LONGEST_LATENCY_S)
    wish = {"latency_s": round(latency, 4), "completion_tokens": 6, "reasoning": False}
    return json.dumps({"model": "simulator", "messages": said, "sim": wish}).encode()


def _body_hash(messages: tuple[Message, ...]) -> str:
    """As the log has it."""
    request = parse_chat(_body(messages))
    history = RequestHistory(request.messages, "tolerant")
    history.check(TreeIndex())
    return canonical_hash(request, history.whole_hash)


def _reply(request: Request, response: aiohttp.ClientResponse, body: bytes) -> Reply:
    if response.status == 204:
        return Done()
    if response.status != 200:
        return Refused(response.status, json.loads(body)["error"]["code"])
    if isinstance(request, Chat):
        text = json.loads(body)["choices"][0]["message"]["content"]
        digest = hashlib.sha256(body).hexdigest()
        replayed = "x-turnlog-replayed" in response.headers
        return Taken(int(response.headers["x-turnlog-turn"]), text, digest, replayed)
    if isinstance(request, Look):
        records = json.loads(body)["records"]
        return Seen(tuple(record["response"]["choices"][0]["message"]["content"] for record in records))
    events = [json.loads(line) for line in body.splitlines()]
    turns = [event for event in events if event["type"] == "TurnCommitted"]
    committed = tuple((turn["turn"], turn["parent"], turn["body_hash"]) for turn in turns)
    return Told(committed, any(event["type"] == "SessionClosed" for event in events))


@pytest.fixture(scope="module")
def urls(cluster: Cluster, engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Four processes on one database."""
    with serving(tmp_path_factory.mktemp("fighting"), 4, cluster.url, engine.base_url) as processes:
        yield processes.urls


@contextlib.contextmanager
def crashing(cluster: Cluster, pauses_s: Sequence[float]) -> Iterator[None]:
    """PostgreSQL crashes after each of these pauses, and starts again."""
    stopped = threading.Event()

    def crash() -> int:
        crashes = 0
        for pause_s in pauses_s:
            if not stopped.wait(pause_s):
                cluster.restart("immediate")
                crashes += 1
        return crashes

    with ThreadPoolExecutor(1) as threads:
        crashes = threads.submit(crash)
        try:
            yield
        finally:
            stopped.set()
        assert crashes.result() > 0 or not pauses_s


ALWAYS = frozenset({"taken", "replayed", "session_busy", "session_closed", "idempotency_mismatch"})
OF_A_LINE = frozenset({"history_mismatch", "rollback_too_deep"})
OF_CRASHES = frozenset({"claim_lost", "store_unavailable", "overloaded"})


@pytest.mark.parametrize(
    ("seed", "processes", "window", "pauses_s", "wanted", "explained"),
    [
        pytest.param(
            4, 4, WINDOW, (), {"session_busy", "history_mismatch"}, ALWAYS | OF_A_LINE, marks=FIGHTS, id="linear"
        ),
        pytest.param(16, 2, None, (), {"replayed"}, ALWAYS, marks=FIGHTS, id="trees"),
        pytest.param(7, 2, WINDOW, (0.3, 1.0), set(), ALWAYS | OF_A_LINE | OF_CRASHES, marks=CRASHES, id="crashes"),
    ],
)
def test_their_replies_are_linearizable(
    urls: list[str],
    cluster: Cluster,
    tally: Tally,
    seed: int,
    processes: int,
    window: int | None,
    pauses_s: Sequence[float],
    wanted: set[str],
    explained: frozenset[str],
) -> None:
    """The calls have an order, and what was told is in the store. What a 503 left open may have been taken or not."""
    made = Fight(urls[:processes], seed, window)
    with crashing(cluster, pauses_s):
        asyncio.run(made.run(25))
    tally.tried += sum(len(calls) for calls in made.calls.values())
    made.explain(crashes=bool(pauses_s))
    verified(cluster.url, made.acknowledged(), tally)
    replies = made.replies()
    assert {"taken"} | wanted <= set(replies) <= explained, replies


HELLO = [user("Hello")]
ELSEWHERE = [*HELLO, {"role": "assistant", "content": "No"}, user("Why?")]


@pytest.mark.parametrize(
    ("messages", "key"),
    [(HELLO, "k"), (ELSEWHERE, "k"), (ELSEWHERE, "l"), (HELLO, "l")],
    ids=["a replay", "a key with another body", "a mismatch", "a rollback"],
)
def test_what_one_process_closed_is_closed_at_the_others(
    urls: list[str], messages: list[dict[str, str]], key: str
) -> None:
    """The others answer from what they remember only where that cannot have changed: 404 comes before all else."""
    with httpx.Client(base_url=urls[0], timeout=60) as first, httpx.Client(base_url=urls[1], timeout=60) as second:
        session = "/sessions/" + first.post("/sessions").json()["session_id"]
        path = f"{session}/v1/chat/completions"
        assert second.post(path, json={"messages": HELLO}, headers={"idempotency-key": "k"}).status_code == 200
        assert first.delete(session).status_code == 204
        response = second.post(path, json={"messages": messages}, headers={"idempotency-key": key})
        assert error_of(response) == (404, "session_closed")
