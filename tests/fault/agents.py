"""Clients that insist on every request until it is answered, whatever the store says meanwhile, and remember it all."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import httpx
from integration.stand import error_of, user

from fault.verified import acknowledgement
from ops.verify import Acknowledged

PATIENCE_S = 90.0
"""How long one request is insisted on before the test fails."""

PAUSE_S = 0.1
"""Between two tries: less than `Retry-After` asks for, so that a short test sees many answers."""

Body = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """A reply: when it was asked for (monotonic) and how long it took, in seconds; `code` is empty for a success."""

    began: float
    seconds: float
    status: int
    code: str = ""
    retry_after: str | None = None


class Agent:
    """One client with one session at a time; what it sends goes to any of the servers."""

    again: Collection[int] = (503, 507)
    """Statuses after which the same is asked for again."""

    def __init__(self, urls: Sequence[str], name: str, seed: int) -> None:
        self.name = name
        self.rng = random.Random(f"{seed} {name}")
        self.answers: list[Answer] = []
        self.acknowledged: list[Acknowledged] = []
        self.committed: dict[str, int] = {}
        self.messages: list[Body] = []
        self.session_id = ""
        self.requests = 0
        self._clients = [httpx.Client(base_url=url, timeout=PATIENCE_S) for url in urls]

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def begin(self, **fields: Any) -> str:
        """A new session, by a name of its own, so that it can be created again where that was not answered."""
        self.session_id = f"{self.name}-{len(self.committed)}"
        self.insist("POST", "/sessions", json={"session_id": self.session_id, **fields})
        self.committed[self.session_id] = 0
        self.messages = []
        return self.session_id

    def say(self, text: str, **fields: Any) -> httpx.Response:
        """One turn behind `messages`, committed once however often it had to be asked for."""
        messages = [*self.messages, user(text)]
        body = {"model": "simulator", "messages": messages, **fields}
        reply = self.take("/v1/chat/completions", body, {"idempotency-key": f"{self.name} {self.requests}"})
        self.messages = [*messages, reply.json()["choices"][0]["message"]]
        return reply

    def take(self, route: str, body: Body, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """A turn of any route, which marks its retries in headers or body."""
        reply = self.insist("POST", f"/sessions/{self.session_id}{route}", json=body, headers=headers)
        self.acknowledged.append(self.told(reply, headers))
        self.committed[self.session_id] += 1
        return reply

    def told(self, reply: httpx.Response, headers: Mapping[str, str] | None) -> Acknowledged:
        return acknowledgement(self.session_id, reply)

    def reward(self, value: float) -> None:
        self.insist("PUT", f"/sessions/{self.session_id}/reward", json={"reward": value})

    def end(self) -> None:
        """Close the session; one that was closed by a try that was not answered is closed."""
        self.insist("DELETE", f"/sessions/{self.session_id}", gone=True)

    def insist(self, method: str, path: str, *, gone: bool = False, **fields: Any) -> httpx.Response:
        """The first answer after which the client has nothing to ask again; `gone`: 404 is one, too."""
        self.requests += 1
        deadline = time.monotonic() + PATIENCE_S
        while True:
            response = self._ask(method, path, **fields)
            if response.is_success or (gone and response.status_code == 404):
                return response
            again = response.status_code in self.again or response.headers.get("x-should-retry") == "true"
            assert again, f"{method} {path}: {response.status_code} {response.text[:300]}"
            assert time.monotonic() < deadline, f"{method} {path} was never taken: {self.answers[-1]}"
            time.sleep(PAUSE_S)

    def _ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        began = time.monotonic()
        response = self._exchange(method, path, **fields)
        seconds = time.monotonic() - began
        code = "" if response.is_success else error_of(response)[1]
        retry_after = response.headers.get("retry-after")
        self.answers.append(Answer(began, seconds, response.status_code, code, retry_after))
        return response

    def _exchange(self, method: str, path: str, **fields: Any) -> httpx.Response:
        return self.rng.choice(self._clients).request(method, path, **fields)


class Insistent(Agent):
    """One that insists over the deaths of its servers. `cut` counts the requests that those broke off."""

    cut = 0

    def _ask(self, method: str, path: str, **fields: Any) -> httpx.Response:
        try:
            return super()._ask(method, path, **fields)
        except httpx.ConnectError:
            return httpx.Response(503)
        except httpx.TransportError:
            self.cut += 1
            return httpx.Response(503)


Kind = TypeVar("Kind", bound=Agent)


class Agents(Generic[Kind]):
    """`count` agents, each of which takes one step after the other until the end of the `with`."""

    def __init__(
        self,
        urls: Sequence[str],
        count: int,
        step: Callable[[Kind], object],
        *,
        kind: Callable[[Sequence[str], str, int], Kind] = Agent,  # type: ignore[assignment]
        seed: int = 1,
    ) -> None:
        self._agents = [kind(urls, f"agent{number}", seed) for number in range(count)]
        self._step = step
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(count)
        self._runs: list[Future[None]] = []

    def __enter__(self) -> Agents[Kind]:
        self._runs = [self._threads.submit(self._run, agent) for agent in self._agents]
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._threads.shutdown()
        for agent in self._agents:
            agent.close()
        self.stop()

    def stop(self) -> None:
        """Let each agent finish its step. Raises what ended one of them."""
        self._stopped.set()
        for run in self._runs:
            run.result()

    def _run(self, agent: Kind) -> None:
        while not self._stopped.is_set():
            self._step(agent)

    def __iter__(self) -> Iterator[Kind]:
        return iter(self._agents)

    @property
    def acknowledged(self) -> list[Acknowledged]:
        return [one for agent in self._agents for one in list(agent.acknowledged)]

    def answers(self, since: float = 0.0) -> list[Answer]:
        """Replies to what was asked since a moment."""
        return [answer for agent in self._agents for answer in list(agent.answers) if answer.began >= since]

    def count(self, since: float, statuses: Collection[int]) -> int:
        return sum(answer.status in statuses for answer in self.answers(since))

    def all_served(self, since: float) -> bool:
        """Has each agent got what it asked for since then? Raises what ended one of them."""
        for run in self._runs:
            if run.done():
                run.result()
        return all(
            any(one.began >= since and one.status < 400 for one in list(agent.answers)) for agent in self._agents
        )

    def recovery_s(self, since: float) -> float:
        """Seconds until the last of the agents was served again."""
        return max(
            min(one.began + one.seconds for one in agent.answers if one.began >= since and one.status < 400) - since
            for agent in self._agents
        )

    def doubled(self, url: str) -> int:
        """Turns in the sessions' logs that nobody was told of: each agent insisted on all of its own."""
        extra = 0
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            for agent in self._agents:
                for session_id, told in agent.committed.items():
                    lines = client.get(f"/sessions/{session_id}/events").text.splitlines()
                    found = [event["turn"] for event in map(json.loads, lines) if event["type"] == "TurnCommitted"]
                    extra += len(found) - told
        return extra


class Health:
    """Asks a server's `/health` all the time; `asked` counts the answers: a loop that waits gives none."""

    def __init__(self, url: str) -> None:
        self.asked = 0
        self._url = url
        self._stopped = threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Health:
        self._run = self._threads.submit(self._probe)
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._run.result()
        self._threads.shutdown()

    def _probe(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_S) as client:
            while not self._stopped.is_set():
                assert client.get("/health").status_code == 200
                self.asked += 1
                time.sleep(0.01)


def turns(wish: Mapping[str, Any], leaves: float = 0.0, **session: Any) -> Callable[[Agent], None]:
    """A step that takes one turn; with the probability `leaves` in a new session."""

    def step(agent: Agent) -> None:
        if not agent.messages or agent.rng.random() < leaves:
            agent.begin(**session)
        agent.say(f"Turn {agent.requests}", sim=wish)

    return step
