"""`kill -9` at every point of a cut and of a restore: either it never was, or it is finished by whoever serves next."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from integration.stand import Stand, Talk, until

from app.crash_points import CrashPoint
from fault.table import Tally
from fault.test_crash_points import TITLE, Site, on_one_of_both
from fault.test_crash_points import site as site
from fault.test_crash_points import vendor as vendor
from fault.verified import acknowledgement, verified
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

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
    with site.armed(point, 1) as stand:
        talk = stand.talk()
        reply = talk.say("One")
        with pytest.raises(httpx.TransportError):
            stand.http.post("/checkpoints", json={"name": name})
        tally.tried += 1
    with site.after() as stand:
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
@on_one_of_both("crash", RESTORES, lambda crash: f"{crash[0]}-{crash[1]}")
def test_a_restore(site: Site, tally: Tally, crash: tuple[CrashPoint, int]) -> None:
    point, times = crash
    name, groups = f"restore-{point}-{times}", [f"{point}-{times}-{kind}" for kind in ("acked", "leased", "later")]
    acked, leased, later = groups
    acknowledged: list[Acknowledged] = []

    def say(talk: Talk, text: str) -> None:
        acknowledged.append(acknowledgement(talk.id, talk.say(text)))

    with site.after() as stand:
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
    with site.armed(point, times) as stand:
        with pytest.raises(httpx.TransportError):
            stand.http.post(f"/checkpoints/{name}/restore")
        tally.tried += 1
    with site.after() as stand:
        until(lambda: stand.http.get("/fleet").json()["held_for"] is None)
        kept = next(
            one["name"] for one in stand.http.get("/checkpoints").json()["checkpoints"] if one["restores"] == name
        )
        assert contents(stand, *groups) == at_cut
        assert stand.http.post(f"/checkpoints/{kept}/restore").status_code == 200
        assert contents(stand, *groups) == before
        verified(site.url, acknowledged, tally)
