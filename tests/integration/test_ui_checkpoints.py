"""What the page shows of checkpoints: the sessions in one, and the checkpoints that have a session."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from integration.places import Places
from integration.stand import Stand, error_of, serving
from ops.simulator.process import SimulatorProcess


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("ui-checkpoints"), sglang.base_url) as made:
        yield made


def get(stand: Stand, path: str, **parameters: Any) -> Any:
    response = stand.http.get(f"/ui/api/{path}", params=parameters)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_checkpoint_shows_its_sessions_then_and_now(used: Stand) -> None:
    name = uuid.uuid4().hex
    talks = [used.talk(session_id=f"{name}-{number}", group_id=name) for number in range(5)]
    for talk in talks:
        talk.say("Before")
    made = used.http.post("/checkpoints", json={"name": name}).json()
    then = {talk.id: len(talk.types()) for talk in talks}
    talks[1].say("After")
    used.http.delete(talks[2].path).raise_for_status()
    used.talk(session_id=f"{name}-9")
    pages = [get(used, f"checkpoints/{name}", limit=2)]
    while pages[-1]["cursor"] is not None:
        pages.append(get(used, f"checkpoints/{name}", limit=2, cursor=pages[-1]["cursor"]))
    found = [one for page in pages for one in page["sessions"]]
    assert len(found) == made["sessions"]
    mine = [one for one in found if one["session_id"].startswith(name)]
    assert mine == [
        {
            "session_id": talk.id,
            "seq": then[talk.id],
            "version": len(talk.types()),
            "status": "closed" if talk is talks[2] else "open",
            "group_id": name,
        }
        for talk in talks
    ]
    assert pages[0]["checkpoint"] == {key: value for key, value in made.items() if key != "erased"}

    second = uuid.uuid4().hex
    used.http.post("/checkpoints", json={"name": second}).raise_for_status()
    kept = [(one["name"], one["seq"]) for one in get(used, f"sessions/{talks[1].id}")["checkpoints"]]
    assert kept == [(name, then[talks[1].id]), (second, len(talks[1].types()))]
    assert used.http.delete(f"/checkpoints/{name}").status_code == 204
    assert [one["name"] for one in get(used, f"sessions/{talks[1].id}")["checkpoints"]] == [second]
    assert error_of(used.http.get(f"/ui/api/checkpoints/{name}")) == (404, "not_found")
