"""`GET /ui/api/trends`: sums over time of a few sessions a request, against what the routes for programs say."""

from __future__ import annotations

import contextlib
import sqlite3
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.api.page.trend_sums import BINS, BINS_PER_DOUBLING, Bucket, SessionSums, TrendCache, bin_of
from app.api.page.trends import SESSIONS
from app.sessions.session_list import SessionRow
from integration.stand import Stand, Talk, standing, user

NOW = {"latency_s": 0}
SESSION_ROW = SessionRow(
    session_id="a",
    version=3,
    state="idle",
    turns=1,
    group_id=None,
    attempt=None,
    reward=None,
    weight_version=None,
    staleness=None,
    engine=None,
    created_at=1.0,
    updated_at=3.0,
    claimed_since=None,
    closed_at=None,
    note=None,
    tags=[],
)


def pages(stand: Stand, **parameters: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["cursor"]:
        cursor = {"cursor": found[-1]["cursor"]} if found else {}
        response = stand.http.get("/ui/api/trends", params={**parameters, **cursor})
        assert response.status_code == 200, response.text
        found.append(response.json())
    return found


def total(found: list[dict[str, Any]], name: str) -> Any:
    return sum(bucket[name] for page in found for bucket in page["buckets"])


@pytest.fixture
def group(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


@pytest.fixture
def run(stand: Stand, group: str) -> list[Talk]:
    talks = []
    for number in range(4):
        talk = stand.talk(group_id=group, attempt=number)
        for turn in range(number):
            talk.say(f"{turn}", sim={**NOW, "weight_version": str(7 + number), "completion_tokens": 5})
        talks.append(talk)
    for talk, reward in zip(talks, (0.25, 0.5, 1.0), strict=False):
        assert stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
    assert talks[3].chat([*talks[3].messages, user("x")], sim={**NOW, "fault": "status_500"}).status_code == 500
    assert talks[2].chat([*talks[2].messages, user("x")], sim={**NOW, "fault": "not_json"}).status_code == 502
    return talks


def test_the_sums_are_those_of_the_log(stand: Stand, run: list[Talk], group: str) -> None:
    found = pages(stand, group_id=group, by="day")
    assert total(found, "sessions") == 4
    assert total(found, "rewarded") == 3
    assert total(found, "reward_sum") == 1.75
    assert total(found, "reward_squares") == pytest.approx(0.25**2 + 0.5**2 + 1)
    assert total(found, "session_turns") == total(found, "committed") == 6
    rows = [row for talk in run for row in talk.rows()]
    assert total(found, "session_tokens") == sum(len(row["tokens"]) for row in rows)
    assert total(found, "session_sampled") == sum(sum(row["loss_mask"]) for row in rows)
    buckets = [bucket for page in found for bucket in page["buckets"]]
    assert min(one["reward_min"] for one in buckets if one["reward_min"] is not None) == 0.25
    assert max(one["version_max"] for one in buckets if one["versions"]) == 10
    assert total(found, "version_sum") == 8 + 2 * 9 + 3 * 10
    assert sum(sum(one["latency"].values()) for one in buckets) == 6
    ended = Counter[str]()
    for one in buckets:
        ended.update(one["errors"])
    log = [event for talk in run for event in talk.events() if event["type"] in ("TurnRejected", "TurnAbandoned")]
    assert ended == Counter(event["reason"] for event in log)
    assert ended.total() == 2
    for name, divisor in (("minute", 60), ("hour", 3600), ("day", 86_400)):
        keys = [bucket["key"] for page in pages(stand, by=name) for bucket in page["buckets"]]
        assert all(key % divisor == 0 for key in keys)


def test_by_weight_version_and_filtered_like_the_list(stand: Stand, run: list[Talk], group: str) -> None:
    found = pages(stand, group_id=group, by="weight_version")
    buckets = {bucket["key"]: bucket for page in found for bucket in page["buckets"]}
    assert {key: one["committed"] for key, one in buckets.items()} == {None: 0, 8: 1, 9: 2, 10: 3}
    assert {key: one["sessions"] for key, one in buckets.items()} == {None: 1, 8: 1, 9: 1, 10: 1}
    assert buckets[9]["reward_sum"] == 1.0
    best = pages(stand, group_id=group, min_reward=0.5)
    assert total(best, "sessions") == 2
    assert total(pages(stand, group_id="nobody"), "sessions") == 0
    assert pages(stand, group_id="nobody")[0]["buckets"] == []
    assert stand.http.get("/ui/api/trends", params={"by": "year"}).status_code == 400
    assert stand.http.get("/ui/api/trends", params={"cursor": "x"}).status_code == 400


def test_many_sessions_are_several_requests(stand: Stand) -> None:
    for number in range(SESSIONS + 5):
        stand.talk(session_id=f"paged-{number}")
    found = pages(stand, q="paged-")
    assert [page["scanned"] for page in found] == [SESSIONS, 5]
    assert [page["total"] for page in found] == [SESSIONS + 5, None]
    assert total(found, "sessions") == SESSIONS + 5


def test_only_what_is_new_is_read_again(stand: Stand, group: str) -> None:
    """The sums go on from what was read before, and stay right."""
    talk, other = stand.talk(group_id=group, attempt=0), stand.talk(group_id=group, attempt=1)
    for turn in range(4):
        sim = {**NOW, "completion_tokens": 5, "weight_version": "7"}
        talk.say(f"{turn}", sim=sim)
        if turn == 2:
            other.say("one", sim=sim)
            assert other.chat([*other.messages, user("x")], sim={**NOW, "fault": "status_500"}).status_code == 500
        for by in ("day", "weight_version"):
            found = pages(stand, group_id=group, by=by)
            turns = turn + 1 + (turn >= 2)
            assert total(found, "committed") == total(found, "session_turns") == turns
            assert total(found, "session_sampled") == 5 * turns
            assert total(found, "version_sum") == 7 * turns
            errors = [one["errors"] for page in found for one in page["buckets"] if one["errors"]]
            assert len(errors) == (turn >= 2)
            assert all(sum(one.values()) == 1 for one in errors)
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 0.5}).status_code == 200
    assert total(pages(stand, group_id=group, by="day"), "reward_sum") == 0.5


def test_what_was_read_once_is_not_read_again(tmp_path: Path) -> None:
    """Turns that are damaged later stay in the sums; those of an interval that was not asked for before lack them."""
    with standing(tmp_path) as stand:
        talks = [stand.talk(), stand.talk()]
        for talk in talks:
            talk.say("one", sim=NOW)
        first = pages(stand, by="day")
        with contextlib.closing(sqlite3.connect(stand.server.database_path)) as store, store:
            damaged = store.execute("UPDATE events SET data = x'00' WHERE type = 'TurnCommitted'").rowcount
        assert damaged == total(first, "committed") == 2
        assert pages(stand, by="day") == first
        talks[0].say("two", sim=NOW)
        found = pages(stand, by="day")
        assert (total(found, "committed"), found[0]["damaged"]) == (3, 0)
        unread = pages(stand, by="hour")
        assert (total(unread, "committed"), unread[0]["damaged"]) == (1, 2)


def test_the_cache_is_bounded() -> None:
    """What was asked for longest ago is dropped, and what has another history is not taken for the same."""
    row = SESSION_ROW
    cache = TrendCache(most=4)
    for name in ("a", "b", "a", "c"):
        made = SessionSums("day")
        made.add(msgspec.structs.replace(row, session_id=name), [])
        made.buckets = {0: Bucket(0)}
        if cache.get(msgspec.structs.replace(row, session_id=name), "day") is None:
            cache.put(name, "day", made)
    known = [name for name in "abc" if cache.get(msgspec.structs.replace(row, session_id=name), "day")]
    assert known == ["a", "c"]
    for other in ({"version": 2}, {"updated_at": 4.0}):
        assert cache.get(msgspec.structs.replace(row, session_id="a", **other), "day") is None
    assert cache.get(msgspec.structs.replace(row, session_id="a", version=4), "day") is not None
    assert cache.get(msgspec.structs.replace(row, session_id="a"), "hour") is None


def test_bins_hold_what_they_say() -> None:
    assert [bin_of(value) for value in (0.0, 1.0, 1.01, 2.0, 4.0, 1e12)] == [0, 0, 1, 4, 8, BINS - 1]
    for value in (1.5, 37.0, 812.0, 60_000.0):
        end = 2 ** (bin_of(value) / BINS_PER_DOUBLING)
        assert value <= end < value * 1.2
