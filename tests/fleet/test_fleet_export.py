"""Export rows of sessions that moved between engines, at two API processes."""

from __future__ import annotations

import json
from typing import Any

import httpx
from integration.stand import until

from fleet.stands import Api, Engine, Fleet


def set_version(engine: Engine, version: int) -> None:
    response = engine.sim.post(
        "/update_weight_version", json={"new_version": str(version), "abort_all_requests": False}
    )
    assert response.status_code == 200


def listed(api: Api, url: str) -> dict[str, Any]:
    [found] = [engine for engine in api.http.get("/engines").json()["engines"] if engine["url"] == url]
    return dict(found)


def put(fleet: Fleet, url: str, state: str) -> None:
    """All processes agree before this returns."""
    assert fleet.apis[0].http.post("/engines", json={"url": url, "state": state}).status_code == 200
    until(lambda: all(listed(api, url)["state"] == state for api in fleet.apis))


def exported(api: Api, **query: Any) -> httpx.Response:
    response = api.http.get("/export", params=query)
    assert response.status_code == 200, response.text
    return response


def test_a_session_that_moved_to_older_weights_says_so(fleet: Fleet) -> None:
    newest = 1_000_000
    first, second = fleet.apis
    talk = first.talk()
    talk.say("Hello", sim={"weight_version": str(newest)})
    bound = talk.events()[-2]["engine"]
    [other] = [engine for engine in fleet.engines if engine.url != bound]
    set_version(other, newest - 3)
    put(fleet, bound, "draining")
    try:
        elsewhere = second.known(talk.id)
        elsewhere.messages = talk.messages
        elsewhere.say("And then?")
    finally:
        put(fleet, bound, "serving")

    query: dict[str, Any] = {"session_id": talk.id, "explain": True}
    before = exported(first, **query, max_staleness=3)
    [row] = [json.loads(line) for line in before.content.splitlines()]
    assert row["weight_version_regressed"] is True
    assert [turn["engine"] for turn in row["turns"]] == [bound, other.url]
    assert set(row["weight_versions"]) == {-1, newest, newest - 3}
    [left] = exported(second, **query, max_staleness=2).text.splitlines()
    assert json.loads(left)["excluded"] == "stale: 3 weight versions behind, max_staleness is 2"

    # The weights move on; the cursor, which any process takes, does not.
    later = second.talk()
    later.say("New weights", sim={"weight_version": str(newest + 1)})
    again = exported(second, **query, max_staleness=3, cursor=before.headers["x-turnlog-cursor"])
    assert again.content == before.content
    assert "excluded" in exported(second, **query, max_staleness=3).json()
