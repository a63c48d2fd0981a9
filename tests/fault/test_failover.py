"""The primary dies and its synchronous standby takes over: what was acknowledged is there.

With an asynchronous standby that cannot be promised: start-up says so.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers.clusters import Cluster, Forwarder, folder_of_server, running, started
from integration.stand import until

from fault.agents import turns
from fault.processes import crowd, serving
from fault.table import Tally
from fault.verified import verified
from ops.server import ServerDidNotStart, ServerProcess
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

TITLE = "PostgreSQL fails over to a synchronous standby under load"
WISH = {"latency_s": 0.03, "completion_tokens": 8}


step = turns(WISH)


def until_following(primary: Cluster, state: str) -> None:
    until(lambda: primary.sql("SELECT string_agg(sync_state, ',') FROM pg_stat_replication") == state, 180)


@pytest.mark.fault(14, TITLE)
def test_a_synchronous_standby_has_every_acknowledged_turn(
    engine: SimulatorProcess, tmp_path: Path, tally: Tally
) -> None:
    """The clients' address leads to the new primary once it has been promoted, as a virtual address or a proxy does."""
    with running() as primary, folder_of_server() as folder, Forwarder(primary.port) as address:
        standby = primary.standby(folder)
        with started(standby), serving(tmp_path, 2, primary.url_at(address.port), engine.base_url) as processes:
            primary.sql("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
            primary.sql("SELECT pg_reload_conf()")
            until_following(primary, "sync")
            with crowd(processes, 6, step) as agents:
                until(lambda: len(agents.acknowledged) >= 30, 180)
                primary.stop("immediate")
                died = time.monotonic()
                standby.promote()
                address.lead_to(standby.port)
                until(lambda: agents.all_served(died), 180)
                tally.tried += 1
                tally.recovered(agents.recovery_s(died))
                for answer in agents.answers(died):
                    assert answer.status == 200 or answer.retry_after or answer.code == "claim_lost", answer
            processes.are_the_same()
            tally.doubled += agents.doubled(processes.urls[0])
            verified(standby.url, agents.acknowledged, tally)


def test_an_asynchronous_standby_is_warned_of_at_start_and_none_is_served_from(
    engine: SimulatorProcess, tmp_path: Path
) -> None:
    """A standby can be read, and no turn could ever commit there."""
    with running() as primary, folder_of_server() as folder, started(primary.standby(folder)) as standby:
        until_following(primary, "async")
        with serving(tmp_path, 1, primary.url, engine.base_url) as processes:
            assert "1 standbys, none of them synchronous" in processes.logs()
        server = ServerProcess(tmp_path, upstreams=[engine.base_url], database_url=standby.url)
        with pytest.raises(ServerDidNotStart, match="the database is a standby"):
            server.start()
