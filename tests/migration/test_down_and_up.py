"""Fault 10: the schema goes down and up again under real turns; and a process meets another schema than its own.

There is no release before this one whose code could run on the new schema; what a process does with a database at
another revision is tested instead: it refuses to start, and says what to do.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from fault.table import Tally
from fault.verified import acknowledgement, verified
from helpers.databases import alembic_config, migrate
from helpers.looking import change
from integration.routing import BOTH
from integration.stand import Stand, Talk, serving, user

from app.errors import StartupError
from app.store.engine import Database
from app.store.revision import revision_head
from ops.bench.startup import fill as fill_ahead
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

WITH_PAYLOADS = "0002"
"""The revision that brought their tables; below it they are lost, which its docstring says."""


def revisions_below_head() -> list[str]:
    """Newest first."""
    found = ScriptDirectory.from_config(alembic_config("sqlite://")).walk_revisions()
    return [script.revision for script in found if script.revision != revision_head()]


class Keeper:
    """A client that remembers what it was told."""

    def __init__(self, stand: Stand, **body: Any) -> None:
        self.talk: Talk = stand.talk(**body)
        self.told: list[tuple[list[Any], bytes]] = []
        self.acknowledged: list[Acknowledged] = []

    def say(self, text: str) -> None:
        sent = [*self.talk.messages, user(text)]
        response = self.talk.chat(sent, headers={"idempotency-key": f"{len(self.told)}"})
        assert response.status_code == 200, response.text
        self.talk.messages = [*sent, response.json()["choices"][0]["message"]]
        self.told.append((sent, response.content))
        self.acknowledged.append(acknowledgement(self.talk.id, response))


def fill(stand: Stand) -> list[Keeper]:
    """Sessions of a group, one with a rollback, one closed with a reward, one with a refused reply."""
    keepers = [Keeper(stand, group_id="g", attempt=number) for number in range(4)]
    for keeper in keepers:
        keeper.say("One")
        keeper.say("Two")
    rolled, closed, refused, _ = keepers
    rolled.talk.messages = rolled.talk.messages[:2]
    rolled.say("Instead of two")
    assert stand.http.put(f"{closed.talk.path}/reward", json={"reward": 1.0}).status_code == 200
    assert stand.http.delete(closed.talk.path).status_code == 204
    bad = refused.talk.chat([*refused.talk.messages, user("Bad")], sim={"fault": "null_logprob"})
    assert bad.status_code == 502
    return keepers


@pytest.mark.fault(10, "the schema goes down and up again with data")
@pytest.mark.parametrize("payloads", [pytest.param(False, marks=pytest.mark.long), True])
def test_turns_are_there_after_down_and_up(empty_url: str, payloads: bool, tmp_path: Path, tally: Tally) -> None:
    environment = {"TURNLOG_DATABASE_URL": empty_url, **(BOTH if payloads else {})}
    with SimulatorProcess("--seed", "31") as engine:
        with serving(tmp_path, engine.base_url, environment=environment) as stand:
            keepers = fill(stand)
        acknowledged = [one for keeper in keepers for one in keeper.acknowledged]
        possible = [one for one in revisions_below_head() if one >= WITH_PAYLOADS or not payloads]
        for revision in (possible[0], possible[-1]):  # The newest step alone, then all of them down and up again.
            command.downgrade(alembic_config(empty_url), revision)
            migrate(empty_url)
            tally.tried += 1
        verified(empty_url, acknowledged, tally)
        with serving(tmp_path, engine.base_url, environment=environment) as stand:
            go_on(stand, keepers)
    verified(empty_url)


def go_on(stand: Stand, keepers: list[Keeper]) -> None:
    """The last reply is given again to the byte, and the sessions that are open take a turn."""
    rolled, closed, refused, plain = keepers
    for keeper in (rolled, refused, plain):
        talk = stand.known(keeper.talk.id)
        sent, reply = keeper.told[-1]
        again = talk.chat(sent, headers={"idempotency-key": f"{len(keeper.told) - 1}"})
        assert (again.content, again.headers["x-turnlog-replayed"]) == (reply, "true")
        talk.messages = keeper.talk.messages
        talk.say("On")
    [row] = stand.known(closed.talk.id).rows()
    assert (row["final"], row["reward"], len(row["turns"])) == (True, 1.0, 2)


def refusal(url: str) -> str:
    async def start() -> None:
        database = Database(url)
        try:
            await database.open()
        finally:
            await database.close()

    with pytest.raises(StartupError) as raised:
        asyncio.run(start())
    return str(raised.value)


@pytest.mark.fault(10, "a process meets a schema of another revision")
def test_another_revision_is_refused_and_left_alone(database_url: str, tally: Tally) -> None:
    asyncio.run(fill_ahead(database_url, 1, 2))
    for revision in revisions_below_head():
        command.downgrade(alembic_config(database_url), revision)
        assert f"is at revision {revision}" in refusal(database_url)
        tally.tried += 1
    migrate(database_url)
    assert change(database_url, "UPDATE alembic_version SET version_num = '9999'") == 1
    assert "is at revision 9999" in refusal(database_url)
    tally.tried += 1
    assert change(database_url, f"UPDATE alembic_version SET version_num = '{revision_head()}'") == 1
    verified(database_url, [Acknowledged("filled-0", turn) for turn in (1, 2)], tally)
