"""`GET /ui/api/trends`: sums over time of a few sessions a request, against what the routes for programs say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from app.api.page.trends import BINS, BINS_PER_DOUBLING, SESSIONS, bin_of
from integration.stand import Stand, Talk, user

NOW = {"latency_s": 0}


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
    assert [page["total"] for page in found] == [SESSIONS + 5] * 2
    assert total(found, "sessions") == SESSIONS + 5


def test_bins_hold_what_they_say() -> None:
    assert [bin_of(value) for value in (0.0, 1.0, 1.01, 2.0, 4.0, 1e12)] == [0, 0, 1, 4, 8, BINS - 1]
    for value in (1.5, 37.0, 812.0, 60_000.0):
        end = 2 ** (bin_of(value) / BINS_PER_DOUBLING)
        assert value <= end < value * 1.2
