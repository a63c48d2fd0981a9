"""Processes, engines and PostgreSQL that die while gates are shut: no turn runs then, is lost or is taken twice."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import httpx
import pytest
from fleet.pausing import adapter, finish, new_name, of_fleet, order, until_generating, until_held
from fleet.stands import Api, Fleet, fleet_of
from helpers.clusters import Cluster, running
from integration.stand import Talk, until, user

from app.crash_points import VARIABLE, CrashPoint
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.server import ServerProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

PATIENCE_S = 90.0
WATCHED_S = 0.2
"""How long a turn is watched that should be waiting."""

CRASHES = "a process dies in the middle of a pause or a resume"


class Site:
    """Two processes before two engines, on a PostgreSQL of their own that can be stopped."""

    def __init__(self, fleet: Fleet, cluster: Cluster) -> None:
        self.fleet = fleet
        self.cluster = cluster
        self.dying, self.other = fleet.apis

    @property
    def server(self) -> ServerProcess:
        """That of `dying`."""
        return self.fleet.processes.servers[0]

    def again(self, **environment: str) -> None:
        """Start the process that died, or stop it first."""
        self.server.kill()
        self.server.environment.pop(VARIABLE, None)
        self.server.environment.update(environment)
        self.server.start()

    def whole(self) -> None:
        """Both processes serve, every engine generates, and no gate of all is shut."""
        self.fleet.reset()
        if not self.server.answers() or VARIABLE in self.server.environment:
            self.again()
        order(self.other, "/fleet/resume")


@pytest.fixture(scope="module")
def shared_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with running() as cluster, fleet_of(tmp_path_factory.mktemp("fleet-faults"), cluster.url) as made:
        yield Site(made, cluster)


@pytest.fixture
def site(shared_site: Site) -> Site:
    shared_site.whole()
    return shared_site


def waits(fleet: Fleet, talk: Talk, turn: Future[httpx.Response]) -> None:
    """The turn is not over, and no engine was asked for it."""
    time.sleep(WATCHED_S)
    assert not turn.done()
    assert fleet.chats(talk.id) == []


def speaking(site: Site, talk: Talk, **sim: Any) -> Future[httpx.Response]:
    future: Future[httpx.Response] = site.fleet.meanwhile(
        talk.chat, [user("Hello")], headers={"idempotency-key": "hello"}, sim=sim or None
    )
    return future


def dies(call: Callable[[], object]) -> None:
    with pytest.raises(httpx.TransportError):
        call()


@pytest.mark.fault(9, CRASHES)
def test_a_pause_whose_process_dies_holds_and_its_order_can_be_given_again(site: Site, tally: Tally) -> None:
    """It died with the gate shut and no engine told: what runs goes on until somebody says it again."""
    name = new_name()
    site.again(**{VARIABLE: "after_gate_shut"})
    running_one = site.other.talk(adapter=name, on_abort="return")
    slow = speaking(site, running_one, latency_s=60)
    until_generating(site.fleet, running_one)
    dies(lambda: site.dying.http.post(f"/adapters/{name}/pause", json={"lease_s": 600}))
    tally.tried += 1
    until(lambda: adapter(site.other, name)["paused"])
    fresh = site.other.talk(adapter=name)
    held = speaking(site, fresh)
    waits(site.fleet, fresh, held)
    assert not slow.done()
    told = order(site.other, f"/adapters/{name}/pause")
    assert (told["closings"], told["count"]) == (1, 1)
    assert finish(slow.result()) == "abort"
    waits(site.fleet, fresh, held)
    site.again()
    here = site.dying.talk(adapter=name)
    another = speaking(site, here)
    waits(site.fleet, here, another)
    resumed = time.monotonic()
    order(site.dying, f"/adapters/{name}/resume")
    replies = {talk.id: turn.result() for talk, turn in ((fresh, held), (here, another))}
    tally.recovered(time.monotonic() - resumed)
    told_by = [acknowledgement(session_id, reply) for session_id, reply in replies.items()]
    verified(site.cluster.url, [acknowledgement(running_one.id, slow.result()), *told_by], tally)


@pytest.mark.fault(9, CRASHES)
@pytest.mark.parametrize("point", ["before_gate_opened", "after_gate_shut"])
def test_a_pause_of_all_ends_with_its_lease_whoever_dies(site: Site, tally: Tally, point: CrashPoint) -> None:
    site.again(**{VARIABLE: point})
    if point == "after_gate_shut":
        dies(lambda: site.dying.http.post("/fleet/pause", json={"lease_s": 2}))
    else:
        order(site.dying, "/fleet/pause", lease_s=2)
        dies(lambda: site.dying.http.post("/fleet/resume"))
    died = time.monotonic()
    tally.tried += 1
    until(lambda: of_fleet(site.other)["paused"])  # asked, a process knows: by itself it may take 100 ms
    talk = site.other.talk()
    turn = speaking(site, talk)
    reply = turn.result(PATIENCE_S)
    tally.recovered(time.monotonic() - died)
    assert not of_fleet(site.other)["paused"]
    assert len(site.fleet.chats(talk.id)) == 1
    site.again()
    again = site.dying.known(talk.id)
    again.messages = [user("Hello"), reply.json()["choices"][0]["message"]]
    second = again.say("And now?")
    verified(site.cluster.url, [acknowledgement(talk.id, one) for one in (reply, second)], tally)


@pytest.mark.fault(2, "kill -9 of a process whose turns wait for a gate")
def test_turns_that_waited_at_a_process_that_dies_are_taken_elsewhere(site: Site, tally: Tally) -> None:
    name = new_name()
    order(site.other, f"/adapters/{name}/pause")
    until(lambda: adapter(site.dying, name)["paused"])
    there, here = ([api.talk(adapter=name) for _ in range(4)] for api in (site.dying, site.other))
    calls = [speaking(site, talk) for talk in (*there, *here)]
    until_held(site.dying, name, len(there))
    until_held(site.other, name, len(here))
    assert adapter(site.other, name)["in_flight"] == 0
    site.server.kill()
    tally.tried += 1
    for call in calls[: len(there)]:
        assert isinstance(call.exception(), httpx.TransportError)
    again = [speaking(site, site.other.known(talk.id)) for talk in there]
    until_held(site.other, name, len(there) + len(here))
    opened = time.monotonic()
    order(site.other, f"/adapters/{name}/resume")
    replies = [call.result(PATIENCE_S) for call in (*again, *calls[len(there) :])]
    tally.recovered(time.monotonic() - opened)
    acknowledged: list[Acknowledged] = []
    for talk, reply in zip((*there, *here), replies, strict=True):
        assert finish(reply) == "stop"
        tally.doubled += len(site.fleet.chats(talk.id)) - 1
        acknowledged.append(acknowledgement(talk.id, reply))
    verified(site.cluster.url, acknowledged, tally)


@pytest.mark.fault(14, "PostgreSQL restarted while gates are shut")
def test_a_pause_outlives_a_crash_of_postgresql_and_of_its_processes(site: Site, tally: Tally) -> None:
    name = new_name()
    order(site.dying, f"/adapters/{name}/pause")
    until(lambda: adapter(site.other, name)["paused"])
    talks = [api.talk(adapter=name) for api in (site.dying, site.other)]
    calls = [speaking(site, talk) for talk in talks]
    for api in (site.dying, site.other):
        until_held(api, name)
    site.cluster.restart("immediate")
    tally.tried += 1
    until(lambda: all(paused(api, name) for api in (site.dying, site.other)), PATIENCE_S)
    for talk, call in zip(talks, calls, strict=True):
        waits(site.fleet, talk, call)
    opened = time.monotonic()
    order(site.other, f"/adapters/{name}/resume")
    replies = [call.result(PATIENCE_S) for call in calls]
    tally.recovered(time.monotonic() - opened)
    tally.doubled += sum(len(site.fleet.chats(talk.id)) - 1 for talk in talks)
    verified(
        site.cluster.url,
        [acknowledgement(talk.id, reply) for talk, reply in zip(talks, replies, strict=True)],
        tally,
    )


def paused(api: Api, name: str) -> bool:
    """503 while the database is away."""
    response = api.http.get(f"/adapters/{name}")
    return response.status_code == 200 and response.json()["paused"] is True
