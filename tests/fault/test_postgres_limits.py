"""What an operator, a limit or a network does to the connections: requests wait or get 503, and it heals by itself.

Turnlog's role is no superuser here, so that `max_connections` and the role's own limit hold for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

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
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

CLIENTS = 12
WISH = {"latency_s": 0.02, "completion_tokens": 8}
HELD_S, STALLED_S = 4.0, 3.0
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


@contextlib.contextmanager
def under_load(cluster: Cluster, processes: Processes, tally: Tally) -> Iterator[Agents[Agent]]:
    """Clients that insist while a fault is done; at the end all are served, and what they were told is there once.

    The body ends with the fault; recovery is counted from there.
    """
    with crowd(processes, CLIENTS, step) as agents:
        until(lambda: agents.all_served(0.0), 180)
        yield agents
        over = time.monotonic()
        until(lambda: agents.all_served(over), 180)
        tally.recovered(agents.recovery_s(over))
    assert all(is_clear(answer) for answer in agents.answers()), [
        answer for answer in agents.answers() if not is_clear(answer)
    ][:3]
    processes.are_the_same()
    tally.doubled += agents.doubled(processes.urls[0])
    verified(cluster.url, agents.acknowledged, tally)


@pytest.mark.fault(14, "Turnlog's connections to PostgreSQL terminated one by one under load")
def test_connections_that_are_terminated(cluster: Cluster, processes: Processes, tally: Tally) -> None:
    rng = random.Random(1)
    with under_load(cluster, processes, tally):
        for _ in range(20):
            pids = cluster.sql(f"SELECT pid FROM pg_stat_activity WHERE usename = '{ROLE}' ORDER BY pid").split()
            if pids:
                tally.tried += cluster.sql(f"SELECT pg_terminate_backend({rng.choice(pids)})") == "t"
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


@contextlib.contextmanager
def limited(cluster: Cluster) -> Iterator[None]:
    """No connection more for the role; those it has end."""
    cluster.sql(f"ALTER ROLE {ROLE} CONNECTION LIMIT 0")
    cluster.end_connections()
    try:
        yield
    finally:
        cluster.sql(f"ALTER ROLE {ROLE} CONNECTION LIMIT -1")


@contextlib.contextmanager
def read_only(cluster: Cluster) -> Iterator[None]:
    """As an operator makes a primary before a switch-over."""
    cluster.sql(f"ALTER ROLE {ROLE} SET default_transaction_read_only = on")
    cluster.end_connections()
    try:
        yield
    finally:
        cluster.sql(f"ALTER ROLE {ROLE} RESET default_transaction_read_only")
        cluster.end_connections()


@pytest.mark.parametrize(
    ("fault", "title"),
    [
        pytest.param(
            fault, title, marks=pytest.mark.fault(14, f"PostgreSQL refuses: {title}"), id=title.replace(" ", "-")
        )
        for fault, title in (
            (all_occupied, "too many connections"),
            (limited, "the role's limit of connections"),
            (read_only, "read-only transactions"),
        )
    ],
)
def test_a_refusal_that_ends(
    cluster: Cluster, processes: Processes, tally: Tally, fault: Callable[[Cluster], object], title: str
) -> None:
    """Waited for; `/health` does not."""
    tally.tried += 1
    with under_load(cluster, processes, tally), Health(processes.urls[0]) as health:
        with fault(cluster):  # type: ignore[attr-defined]
            time.sleep(HELD_S)
        assert health.slowest < STALLED_S


@pytest.mark.fault(14, "PostgreSQL refuses for longer than requests wait")
def test_a_refusal_that_does_not_end_is_503(cluster: Cluster, processes: Processes, tally: Tally) -> None:
    with httpx.Client(base_url=processes.urls[0], timeout=60) as http:
        session = http.post("/sessions").json()
        path = f"{session['base_url']}/chat/completions"
        with limited(cluster):
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


@pytest.mark.fault(14, "the network to PostgreSQL falls silent")
def test_a_network_that_falls_silent_and_speaks_again(
    cluster: Cluster, address: Forwarder, processes: Processes, tally: Tally
) -> None:
    tally.tried += 1
    with under_load(cluster, processes, tally), Health(processes.urls[1]) as health:
        address.silence()
        time.sleep(HELD_S)
        address.speak()
    assert health.slowest < STALLED_S


STRANDED_S = 180.0
"""In which connections that never speak again must have been found out: only timeouts tell, each in its turn."""


@pytest.mark.untimed
@pytest.mark.fault(14, "the network to PostgreSQL forgets its connections")
def test_connections_that_never_speak_again(
    cluster: Cluster, address: Forwarder, processes: Processes, tally: Tally
) -> None:
    """As behind a proxy or a firewall that dropped its state; new connections work."""

    acknowledged: list[Acknowledged] = []

    def served(number: int) -> float:
        """Seconds from now until a session can be made, used and read."""
        began = time.monotonic()
        with httpx.Client(base_url=processes.urls[number % 2], timeout=STRANDED_S) as http:
            while True:
                created = http.post("/sessions")
                if created.status_code == 200:
                    path = f"/sessions/{created.json()['session_id']}"
                    taken = http.post(f"{path}/v1/chat/completions", json={"messages": [user("Hello")], "sim": WISH})
                    if taken.status_code == 200:
                        acknowledged.append(acknowledgement(created.json()["session_id"], taken))
                        if http.get(path).status_code == 200:
                            return time.monotonic() - began
                time.sleep(0.1)

    with ThreadPoolExecutor(CLIENTS) as threads:
        for _ in range(3):
            assert max(threads.map(served, range(CLIENTS))) < STRANDED_S
        address.strand()
        tally.tried += 1
        tally.recovered(max(threads.map(served, range(CLIENTS))))
    assert max(tally.recoveries) < STRANDED_S
    processes.are_the_same()
    verified(cluster.url, acknowledged, tally)


@pytest.mark.fault(14, "an operator's settings: statement_timeout, serializable")
@pytest.mark.parametrize(
    "setting",
    ["statement_timeout = '30ms'", "default_transaction_isolation = 'serializable'"],
    ids=["timeout", "level"],
)
def test_settings_of_the_database_that_break_statements(
    cluster: Cluster, processes: Processes, tally: Tally, setting: str
) -> None:
    """Reads may be cut short by them; writes say what they need."""
    name = setting.partition(" ")[0]
    cluster.sql(f"ALTER DATABASE turnlog SET {setting}")
    cluster.end_connections()
    try:
        tally.tried += 1
        with under_load(cluster, processes, tally) as agents:
            began = len(agents.acknowledged)
            until(lambda: len(agents.acknowledged) > began + 60, 180)
            cluster.sql(f"ALTER DATABASE turnlog RESET {name}")  # What is read to judge must not be cut short.
            cluster.end_connections()
    finally:
        cluster.sql(f"ALTER DATABASE turnlog RESET {name}")
        cluster.end_connections()
