"""Training rows: what is in them, which are given, and where an export goes on."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest

from integration.stand import Stand, Talk, error_of

FIELDS = {
    "tokens",
    "loss_mask",
    "sampled_mask",
    "logprobs",
    "weight_versions",
    "prompt_length",
    "response_length",
    "reward",
    "reward_components",
    "status",
    "group_id",
    "session_id",
    "segment",
    "attempt",
    "turns",
    "messages",
    "final",
    "as_of_seq",
    "provenance",
}


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in response.text.splitlines()]


def group_of(stand: Stand, count: int) -> tuple[str, list[Talk]]:
    group = uuid.uuid4().hex
    talks = [stand.talk(group_id=group, attempt=number) for number in range(count)]
    for talk in talks:
        talk.say("Hello")
    return group, talks


def test_a_row_holds_every_token_in_step(stand: Stand) -> None:
    talk = stand.talk(group_id="g1", attempt=4, metadata={"task": "t"})
    spans = []
    for number, text in enumerate(("One", "Two", "Three")):
        choice = talk.say(text, sim={"weight_version": str(7 + number)}).json()["choices"][0]
        spans.append((choice["prompt_token_ids"], choice["meta_info"]["output_token_logprobs"]))
    [row] = talk.rows()
    assert set(row) >= FIELDS
    length = len(row["tokens"])
    for name in ("loss_mask", "sampled_mask", "logprobs", "weight_versions"):
        assert len(row[name]) == length, name
    for number, (span, (prompt, entries)) in enumerate(zip(row["turns"], spans, strict=True)):
        start, end = span["output_start"], span["end"]
        assert row["tokens"][:start] == prompt
        assert row["tokens"][start:end] == [entry[1] for entry in entries]
        assert row["logprobs"][start:end] == [entry[0] for entry in entries]
        assert set(row["sampled_mask"][start:end]) == set(row["loss_mask"][start:end]) == {1}
        assert set(row["weight_versions"][start:end]) == {7 + number}
        unsampled = slice(span["start"], start)
        assert set(row["sampled_mask"][unsampled]) == {0}
        assert set(row["logprobs"][unsampled]) == {0.0}
        assert set(row["weight_versions"][unsampled]) == {-1}
    assert row["prompt_length"] == len(spans[0][0])
    assert row["response_length"] == length - row["prompt_length"]
    assert row["messages"] == talk.messages
    assert (row["session_id"], row["group_id"], row["attempt"]) == (talk.id, "g1", 4)
    assert (row["segment"], row["status"], row["final"], row["reward"]) == (0, "completed", False, None)
    assert row["as_of_seq"] == talk.events()[-1]["seq"]


def test_a_version_that_is_no_number_is_named(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("One", sim={"weight_versions": ["a", "b"]})
    [row] = talk.rows()
    assert row["weight_version_names"] == ["a", "b"]
    sampled = [v for v, mask in zip(row["weight_versions"], row["sampled_mask"], strict=True) if mask]
    assert sorted(set(sampled)) == [0, 1]
    assert sampled == sorted(sampled)


def test_filters_choose_rows(stand: Stand) -> None:
    group, talks = group_of(stand, 4)
    talks[1].say("Cut", sim={"finish_reason": "length"})
    talks[2].say("Stop", sim={"finish_reason": "abort"})
    for reward, talk in enumerate(talks[:3]):
        stand.http.put(f"{talk.path}/reward", json={"reward": reward})
    stand.http.delete(talks[3].path)

    def chosen(**query: Any) -> set[int]:
        return {row["attempt"] for row in stand.rows(group_id=group, **query)}

    assert chosen() == {0, 1, 2, 3}
    assert chosen(status="completed") == {0, 3}
    assert chosen(status="truncated") == {1}
    assert chosen(status="aborted") == {2}
    assert chosen(session_status="closed") == {3}
    assert chosen(session_status="open") == {0, 1, 2}
    assert chosen(min_reward=1) == {1, 2}
    assert chosen(min_reward=1, max_reward=1) == {1}
    assert chosen(session_id=talks[2].id) == {2}
    assert chosen(since="2000-01-01T00:00:00Z", until=4_000_000_000) == {0, 1, 2, 3}
    assert chosen(since="2090-01-01") == chosen(until=1) == set()


def test_explain_gives_a_reason_for_what_is_left_out(stand: Stand) -> None:
    group, talks = group_of(stand, 2)
    empty = stand.talk(group_id=group)
    rows = stand.rows(group_id=group, min_reward=1, explain=True)
    reasons = {row["session_id"]: row["excluded"] for row in rows if "excluded" in row}
    assert {talks[0].id, talks[1].id} <= set(reasons)
    assert all(reasons.values())
    assert not [row for row in rows if "excluded" not in row]
    assert empty.id in reasons


def test_explain_tells_of_turns_that_were_rolled_back(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("One")
    kept = talk.messages
    talk.say("Two")
    talk.messages = kept
    talk.say("Instead")
    told = [row for row in talk.rows(explain=True) if "excluded" in row]
    assert [row.get("turn") for row in told] == [2]


def test_the_same_cursor_gives_the_same_bytes_and_the_next_one_goes_on(stand: Stand) -> None:
    group, talks = group_of(stand, 5)
    first = stand.http.get("/export", params={"group_id": group})
    cursor, following = first.headers["x-turnlog-cursor"], first.headers["x-turnlog-next-cursor"]
    rows = lines(first)
    assert [row["attempt"] for row in rows] == [0, 1, 2, 3, 4]
    talks[1].say("More")
    late = stand.talk(group_id=group, attempt=9)
    late.say("New")
    again = stand.http.get("/export", params={"group_id": group, "cursor": cursor})
    assert again.content == first.content
    news = lines(stand.http.get("/export", params={"group_id": group, "cursor": following}))
    assert [(row["attempt"], len(row["turns"])) for row in news] == [(1, 2), (9, 1)]


def test_a_rows_cursor_resumes_behind_it(stand: Stand) -> None:
    group, talks = group_of(stand, 3)
    talks[0].say("Drift", sim={"text": " x"})
    whole = lines(stand.http.get("/export", params={"group_id": group}))
    for place, row in enumerate(whole):
        rest = lines(stand.http.get("/export", params={"group_id": group, "cursor": row["cursor"]}))
        assert [one["attempt"] for one in rest] == [one["attempt"] for one in whole[place + 1 :]]


def test_a_limit_pages_without_gap_or_repeat(stand: Stand) -> None:
    group, _ = group_of(stand, 5)
    seen: list[int] = []
    query: dict[str, Any] = {"group_id": group, "limit": 2}
    while rows := lines(stand.http.get("/export", params=query)):
        assert len(rows) <= 2
        seen += [row["attempt"] for row in rows]
        query["cursor"] = rows[-1]["cursor"]
    assert seen == [0, 1, 2, 3, 4]


def test_a_limited_export_gives_no_cursor_that_skips_what_the_limit_cut_off(stand: Stand) -> None:
    group, _ = group_of(stand, 4)
    first = stand.http.get("/export", params={"group_id": group, "limit": 2})
    rows = lines(first)
    following = first.headers.get("x-turnlog-next-cursor", rows[-1]["cursor"])
    rows += lines(stand.http.get("/export", params={"group_id": group, "cursor": following}))
    assert [row["attempt"] for row in rows] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "query",
    [
        {"grup_id": "x"},
        {"format": "xml"},
        {"format": "parquet"},
        {"shape": "verl"},
        {"limit": 0},
        {"limit": "x"},
        {"cursor": "zzz"},
        {"status": "odd"},
        {"since": "yesterday"},
        {"min_reward": "x"},
    ],
)
def test_a_bad_parameter_is_400(stand: Stand, query: dict[str, object]) -> None:
    status, code = error_of(stand.http.get("/export", params=query))
    assert (status, code in ("invalid_request", "unsupported")) == (400, True)
