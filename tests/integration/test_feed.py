"""The training feed over HTTP: who gets which groups, what comes again, what is in a line."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from helpers.looking import change

from integration.places import Places
from integration.stand import Stand, Talk, error_of, serving
from ops.simulator.process import SimulatorProcess


@pytest.fixture
def fresh(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server of the test's own, whose newest weight version is the test's."""
    with serving(places.new("feed"), sglang.base_url) as made:
        yield made


@pytest.fixture(scope="module")
def used(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("feed"), sglang.base_url) as made:
        yield made


@pytest.fixture
def swept(used: Stand) -> Stand:
    """A server on which no complete group waits: the feed gives whatever does, whoever made it."""
    ask(used, "sweeper")
    expire(used)
    ack(used, "sweeper", *ids(ask(used, "sweeper", 1000)))
    return used


def finish(talk: Talk, stand: Stand, reward: float | None) -> None:
    if reward is not None:
        assert stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204


def a_group(stand: Stand, rewards: Sequence[float] = (0.0, 1.0), version: str = "3", **sim: Any) -> str:
    """A complete group of one-turn sessions with these rewards."""
    group = uuid.uuid4().hex
    for attempt, reward in enumerate(rewards):
        talk = stand.talk(group_id=group, attempt=attempt)
        talk.say("Hello", sim={"weight_version": version, **sim})
        finish(talk, stand, reward)
    return group


def ask(stand: Stand, consumer: str, size: int = 1, **parameters: Any) -> list[dict[str, Any]]:
    response = stand.http.get("/export/groups", params={"consumer": consumer, "size": size, **parameters})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def ids(lines: list[dict[str, Any]]) -> list[str]:
    return [line["group_id"] for line in lines if "rows" in line]


def reasons(lines: list[dict[str, Any]]) -> dict[str, str]:
    return {line["group_id"]: line["excluded"] for line in lines if "rows" not in line}


def ack(stand: Stand, consumer: str, *groups: str) -> dict[str, list[str]]:
    response = stand.http.post("/export/groups/ack", json={"consumer": consumer, "groups": groups})
    assert response.status_code == 200, response.text
    found: dict[str, list[str]] = response.json()
    return found


def expire(stand: Stand) -> None:
    """As if every lease had ended."""
    change(stand.url, "UPDATE groups SET lease_until = lease_until - 100000")


def test_a_line_is_a_whole_group_with_its_rows(swept: Stand) -> None:
    group = a_group(swept, (0.0, 1.0, 1.0))
    [line] = ask(swept, "trainer", 4)
    assert line["group_id"] == group
    assert [one["attempt"] for one in line["attempts"]] == [0, 1, 2]
    assert [one["reward"] for one in line["attempts"]] == [0.0, 1.0, 1.0]
    assert line["statistics"] == {
        "count": 3,
        "mean": pytest.approx(2 / 3),
        "std": pytest.approx(math.sqrt(1 / 3)),
        "min": 0.0,
        "max": 1.0,
        "zero_variance": False,
    }
    assert (line["handed_out"], line["staleness"], line["excluded"]) == (1, 0, [])
    assert [row["session_id"] for row in line["rows"]] == [one["session_id"] for one in line["attempts"]]
    std = math.sqrt(1 / 3)
    for row in line["rows"]:
        assert row["group_id"] == group
        assert row["final"] is True
        assert row["advantage"] == pytest.approx((row["reward"] - 2 / 3) / (std + 1e-6))
        [exported] = swept.rows(session_id=row["session_id"], advantage="grpo")
        for name in ("tokens", "logprobs", "loss_mask", "weight_versions", "messages", "advantage"):
            assert row[name] == exported[name], name


def test_what_is_not_acknowledged_in_time_goes_to_whoever_asks(swept: Stand) -> None:
    made = [a_group(swept) for _ in range(2)]
    assert ids(ask(swept, "dead", 2)) == made
    assert ids(ask(swept, "alive", 2)) == []
    expire(swept)
    assert ids(ask(swept, "alive", 1)) == made[:1]
    late = ack(swept, "dead", *made)
    assert late == {"acknowledged": [made[1]], "already": [], "not_leased": [made[0]], "unknown": []}
    assert ack(swept, "alive", made[0], "nonsense") == {
        "acknowledged": [made[0]],
        "already": [],
        "not_leased": [],
        "unknown": ["nonsense"],
    }


def test_stale_groups_stay_and_are_explained(fresh: Stand) -> None:
    old, middle, new = (a_group(fresh, version=version) for version in ("3", "5", "9"))
    found = ask(fresh, "trainer", 9, max_staleness=2, explain=True)
    assert ids(found) == [new]
    assert reasons(found).keys() == {old, middle}
    assert all(reason.startswith("stale: ") for reason in reasons(found).values())
    assert ids(ask(fresh, "other", 9, max_staleness=2)) == []
    [line] = ask(fresh, "other", 9, max_staleness=2, weight_version=7)
    assert (line["group_id"], line["staleness"]) == (middle, 2)
    [line] = ask(fresh, "third", 9)
    assert (line["group_id"], line["staleness"]) == (old, 6)


BAD_PARAMETERS = (
    *(({"consumer": name}, "consumer") for name in ("", "a b", "x" * 129, "a\n")),
    *(({"size": size}, "size") for size in (0, "many")),
    *(({"lease_s": lease_s}, "lease_s") for lease_s in (0.5, 86401, "nan")),
    ({"max_staleness": -1}, "max_staleness"),
    ({"weight_version": "latest"}, "weight_version"),
    ({"attempts": 0}, "attempts"),
    ({"max_seq_len": 0}, "max_seq_len"),
    ({"truncate": "middle"}, "truncate"),
    ({"new_only": "perhaps"}, "new_only"),
    ({"shape": "none"}, "shape"),
    ({"group_id": "g"}, "group_id"),
)
BAD_ACKNOWLEDGEMENTS: tuple[tuple[Any, str], ...] = (
    ({"groups": []}, "consumer"),
    ({"consumer": "a/b", "groups": []}, "consumer"),
    ({"consumer": "c"}, "groups"),
    ({"consumer": "c", "groups": "g"}, "groups"),
    ({"consumer": "c", "groups": [1]}, "groups.0"),
    ({"consumer": "c", "groups": [], "more": 1}, "more"),
    ([], "body"),
)


def test_what_is_wrong_in_a_request_is_named(stand: Stand) -> None:
    asked = [({}, "consumer"), *(({"consumer": "trainer", **query}, named) for query, named in BAD_PARAMETERS)]
    refused = [(stand.http.get("/export/groups", params=query), named) for query, named in asked]
    refused += [(stand.http.post("/export/groups/ack", json=body), named) for body, named in BAD_ACKNOWLEDGEMENTS]
    for response, named in refused:
        assert error_of(response) == (400, "invalid_request"), named
        assert named in response.json()["error"]["message"]
