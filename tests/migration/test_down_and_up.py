"""Fault 10: the schema goes down and up again under real turns; and a process meets another schema than its own.

There is no release before this one whose code could run on the new schema; what a process does with a database at
another revision is tested instead: it refuses to start, and says what to do.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.script import ScriptDirectory
from fault.table import Tally
from fault.verified import acknowledgement, verified
from helpers.databases import alembic_config, migrate
from helpers.looking import change, value
from integration.routing import BOTH
from integration.stand import Stand, Talk, serving, until, user

from app.errors import StartupError
from app.store.engine import Database
from app.store.revision import revision_head
from ops.bench.stored import fill as fill_ahead
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

WITH_PAYLOADS = "0002"
"""The revision that brought their tables; below it they are lost, which its docstring says."""

LOST_BELOW = {
    "0004": "downgrade to 0004: what was said of 1 engines and gates, and 0 affinities are lost",
    "0002": "downgrade to 0002: the leases of 1 groups and the acknowledgements of 1 are lost",
    "0001": "downgrade to 0001: 0 chunks of replay payloads and 1 refused replies are lost",
}
"""What a downgrade to these revisions says of the store that `fill` and `fill_groups` made."""


def revisions_below_head() -> list[str]:
    """Newest first."""
    found = ScriptDirectory.from_config(alembic_config("sqlite://")).walk_revisions()
    return [script.revision for script in found if script.revision != revision_head()]


def _fields(sim: dict[str, Any]) -> dict[str, Any]:
    return {"sim": sim} if sim else {}


class Keeper:
    """A client that remembers what it was told."""

    def __init__(self, stand: Stand, **body: Any) -> None:
        self.talk: Talk = stand.talk(**body)
        self.told: list[tuple[list[Any], bytes]] = []
        self.acknowledged: list[Acknowledged] = []

    def say(self, text: str, **sim: Any) -> None:
        sent = [*self.talk.messages, user(text)]
        response = self.talk.chat(sent, headers={"idempotency-key": f"{len(self.told)}"}, **_fields(sim))
        assert response.status_code == 200, response.text
        self.talk.messages = [*sent, response.json()["choices"][0]["message"]]
        self.told.append((sent, response.content))
        self.acknowledged.append(acknowledgement(self.talk.id, response))


def fill(stand: Stand) -> list[Keeper]:
    """Sessions of a group: one with a rollback, one closed and then rewarded twice, one with a refused reply."""
    keepers = [Keeper(stand, group_id="g", attempt=number) for number in range(4)]
    for version, keeper in enumerate(keepers, 7):
        keeper.say("One", weight_version=str(version))
        keeper.say("Two")
    rolled, closed, refused, _ = keepers
    rolled.talk.messages = rolled.talk.messages[:2]
    rolled.say("Instead of two")
    finish(stand, closed.talk, 0.5, 1.0)
    noted = {"note": "Look again.", "tags": ["b", "a"]}
    assert stand.http.put(f"{closed.talk.path}/note", json=noted).status_code == 200
    bad = refused.talk.chat([*refused.talk.messages, user("Bad")], sim={"fault": "null_logprob"})
    assert bad.status_code == 502
    return keepers


def finish(stand: Stand, talk: Talk, *rewards: float) -> None:
    """Close it, and reward it afterwards: its last change is then not its close."""
    assert stand.http.delete(talk.path).status_code == 204
    for reward in rewards:
        assert stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200


def fill_groups(stand: Stand) -> None:
    """Groups that are complete: acknowledged, leased, waiting, and all of them with an erased session."""
    for group in ("acknowledged", "leased", "waiting"):
        for attempt, rewards in enumerate(((0.0,), (1.0,), (0.5,), ())):
            keeper = Keeper(stand, group_id=group, attempt=attempt)
            keeper.say("Hello", weight_version=f"{3 + attempt}")
            finish(stand, keeper.talk, *rewards)
            if attempt > 1:
                erased = stand.http.delete(keeper.talk.path, params={"erase": "true"})
                assert erased.status_code == 204, erased.text
        if group != "waiting":
            leased = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 1})
            assert [json.loads(line)["group_id"] for line in leased.text.splitlines()] == [group]
        if group == "acknowledged":
            done = stand.http.post("/export/groups/ack", json={"consumer": "trainer", "groups": [group]})
            assert done.status_code == 200, done.text


def weights_fell(url: str) -> bool:
    """The fleet's log says so: it is told beside the turn, and that is what a downgrade to 0004 loses."""
    return value(url, "SELECT count(*) FROM fleet_events") == 1


SHOWN = (
    "/export",
    "/export?advantage=grpo",
    "/export?shape=verl",
    "/sessions?limit=100",
)
"""What must be the same to the byte before and after."""


def shown(stand: Stand, keepers: list[Keeper]) -> dict[str, bytes]:
    paths = [*SHOWN, *(f"{keeper.talk.path}/events" for keeper in keepers)]
    replies = {path: stand.http.get(path) for path in paths}
    assert {path: reply.status_code for path, reply in replies.items() if reply.status_code != 200} == {}
    return {path: reply.content for path, reply in replies.items()}


@pytest.mark.fault(10, "the schema goes down and up again with data")
@pytest.mark.parametrize("payloads", [False, pytest.param(True, marks=pytest.mark.untimed)])
def test_what_the_log_tells_is_there_after_down_and_up(
    empty_url: str, payloads: bool, tmp_path: Path, tally: Tally, caplog: pytest.LogCaptureFixture
) -> None:
    """Exports and lists are the same to the byte. What no log tells is lost, and the downgrade says so."""
    environment = {"TURNLOG_DATABASE_URL": empty_url, **(BOTH if payloads else {})}
    with SimulatorProcess("--seed", "31") as engine:
        with serving(tmp_path, engine.base_url, environment=environment) as stand:
            keepers = fill(stand)
            fill_groups(stand)
            until(lambda: weights_fell(empty_url))
            before = shown(stand, keepers)
        acknowledged = [one for keeper in keepers for one in keeper.acknowledged]
        for revision in revisions_below_head():
            if revision < WITH_PAYLOADS and payloads:
                continue
            caplog.clear()
            command.downgrade(alembic_config(empty_url), revision)
            assert (LOST_BELOW.get(revision, "are lost") in caplog.text) == (revision in LOST_BELOW)
            migrate(empty_url)
            verified(empty_url, acknowledged, tally)
            tally.tried += 1
        with serving(tmp_path, engine.base_url, environment=environment) as stand:
            assert shown(stand, keepers) == before
            groups = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 9}).text.splitlines()
            assert sorted(json.loads(line)["group_id"] for line in groups) == ["acknowledged", "leased", "waiting"]
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
