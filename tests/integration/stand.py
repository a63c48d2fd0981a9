"""A server and an engine to test against, and a client's view of one session."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx

from integration.places import Place
from ops.server import VERBATIM, ServerProcess
from ops.simulator.process import SimulatorProcess
from tests.tools.real_engine import weather

TIMEOUT_S = 60.0

HOURS = 3600.0
"""Longer than any test: such a generation ends by being aborted."""
CHAT = "/v1/chat/completions"

FIRST_TURN = ("TurnOpened", "AffinityBound", "TurnCommitted")
LATER_TURN = ("TurnOpened", "TurnCommitted")
"""What a session's log gets: the first turn also binds it to its engine."""

WEATHER = weather.TOOL

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def until(condition: Callable[[], object], timeout_s: float = TIMEOUT_S) -> None:
    """Wait for something that another process does and that cannot be awaited."""
    began = time.monotonic()
    while not condition():
        waited = time.monotonic() - began
        assert waited < timeout_s, "waited in vain"
        time.sleep(min(0.01 + waited / 10, 0.1))  # a condition is often a request, which takes time from who is awaited


class Spoken(NamedTuple):
    """A protocol from a client's side: where its history stands in a request, and what a reply adds to that history.

    A user's message is spelled alike in all of them.
    """

    path: str
    history: str
    added: Callable[[dict[str, Any]], list[Message]]
    needed: Mapping[str, Any] = MappingProxyType({})


SPOKEN: Mapping[str, Spoken] = {
    "chat": Spoken(CHAT, "messages", lambda reply: [reply["choices"][0]["message"]]),
    "messages": Spoken(
        "/v1/messages",
        "messages",
        lambda reply: [{"role": "assistant", "content": reply["content"]}],
        {"max_tokens": 100_000},
    ),
    "responses": Spoken("/v1/responses", "input", lambda reply: reply["output"]),
}


def tool_of(protocol: str, name: str = "look", field: str = "at", kind: str = "number") -> dict[str, Any]:
    """A function of one argument as the protocol offers it."""
    schema = {"type": "object", "properties": {field: {"type": kind}}}
    return {
        "chat": {"type": "function", "function": {"name": name, "parameters": schema}},
        "messages": {"name": name, "input_schema": schema},
        "responses": {"type": "function", "name": name, "parameters": schema},
    }[protocol]


class Talk:
    """One session from a client's side: its history as an honest client keeps it."""

    def __init__(self, stand: Api, session_id: str, protocol: str = "chat") -> None:
        self._stand = stand
        self.id = session_id
        self.protocol = protocol
        self.spoken = SPOKEN[protocol]
        self.path = f"/sessions/{session_id}"
        self.chat_path = self.path + self.spoken.path
        self.messages: list[Message] = []

    def body(self, messages: Sequence[Message], **fields: Any) -> dict[str, Any]:
        return {"model": "simulator", **self.spoken.needed, self.spoken.history: list(messages), **fields}

    def chat(
        self, messages: Sequence[Message], *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """One request as given; the kept history does not change."""
        return self._stand.http.post(self.chat_path, json=self.body(messages, **fields), headers=headers)

    def say(self, text: str, *, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
        """A turn that must succeed, with a new user message; the history grows by it and the reply."""
        return self.add(user(text), headers=headers, **fields)

    def add(self, *new: Message, headers: Mapping[str, str] | None = None, **fields: Any) -> httpx.Response:
        messages = [*self.messages, *new]
        response = self.chat(messages, headers=headers, **fields)
        assert response.status_code == 200, response.text
        self.messages = [*messages, *self.spoken.added(response.json())]
        return response

    def events(self, after: int = 0) -> list[dict[str, Any]]:
        response = self._stand.http.get(f"{self.path}/events", params={"after": after})
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.content.splitlines()]

    def types(self) -> list[str]:
        return [event["type"] for event in self.events()]

    def committed(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["type"] == "TurnCommitted"]

    def state(self) -> dict[str, Any]:
        return dict(self._stand.get(self.path))

    def annotate(self, name: str, value: Any, turn: int | None = None, **fields: Any) -> httpx.Response:
        place = self.path if turn is None else f"{self.path}/turns/{turn}"
        return self._stand.http.put(f"{place}/annotations/{name}", json={"value": value, **fields})

    def column(self, turn: int, name: str, values: Sequence[float | None], over: str = "output", **fields: Any) -> None:
        """Write a column of the turn, which must succeed."""
        path = f"{self.path}/turns/{turn}/annotations/{name}"
        reply = self._stand.http.put(path, json={"values": values, "over": over, **fields})
        assert reply.status_code == 200, reply.text

    def noted(self, **given: Any) -> None:
        """Write its note, its tags, or both."""
        for name, value in given.items():
            assert self.annotate(name, value).status_code == 200

    def rows(self, **parameters: Any) -> list[dict[str, Any]]:
        return self._stand.rows(session_id=self.id, **parameters)

    def tree(self, **parameters: Any) -> dict[str, Any]:
        return dict(self._stand.get(f"{self.path}/tree", **parameters))

    def generations(self) -> int:
        """How many chat requests of this session the engine has seen."""
        assert isinstance(self._stand, Stand)
        return len(self._stand.engine_requests(self.id))


class Api:
    """A server that sessions are made and read at."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.http = httpx.Client(base_url=base_url, timeout=TIMEOUT_S)

    def close(self) -> None:
        self.http.close()

    def talk(self, protocol: str = "chat", **body: Any) -> Talk:
        response = self.http.post("/sessions", json=body)
        assert response.status_code == 200, response.text
        return self.known(response.json()["session_id"], protocol)

    def known(self, session_id: str, protocol: str = "chat") -> Talk:
        """A session that need not exist."""
        return Talk(self, session_id, protocol)

    def get(self, path: str, **parameters: Any) -> Any:
        """The JSON of a GET that must succeed."""
        response = self.http.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()

    def rows(self, **parameters: Any) -> list[dict[str, Any]]:
        response = self.http.get("/export", params=parameters)
        assert response.status_code == 200, response.text
        return [json.loads(line) for line in response.content.splitlines()]


def engine_stats(sim: httpx.Client) -> dict[str, Any]:
    return dict(sim.get("/sim/stats").json())


def engine_requests(sim: httpx.Client, path: str | None, session_id: str | None) -> list[dict[str, Any]]:
    """The engine's last requests, oldest first: those of a route, those of a session."""
    seen: list[dict[str, Any]] = sim.get("/sim/requests", params={"last": 256}).json()
    return [
        one
        for one in seen
        if path in (None, one["path"]) and session_id in (None, one["headers"].get("x-smg-routing-key"))
    ]


@contextlib.contextmanager
def held(*engines: httpx.Client) -> Iterator[None]:
    """Of SGLang's: what they are asked to generate meanwhile, for no latency of its own, is generated at the end."""
    for engine in engines:
        assert engine.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    try:
        yield
    finally:
        for engine in engines:
            assert engine.post("/continue_generation").status_code == 200


class Stand(Api):
    """A server, an engine (where there is one) and clients for both."""

    def __init__(self, server: ServerProcess, engine_url: str) -> None:
        super().__init__(server.base_url)
        self.server = server
        self.sim = httpx.Client(base_url=engine_url or "http://127.0.0.1:9", timeout=TIMEOUT_S)
        self._threads = ThreadPoolExecutor(16)

    @property
    def url(self) -> str:
        """Of the server's store."""
        return self.server.environment["TURNLOG_DATABASE_URL"]

    def close(self) -> None:
        self._threads.shutdown()
        super().close()
        self.sim.close()

    def meanwhile(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        return self._threads.submit(call, *arguments, **named)

    def stats(self) -> dict[str, Any]:
        return engine_stats(self.sim)

    def engine_requests(self, session_id: str, path: str = CHAT) -> list[dict[str, Any]]:
        return engine_requests(self.sim, path, session_id)

    def until_generating(self, talk: Talk, count: int = 1) -> None:
        until(lambda: talk.generations() >= count)

    def end(self) -> None:
        """The engine ends all that it generates, which are replies that it aborted."""
        assert self.sim.post("/abort_request", json={"abort_all": True}).status_code == 200


@contextlib.contextmanager
def serving(
    where: Path | Place, *upstreams: str, environment: Mapping[str, str] | None = None, engine_url: str | None = None
) -> Iterator[Stand]:
    """A stand over engines that run already; `engine_url` is the one to look into, by default the last.

    In a folder alone the store is SQLite; a `TURNLOG_DATABASE_URL` in the environment is brought up to date first.
    The server has one worker unless the environment says another number: each takes a quarter of a second to start.
    Replies are the engine's, with the ids and logprobs that rows are compared with (test_client_reply.py: others).
    """
    environment = {"TURNLOG_WORKERS": "1", **VERBATIM, **(environment or {})}
    place = where if isinstance(where, Place) else Place(where)
    with contextlib.ExitStack() as database:
        place.folder.mkdir(parents=True, exist_ok=True)
        if "TURNLOG_DATABASE_URL" in environment:
            server = ServerProcess(place.folder, upstreams=upstreams, environment=environment).migrate()
        else:
            url = database.enter_context(place.database())
            server = ServerProcess(place.folder, upstreams=upstreams, environment=environment, database_url=url)
        server.start()
        stand = Stand(server, engine_url or (upstreams[-1] if upstreams else ""))
        try:
            yield stand
        finally:
            stand.close()
            server.stop()


@contextlib.contextmanager
def standing(where: Path | Place, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Stand]:
    """A stand with an engine of its own; `arguments` are the simulator's."""
    with (
        SimulatorProcess(*arguments) as engine,
        serving(where, engine.base_url, environment=environment) as stand,
    ):
        yield stand


def error_of(response: httpx.Response) -> tuple[int, str]:
    """Status and code of an error in the shape that the OpenAI SDKs read, or Anthropic's."""
    body = response.json()
    assert set(body) in ({"error"}, {"type", "error", "request_id"}), (response.status_code, response.text[:200])
    error = body["error"]
    assert set(error) | {"param"} == {"message", "type", "code", "param"}, error
    assert error.get("param") is None
    assert isinstance(error["message"], str)
    assert error["message"]
    assert response.headers["content-type"].startswith("application/json")
    return response.status_code, error["code"]
