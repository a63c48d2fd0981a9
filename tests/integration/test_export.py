"""Training rows: what is in them, which are given, and where an export goes on."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest

from integration.stand import WEATHER, Stand, Talk, error_of, user

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
    return [json.loads(line) for line in response.content.splitlines()]


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


@pytest.mark.parametrize("truncate", ["turn", "token"])
@pytest.mark.parametrize("history", ["linear", "tree"])
def test_explain_counts_the_sampled_tokens_that_are_cut(stand: Stand, truncate: str, history: str) -> None:
    """What rows have in their loss, and what is cut, are all that was sampled."""
    group = uuid.uuid4().hex
    talk = stand.talk(group_id=group, history=history)
    for number in range(4):
        before = list(talk.messages)
        talk.say(f"Question {number}", sim={"text": "word " * 10})
    if history == "tree":
        assert talk.chat([*before, user("Instead")], sim={"text": "other " * 20}).status_code == 200
    [stored, *_] = rows = stand.rows(group_id=group)
    sampled = sum(sum(row["loss_mask"]) for row in rows)
    ends = [span["end"] for span in stored["turns"]]
    for most in (1, ends[0] - 2, ends[0], ends[1] + 30, ends[-1] - 1, ends[-1] + 999):
        asked = {"group_id": group, "explain": True, "max_seq_len": most, "truncate": truncate}
        for shape in ("turnlog", "tree", "atropos"):
            told = [row for row in stand.rows(**asked, shape=shape) if row.get("excluded") is not None]
            kept = [row for row in stand.rows(**asked) if row.get("excluded") is None]
            cut = sum(row["lost_tokens"] for row in told if row["excluded"].startswith("max_seq_len: "))
            assert cut + sum(sum(row["loss_mask"]) for row in kept) == sampled, (most, shape, told)
    explained = stand.rows(**{**asked, "session_id": talk.id, "max_seq_len": ends[1], "branches": "main"})
    [line] = [row for row in explained if row.get("excluded", "").startswith("max_seq_len: ")]
    assert line["turn"] == stored["turns"][2]["turn"]


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


BAD: tuple[tuple[dict[str, object], tuple[str, ...]], ...] = (
    ({"grup_id": "x"}, ("grup_id", "group_id, group_prefix, images, limit")),
    ({"format": "xml"}, ("format=xml", "ndjson, parquet, safetensors, msgpack, atif, messages")),
    ({"shape": "odd"}, ("shape=odd", "turnlog, miles, slime, verl, skyrl")),
    ({"format": "atif", "shape": "verl"}, ("format=atif", "shape=verl", "ndjson, parquet, safetensors, msgpack")),
    *(({name: value}, (f"{name}={value}", "greater than")) for name, value in (("limit", 0), ("max_seq_len", -1))),
    ({"limit": "1.5"}, ("limit=1.5", "integer")),
    ({"truncate": "middle"}, ("truncate=middle", "'turn' or 'token'")),
    *(({"cursor": value}, ("cursor", "was not issued by an export")) for value in ("zzz", "")),
    ({"status": "odd"}, ("status=odd", "'completed', 'truncated' or 'aborted'")),
    ({"session_status": "x"}, ("session_status=x", "'open', 'closed' or 'erased'")),
    *(({name: value}, (name, "ISO 8601")) for name, value in (("since", "1e999"), ("until", "nan"))),
    *(
        ({name: value}, (name, what))
        for name, value, what in (("min_reward", "x", "number"), ("max_reward", "nan", "finite"))
    ),
    *(({name: "perhaps"}, (name, "boolean")) for name in ("explain", "replay")),
    *(({"max_staleness": value}, ("max_staleness",)) for value in (-1, "old")),
    *(({"weight_version": value}, ("weight_version",)) for value in (2**63, "base")),
    *(({"advantage": "gae"}, ("advantage=gae", "grpo")), ({"session_id": "\0"}, ("session_id", "pattern"))),
)


def test_a_bad_parameter_is_400_and_says_what_is_accepted(stand: Stand) -> None:
    for query, told in BAD:
        response = stand.http.get("/export", params=query)  # type: ignore[arg-type]
        assert error_of(response) == (400, "invalid_request")
        message = response.json()["error"]["message"]
        assert [part for part in told if part not in message] == [], message


def whole_group(stand: Stand, rewards: list[float | None]) -> tuple[str, list[Talk]]:
    group, talks = group_of(stand, len(rewards))
    for talk, reward in zip(talks, rewards, strict=True):
        if reward is not None:
            assert stand.http.put(f"{talk.path}/reward", json={"reward": reward}).status_code == 200
    return group, talks


def members(rows: list[dict[str, Any]]) -> list[set[str]]:
    return [set(row["session_ids"]) for row in rows if "excluded" not in row]


def test_a_group_that_grows_is_given_again_whole_and_its_old_cursor_gives_the_old_bytes(stand: Stand) -> None:
    group, talks = whole_group(stand, [1.0, 0.0])
    query = {"group_id": group, "shape": "atropos", "advantage": "grpo", "explain": "true"}
    first = stand.http.get("/export", params=query)
    old = {talk.id for talk in talks}
    assert members(lines(first)) == [old]
    late = stand.talk(group_id=group)
    late.say("Late")
    again = stand.http.get("/export", params={**query, "cursor": first.headers["x-turnlog-cursor"]})
    assert again.content == first.content
    following = {**query, "cursor": first.headers["x-turnlog-next-cursor"]}
    [row] = lines(stand.http.get("/export", params=following))
    assert row["excluded"] == "no reward for 1 of the group's 3 rows"
    stand.http.put(f"{late.path}/reward", json={"reward": 0.5})
    rows = lines(stand.http.get("/export", params={**following, "explain": "false"}))
    assert members(rows) == [{*old, late.id}]
    assert sorted(rows[0]["scores"]) == [0.0, 0.5, 1.0]


def test_one_session_of_a_group_asked_for_by_id_brings_its_group(stand: Stand) -> None:
    _, talks = whole_group(stand, [1.0, 0.0])
    for talk in talks:
        assert members(talk.rows(shape="atropos")) == [{one.id for one in talks}]


def test_a_filter_that_leaves_out_a_part_of_a_group_leaves_out_the_group(stand: Stand) -> None:
    group = uuid.uuid4().hex
    talk = stand.talk(group_id=group)
    talk.say("Hello")
    talk.say("Tools", tools=[WEATHER], sim={"tool_calls": False, "finish_reason": "length"})
    stand.http.put(f"{talk.path}/reward", json={"reward": 1})
    query = {"group_id": group, "shape": "atropos", "status": "completed"}
    assert stand.rows(**query) == []
    whole, part = (one for one in stand.rows(**query, explain="true") if one["session_id"] == talk.id)
    assert whole["excluded"] == f"a session of the group is left out: {talk.id}: status is truncated"
    assert (part["segment"], part["excluded"]) == (1, "status is truncated")
    later = stand.rows(**query, explain="true", cursor=part["cursor"])
    assert talk.id not in {one["session_id"] for one in later}


def test_every_reason_of_the_filters(stand: Stand) -> None:
    group, talks = group_of(stand, 2)
    stand.http.put(f"{talks[0].path}/reward", json={"reward": 1})

    def reasons(talk: Talk, **query: Any) -> list[str]:
        rows = talk.rows(explain="true", **query)
        return [row.get("excluded", "") for row in rows]

    assert reasons(talks[0], group_id="other") == []
    assert reasons(talks[0], session_status="closed") == ["session_status is open"]
    assert reasons(talks[0], since="2090-01-01") == ["committed before since"]
    assert reasons(talks[0], until=1) == ["committed after until"]
    assert reasons(talks[0], min_reward=2) == ["reward below min_reward"]
    assert reasons(talks[0], max_reward=0) == ["reward above max_reward"]
    assert reasons(talks[1], min_reward=0) == reasons(talks[1], max_reward=0) == ["no reward"]
    assert reasons(talks[1], status="aborted") == ["status is completed"]
    assert reasons(talks[1], max_seq_len=1) == ["max_seq_len: no turn fits"]
    assert reasons(talks[0], group_id=group) == [""]


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


def test_two_groups_whose_sessions_alternate_are_each_given_once(stand: Stand) -> None:
    mark = stand.http.get("/export").headers["x-turnlog-next-cursor"]
    groups = [uuid.uuid4().hex for _ in range(3)]
    expected: dict[str, set[str]] = {group: set() for group in groups}
    for number in range(9):
        talk = stand.talk(group_id=groups[number % 3])
        talk.say("Hello")
        stand.http.put(f"{talk.path}/reward", json={"reward": number})
        expected[groups[number % 3]].add(talk.id)
    empty = stand.talk(group_id=groups[0])
    for explain in ("false", "true"):
        query: dict[str, Any] = {"cursor": mark, "shape": "atropos", "explain": explain}
        rows = stand.rows(**query)
        assert members(rows) == [expected[group] for group in groups]
        assert [row["session_id"] for row in rows if "excluded" in row] == [empty.id] * (explain == "true")
        seen, query["limit"] = [], 1
        while page := stand.rows(**query):
            seen += page
            query["cursor"] = page[-1]["cursor"]
        assert [row.get("group_id") for row in seen] == [row.get("group_id") for row in rows]
