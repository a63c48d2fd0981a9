"""What an operator, a limit or a network does to the connections: requests wait or get 503, and it heals by itself.

Turnlog's role is no superuser here, so that `max_connections` and the role's own limit hold for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator

import asyncpg
import httpx
import pytest
from helpers.clusters import ROLE, Cluster, Forwarder, running
from integration.stand import error_of, until, user

from fault.agents import Agent, Agents, Answer, Health, turns
from fault.processes import Processes, crowd, serving
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

CLIENTS = 6
WISH = {"latency_s": 0.05, "completion_tokens": 8}
HELD_S = 2.0
"""How long a fault lasts; an event loop that waited for the database would stand still as long."""

UNAVAILABLE = {"store_unavailable", "overloaded"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(max_connections="60") as made:
        yield made


@pytest.fixture(scope="module")
def address(cluster: Cluster) -> Iterator[Forwarder]:
    with Forwarder(cluster.port) as made:
        yield made


@pytest.fixture(scope="module")
def processes(
    cluster: Cluster, address: Forwarder, engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Processes]:
    """Two, through a forwarder, for all tests: none of them may leave one that has to be started again."""
    with serving(tmp_path_factory.mktemp("limits"), 2, cluster.url_at(address.port), engine.base_url) as made:
        yield made


step = turns(WISH, 0.1)


def is_clear(answer: Answer) -> bool:
    """Served, or told to come again."""
    return answer.status < 400 or (answer.retry_after is not None and answer.code in UNAVAILABLE)


def terminate(cluster: Cluster, address: Forwarder, agents: Agents[Agent]) -> None:
    rng = random.Random(1)
    for _ in range(20):
        pids = cluster.sql(f"SELECT pid FROM pg_stat_activity WHERE usename = '{ROLE}' ORDER BY pid").split()
        if pids:
            cluster.sql(f"SELECT pg_terminate_backend({rng.choice(pids)})")
        time.sleep(rng.uniform(0, 0.15))


@contextlib.contextmanager
def all_occupied(cluster: Cluster) -> Iterator[None]:
    """Other sessions hold every connection that a role without special rights may have."""
    held: list[asyncpg.Connection] = []
    loop = asyncio.new_event_loop()

    async def occupy() -> None:
        with contextlib.suppress(asyncpg.TooManyConnectionsError):
            while True:
                held.append(await asyncpg.connect(host="127.0.0.1", port=cluster.port, user=ROLE, database="turnlog"))

    async def leave() -> None:
        for connection in held:
            await connection.close()

    def terminate() -> None:
        pids = ",".join(str(connection.get_server_pid()) for connection in held)
        others = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = '{ROLE}'"
        cluster.sql(f"{others} AND pid NOT IN ({pids})")

    try:
        loop.run_until_complete(occupy())
        terminate()
        loop.run_until_complete(occupy())
        yield
        loop.run_until_complete(leave())
    finally:
        loop.close()


def occupy(cluster: Cluster, address: Forwarder, agents: Agents[Agent]) -> None:
    with all_occupied(cluster):
        time.sleep(HELD_S)


@contextlib.contextmanager
def altered(cluster: Cluster, what: str, then: str) -> Iterator[None]:
    """The role or the database is another; connections end, so that the next ones know, and at the end once more."""
    cluster.sql(f"ALTER {what}")
    cluster.end_connections()
    try:
        yield
    finally:
        cluster.sql(f"ALTER {then}")
        cluster.end_connections()


NO_CONNECTION = (f"ROLE {ROLE} CONNECTION LIMIT 0", f"ROLE {ROLE} CONNECTION LIMIT -1")


def make_read_only(cluster: Cluster, address: Forwarder, agents: Agents[Agent]) -> None:
    """As an operator makes a primary before a switch-over."""
    name = "default_transaction_read_only"
    with altered(cluster, f"ROLE {ROLE} SET {name} = on", f"ROLE {ROLE} RESET {name}"):
        time.sleep(HELD_S)


def fall_silent(cluster: Cluster, address: Forwarder, agents: Agents[Agent]) -> None:
    address.silence()
    time.sleep(HELD_S)
    address.speak()


def strand(cluster: Cluster, address: Forwarder, agents: Agents[Agent]) -> None:
    """As behind a proxy or a firewall that dropped its state: only timeouts tell; new connections work."""
    address.strand()
    time.sleep(HELD_S)


def cut_statements_short(cluster: Cluster, address: Forwarder, agents: Agents[Agent]) -> None:
    """Reads may be; writes say what they need."""
    set_for_the_database(cluster, agents, "statement_timeout", "'30ms'")


def make_serializable(cluster: Cluster, address: Forwarder, agents: Agents[Agent]) -> None:
    set_for_the_database(cluster, agents, "default_transaction_isolation", "'serializable'")


def set_for_the_database(cluster: Cluster, agents: Agents[Agent], name: str, value: str) -> None:
    with altered(cluster, f"DATABASE turnlog SET {name} = {value}", f"DATABASE turnlog RESET {name}"):
        began = len(agents.acknowledged)
        until(lambda: len(agents.acknowledged) > began + 30, 180)


Fault = Callable[[Cluster, Forwarder, Agents[Agent]], None]

FAULTS: dict[Fault, pytest.MarkDecorator] = {
    terminate: pytest.mark.fault(14, "Turnlog's connections to PostgreSQL terminated one by one under load"),
    occupy: pytest.mark.fault(14, "PostgreSQL refuses: too many connections"),
    make_read_only: pytest.mark.fault(14, "PostgreSQL refuses: read-only transactions"),
    fall_silent: pytest.mark.fault(14, "the network to PostgreSQL falls silent"),
    strand: pytest.mark.fault(14, "the network to PostgreSQL forgets its connections"),
    cut_statements_short: pytest.mark.fault(14, "an operator's settings: statement_timeout, serializable"),
    make_serializable: pytest.mark.fault(14, "an operator's settings: statement_timeout, serializable"),
}


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[mark, pytest.mark.untimed] if fault is strand else mark, id=fault.__name__)
        for fault, mark in FAULTS.items()
    ],
)
def test_what_was_told_is_there_once_and_all_are_served_again(
    cluster: Cluster, address: Forwarder, processes: Processes, tally: Tally, fault: Fault
) -> None:
    """Clients insist while the fault is done, and `/health` waits for none. Recovery is counted from its end."""
    with crowd(processes, CLIENTS, step) as agents, Health(processes.urls[0]) as health:
        until(lambda: agents.all_served(0.0), 180)
        tally.tried += 1
        before = health.asked
        fault(cluster, address, agents)
        over = time.monotonic()
        assert health.asked > before + 3
        until(lambda: agents.all_served(over), 180)
        tally.recovered(agents.recovery_s(over))
    unclear = [answer for answer in agents.answers() if not is_clear(answer)]
    assert not unclear, unclear[:3]
    processes.are_the_same()
    tally.doubled += agents.doubled(processes.urls[0])
    verified(cluster.url, agents.acknowledged, tally)


@pytest.mark.fault(14, "PostgreSQL refuses for longer than requests wait")
def test_a_refusal_that_does_not_end_is_503(cluster: Cluster, processes: Processes, tally: Tally) -> None:
    with httpx.Client(base_url=processes.urls[0], timeout=60) as http:
        session = http.post("/sessions").json()
        path = f"{session['base_url']}/chat/completions"
        with altered(cluster, *NO_CONNECTION):
            for method, where in (("POST", path), ("GET", f"/sessions/{session['session_id']}"), ("POST", "/sessions")):
                body = {"messages": [user("Hello")]} if where == path else None
                response = http.request(method, where, json=body)
                assert error_of(response) == (503, "store_unavailable")
                assert response.headers["retry-after"]
            assert http.get("/ready").status_code == 503
            tally.tried += 1
        ended = time.monotonic()
        replies: list[httpx.Response] = []

        def is_served() -> bool:
            replies.append(http.post(path, json={"messages": [user("Hello")]}))
            return replies[-1].status_code == 200

        until(is_served, 60)
        tally.recovered(time.monotonic() - ended)
    verified(cluster.url, [acknowledgement(session["session_id"], replies[-1])], tally)
