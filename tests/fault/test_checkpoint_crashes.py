"""`kill -9` at every point of a cut and of a restore: either it never was, or it is finished by whoever serves next."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.databases import Postgres, SqliteTemplate
from integration.stand import Stand, Talk, until

from app.crash_points import VARIABLE, CrashPoint
from fault.forking import ForkedServer
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

TITLE = "kill -9 at a crash point"

CUTS: tuple[CrashPoint, ...] = ("in_checkpoint", "after_checkpoint")

RESTORES: tuple[tuple[CrashPoint, int], ...] = (
    ("after_held", 1),
    ("in_checkpoint", 1),
    ("in_restore", 1),
    ("in_restore", 2),
    ("after_session_restored", 1),
    ("after_session_restored", 3),
    ("after_groups_restored", 1),
    ("after_groups_restored", 2),
    ("in_restore_finished", 1),
    ("after_restore_finished", 1),
)


class Site:
    """A store, its server that is killed, and on PostgreSQL another one that goes on."""

    def __init__(self, url: str, folder: Path, engine: SimulatorProcess, *, shared: bool) -> None:
        self.url = url
        self.engine = engine
        self.server = ForkedServer(folder, url, [engine.base_url])
        self.other = ForkedServer(folder, url, [engine.base_url]).start() if shared else None

    @contextlib.contextmanager
    def serving(self, armed: str = "") -> Iterator[Stand]:
        """The server that is killed if it is armed; else whoever serves the store now."""
        server = (
            self.server.start(**({VARIABLE: armed} if armed else {})) if armed or self.other is None else self.other
        )
        stand = Stand(server, self.engine.base_url)
        yield stand
        stand.close()
        if armed:
            assert self.server.ended() == -signal.SIGKILL
        self.server.stop()

    def stop(self) -> None:
        for server in (self.server, self.other):
            if server is not None:
                server.stop()


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def site(
    request: pytest.FixtureRequest, engine: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("checkpoint-crashes")
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            template: SqliteTemplate = request.getfixturevalue("sqlite_template")
            url = template.copy(folder / "turnlog.db")
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            url = stack.enter_context(postgres.database())
        made = Site(url, folder, engine, shared=request.param == "postgresql")
        stack.callback(made.stop)
        yield made


def contents(stand: Stand, *group_ids: str) -> tuple[dict[str, Any], list[str]]:
    """What a trainer has of some groups: rows by session, and the groups that it is given again."""
    rows: dict[str, Any] = {}
    for group_id in group_ids:
        for row in stand.rows(group_id=group_id):
            known = {name: row[name] for name in ("tokens", "loss_mask", "logprobs", "reward", "final", "status")}
            rows.setdefault(row["session_id"], []).append(known)
    response = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 1000})
    assert response.status_code == 200, response.text
    given = [json.loads(line)["group_id"] for line in response.text.splitlines()]
    return rows, sorted(set(given) & set(group_ids))


def finished(stand: Stand, group_id: str) -> Talk:
    talk = stand.talk(group_id=group_id)
    talk.say("One")
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1.0}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    return talk


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("point", CUTS)
def test_a_cut(site: Site, tally: Tally, point: CrashPoint) -> None:
    name = f"cut-{point}"
    with site.serving(f"{point}:1") as stand:
        talk = stand.talk()
        reply = talk.say("One")
        with pytest.raises(httpx.TransportError):
            stand.http.post("/checkpoints", json={"name": name})
        tally.tried += 1
    with site.serving() as stand:
        again = stand.http.post("/checkpoints", json={"name": name})
        assert again.status_code == (409 if point == "after_checkpoint" else 200), again.text
        known = stand.known(talk.id)
        known.messages = talk.messages
        known.say("Two")
        assert stand.http.post(f"/checkpoints/{name}/restore").status_code == 200
        [row] = known.rows()
        assert len(row["turns"]) == 1
        verified(site.url, [acknowledgement(talk.id, reply)], tally)


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize(("point", "times"), RESTORES, ids=lambda value: str(value))
def test_a_restore(site: Site, tally: Tally, point: CrashPoint, times: int) -> None:
    name, groups = f"restore-{point}-{times}", [f"{point}-{times}-{kind}" for kind in ("acked", "leased", "later")]
    acked, leased, later = groups
    acknowledged: list[Acknowledged] = []

    def say(talk: Talk, text: str) -> None:
        acknowledged.append(acknowledgement(talk.id, talk.say(text)))

    with site.serving() as stand:
        finished(stand, acked)
        contents(stand, *groups)
        stand.http.post("/export/groups/ack", json={"consumer": "trainer", "groups": [acked]})
        open_ones = [stand.talk(group_id=leased) for _ in range(3)]
        for talk in open_ones:
            say(talk, "One")
        at_cut = contents(stand, *groups)
        assert stand.http.post("/checkpoints", json={"name": name}).status_code == 200
        for talk in open_ones:
            say(talk, "Two")
            stand.http.put(f"{talk.path}/reward", json={"reward": 2.0})
            stand.http.delete(talk.path)
        finished(stand, later)
        before = contents(stand, *groups)
        assert before[1] == sorted([later, leased])
    with site.serving(f"{point}:{times}") as stand:
        with pytest.raises(httpx.TransportError):
            stand.http.post(f"/checkpoints/{name}/restore")
        tally.tried += 1
    with site.serving() as stand:
        until(lambda: stand.http.get("/fleet").json()["held_for"] is None)
        kept = next(
            one["name"] for one in stand.http.get("/checkpoints").json()["checkpoints"] if one["restores"] == name
        )
        assert contents(stand, *groups) == at_cut
        assert stand.http.post(f"/checkpoints/{kept}/restore").status_code == 200
        assert contents(stand, *groups) == before
        verified(site.url, acknowledged, tally)
