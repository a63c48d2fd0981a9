"""Webhooks at real receivers: what they are told, once or more but under one id, through outages and `kill -9`."""

from __future__ import annotations

import base64
import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from helpers.answering import Answer, Answering, Asked

from app.crash_points import VARIABLE, CrashPoint
from integration.places import Places, in_turn
from integration.stand import HOURS, Stand, until, user
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess

SECRETS = [f"whsec_{base64.b64encode(bytes([number]) * 32).decode()}" for number in (1, 2)]

CRASHES: tuple[CrashPoint, ...] = ("after_webhook_sent", "in_webhook_moved", "after_engine_died")


class Receiver(Answering):
    """Answers with `status`; 0: not at all until it is closed."""

    def __init__(self, status: int = 204, location: str = "") -> None:
        super().__init__(self._accept)
        self.status, self.posts = status, list[Asked]()
        self._headers = [("location", location)] if location else []
        self._closing = threading.Event()
        self.url = f"{self.base_url}/hook?key=secret"

    def _accept(self, post: Asked) -> Answer:
        self.posts.append(post)
        if not self.status:
            self._closing.wait()
        return Answer(headers=self._headers, status=self.status or 204)

    def accepted(self, kind: str) -> list[dict[str, Any]]:
        told = [json.loads(post.body) for post in self.posts]
        return [one["data"] for one in told if one["type"] == kind]

    def ids(self) -> list[str | None]:
        return [post.header("webhook-id") for post in self.posts]

    def __exit__(self, *ended: object) -> None:
        self._closing.set()
        super().__exit__(*ended)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as made:
        yield made


class Site(NamedTuple):
    """One server on SQLite, two on one PostgreSQL."""

    servers: list[ServerProcess]
    engine: SimulatorProcess

    def again(self, **more: str) -> Stand:
        """The first one anew; the others, if any, are stopped."""
        for server in self.servers:
            server.stop()
        first = self.servers[0]
        kept = {name: value for name, value in first.environment.items() if name != VARIABLE}
        first.environment = {**kept, **more}
        return Stand(first.start(), self.engine.base_url)


@contextlib.contextmanager
def serving(places: Places, sglang: SimulatorProcess, *hooks: str, **environment: str) -> Iterator[Site]:
    place = places.new("webhooks")
    told = {
        "TURNLOG_WEBHOOKS": ",".join(hooks),
        "TURNLOG_WEBHOOK_SECRET": ",".join(SECRETS),
        "TURNLOG_PUBLIC_URL": "https://turnlog.example.org",
        "TURNLOG_LEASE_S": "2",
        **environment,
    }
    with place.database() as url:
        count = 1 if place.postgres is None else 2
        servers = [
            ServerProcess(place.folder, upstreams=[sglang.base_url], database_url=url, environment=told)
            for _ in range(count)
        ]
        try:
            for server in servers:
                server.start()
            yield Site(servers, sglang)
        finally:
            for server in servers:
                server.stop()


def finished(stand: Stand, group_id: str, **given: Any) -> str:
    talk = stand.talk(group_id=group_id, **given)
    talk.say("A secret of the conversation")
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1.0}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    return talk.id


def test_a_receiver_is_told_what_its_filter_names(places: Places, sglang: SimulatorProcess, receiver: Receiver) -> None:
    """In order: what it is not told would have come before."""
    wanted = f"{receiver.url}#run=a&group_prefix=maze&metadata.task=1&metadata.task=3"
    with (
        serving(places, sglang, wanted, TURNLOG_WEBHOOK_STUCK_S="1") as site,
        contextlib.closing(Stand(site.servers[-1], sglang.base_url)) as stand,
    ):
        for run, group_id, task in (("b", "maze-1", 1), ("a", "maze-2", 2), ("a", "sums-1", 1), ("a", "maze-3", 3)):
            finished(stand, group_id, run=run, metadata={"task": task})
        stand.talk(run="a", group_id="sums-2", metadata={"task": 1})
        stand.talk(run="a", group_id="maze-4", metadata={"task": 1})

        def stuck() -> set[str]:
            return {data["group_id"] for data in receiver.accepted("session.stuck")}

        until(lambda: "maze-4" in stuck() and receiver.accepted("group.complete"))
        assert [data["group_id"] for data in receiver.accepted("group.complete")] == ["maze-3"]
        assert stuck() <= {"maze-3", "maze-4"}  # the first one on a machine that stood still


def test_what_receivers_are_told(places: Places, sglang: SimulatorProcess, receiver: Receiver) -> None:
    with (
        Receiver(0) as slow,
        Receiver(302, receiver.url) as redirecting,
        serving(
            places,
            sglang,
            receiver.url,
            slow.url,
            redirecting.url,
            TURNLOG_WEBHOOK_STUCK_S="1",
            TURNLOG_LOG_LEVEL="info",
        ) as site,
        contextlib.closing(Stand(site.servers[-1], sglang.base_url)) as stand,
    ):
        group_id = "a group/1"
        idle = stand.talk()
        idle.say("A secret of the conversation")
        hanging = stand.talk()
        gone = stand.meanwhile(hanging.chat, [user("Go")], sim={"latency_s": HOURS})
        finished(stand, group_id)
        until(lambda: len(receiver.accepted("session.stuck")) >= 2 and receiver.accepted("group.complete"))
        told = {data["session_id"]: (data["reason"], data["turn"]) for data in receiver.accepted("session.stuck")}
        assert told == {idle.id: ("no_progress", None), hanging.id: ("turn_in_flight", 1)}
        [complete] = receiver.accepted("group.complete")
        assert complete == {
            "run": "default",
            "group_id": group_id,
            "rollouts": 1,
            "url": "https://turnlog.example.org/ui#/group/a%20group%2F1?run=default",
        }
        finished(stand, group_id, run="other", group_size=2)
        finished(stand, group_id)
        until(lambda: len(receiver.accepted("group.complete")) == 2)
        finished(stand, group_id, run="other")
        until(lambda: len(receiver.accepted("group.complete")) == 3)
        complete = [(data["run"], data["rollouts"]) for data in receiver.accepted("group.complete")]
        assert complete == [("default", 1), ("default", 2), ("other", 2)]
        assert len(set(receiver.ids())) == len(receiver.posts) == 5
        until(lambda: slow.posts and redirecting.posts)  # neither has held up the first, nor a turn
        for post in receiver.posts:
            assert b"secret" not in post.body
        metrics = "".join(httpx.get(f"{server.base_url}/metrics").text for server in site.servers)
        assert 'turnlog_webhooks_total{outcome="delivered"} 5' in metrics
        verified(receiver.posts)
        assert "key=secret" not in "".join(server.log_path.read_text() for server in site.servers)
        for server in site.servers:
            server.kill()
        gone.exception()


def verified(posts: list[Asked]) -> None:
    """By the published library, with each of the secrets."""
    library = pytest.importorskip("standardwebhooks")
    for post in posts:
        for secret in SECRETS:
            library.Webhook(secret).verify(post.body, dict(post.headers))


def test_what_was_committed_while_a_receiver_was_away_is_delivered(
    places: Places, sglang: SimulatorProcess, receiver: Receiver
) -> None:
    receiver.status = 503
    groups = [f"group-{number}" for number in range(3)]
    with serving(places, sglang, receiver.url) as site:
        with contextlib.closing(Stand(site.servers[0], sglang.base_url)) as stand:
            for group_id in groups:
                finished(stand, group_id)
            until(lambda: receiver.posts)
        for server in site.servers:
            server.kill()
        receiver.status = 204
        refused = set(receiver.ids())
        receiver.posts.clear()
        with contextlib.closing(site.again()):
            until(lambda: len(receiver.posts) >= 3)
            assert {data["group_id"] for data in receiver.accepted("group.complete")} == set(groups)
            assert refused <= set(receiver.ids())


@pytest.mark.long
@in_turn(CRASHES)
def test_a_kill(places: Places, sglang: SimulatorProcess, receiver: Receiver, point: CrashPoint) -> None:
    """What it had sent is sent again under the same id, and what it had not is sent."""
    dead = "http://127.0.0.1:9"
    of_death = point == "after_engine_died"
    with serving(places, sglang, receiver.url) as site:
        more = {"TURNLOG_UPSTREAMS": f"{sglang.base_url},{dead}"} if of_death else {}
        with contextlib.closing(site.again(**{VARIABLE: point}, **more)) as stand:
            if not of_death:
                with contextlib.suppress(httpx.TransportError):  # it ends with the group's last event, or just before
                    finished(stand, "group")
            assert site.servers[0].wait() == -signal.SIGKILL
        sent = receiver.ids()
        assert len(sent) == (0 if of_death else 1)
        with contextlib.closing(site.again(**more)) as stand:
            until(lambda: len(receiver.posts) > len(sent))
            if of_death:
                assert receiver.accepted("engine.died")[0]["engine"] == dead
            else:
                finished(stand, "another")
                until(lambda: len(receiver.accepted("group.complete")) == 3)
                assert receiver.ids()[:2] == sent * 2
                assert len(set(receiver.ids())) == 2


def test_one_of_several_processes_sends(sglang: SimulatorProcess, places: Places, receiver: Receiver) -> None:
    with serving(places, sglang, receiver.url) as site:
        if len(site.servers) == 1:
            pytest.skip("SQLite has one process")
        for number, killed in enumerate(site.servers):
            [other] = [server for server in site.servers if server is not killed]
            killed.kill()
            with contextlib.closing(Stand(other, sglang.base_url)) as stand:
                finished(stand, f"group-{number}")
            until(lambda number=number: len(receiver.posts) == number + 1)  # type: ignore[misc]
            killed.start()
        with contextlib.closing(Stand(site.servers[0], sglang.base_url)) as stand:
            finished(stand, "last")
        until(lambda: len(receiver.posts) >= 3)
        assert len(set(receiver.ids())) == len(receiver.posts) == 3
