"""What the page shows of a session: every turn, as of any event, the tokens as an export gives them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from helpers.looking import change
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from integration.places import Places
from integration.stand import WEATHER, Stand, Talk, error_of, serving, user
from ops.simulator.process import SimulatorProcess


def get(stand: Stand, path: str, **parameters: Any) -> Any:
    return stand.get(f"/ui/api/sessions/{path}", **parameters)


@pytest.fixture(scope="module")
def walked(shared: Stand) -> Talk:
    """A session with a rollback, a refused reply, a tool call, rewards, and a drifted segment."""
    talk = shared.talk(group_id="ui", attempt=3, metadata={"task": "<b>one</b>"}, rollback_window=1)
    talk.say("One", sim={"weight_version": "7"})
    talk.say("Two", tools=[WEATHER], sim={"tool_calls": True, "weight_version": "7"})
    kept = talk.messages[:2]
    assert talk.chat([*kept, user("Bad")], sim={"fault": "missing_meta_info"}).status_code == 502
    talk.messages = kept
    talk.say("Other", sim={"weight_versions": ["7", "8"]})
    path = f"/sessions/{talk.id}/reward"
    shared.http.put(path, json={"reward": 0.5, "components": {"a": 1.0}}).raise_for_status()
    shared.http.put(path, json={"reward": 0.25, "turn": 1}).raise_for_status()
    return talk


def test_turns_failures_and_rollbacks_stand_in_their_places(shared: Stand, walked: Talk) -> None:
    found = get(shared, walked.id)
    events = walked.events()
    assert (found["seq"], found["last_seq"], found["state"]) == (len(events), len(events), "idle")
    assert found["metadata"] == {"task": "<b>one</b>"}
    assert (found["config"]["group_id"], found["config"]["attempt"], found["config"]["matcher"]) == (
        "ui",
        3,
        "tolerant",
    )
    assert found["reward"] == {"reward": 0.5, "components": {"a": 1.0}}
    assert found["turn_rewards"] == {"1": {"reward": 0.25, "components": {}}}
    assert found["problems"] == []
    committed = {event["turn"]: event for event in events if event["type"] == "TurnCommitted"}
    assert [turn["turn"] for turn in found["turns"]] == [1, 2, 4]
    assert [turn["live"] for turn in found["turns"]] == [True, False, True]
    opened = {event["seq"]: event for event in events if event["type"] == "TurnOpened"}
    for turn in found["turns"]:
        event = committed[turn["turn"]]
        assert turn["prompt_tokens"] == turn["base_tokens"] + event["suffix_tokens"]
        for name in ("seq", "fence", "engine", "suffix_tokens", "output_tokens", "weight_versions", "finish_reason"):
            assert turn[name] == event[name], name
        assert turn["opened_at"] == opened[event["fence"]]["at"] <= turn["committed_at"] == event["at"]
        assert turn["timing"] is not None
        assert turn["timing"]["engine"] > 0
    [rollback] = [event for event in events if event["type"] == "RolledBack"]
    assert found["turns"][1]["discarded_by"] == rollback["seq"]
    assert found["rollbacks"] == [{"seq": rollback["seq"], "at": rollback["at"], "to_turn": 1, "discarded": [2]}]
    [failed] = found["failed_turns"]
    assert (failed["kind"], failed["reason"], failed["turn"]) == ("rejected", "upstream_invalid", 3)
    kept = shared.http.get(f"/sessions/{walked.id}/rejected/{failed['fence']}")
    assert len(kept.content) == failed["kept_bytes"]


def test_every_moment_of_the_past_is_what_it_was(shared: Stand, walked: Talk) -> None:
    """As of each event, the view knows nothing of what came later."""
    events = walked.events()
    for seq, event in enumerate(events, 1):
        found = get(shared, walked.id, seq=seq)
        past = events[:seq]
        assert (found["seq"], found["last_seq"]) == (seq, len(events))
        committed = [one["turn"] for one in past if one["type"] == "TurnCommitted"]
        assert [turn["turn"] for turn in found["turns"]] == committed
        assert len(found["failed_turns"]) == sum(one["type"] == "TurnRejected" for one in past)
        assert len(found["rollbacks"]) == sum(one["type"] == "RolledBack" for one in past)
        assert bool(found["open_turns"]) == (event["type"] in ("TurnOpened", "AffinityBound", "RolledBack"))
        assert (found["reward"] is None) == all(one["type"] != "RewardAssigned" for one in past)
    assert error_of(shared.http.get(f"/ui/api/sessions/{walked.id}", params={"seq": len(events) + 1})) == (
        400,
        "invalid_request",
    )


def test_the_actions_and_messages_of_turns(shared: Stand, walked: Talk) -> None:
    """Of discarded turns too; a long message is cut until all of it is asked for."""
    found = get(shared, f"{walked.id}/actions")
    assert [one["turn"] for one in found] == [1, 2, 4]
    assert [one["results"] for one in found] == [
        [{"role": "user", "text": text, "failed": False}] for text in ("One", "Two", "Other")
    ]
    assert found[1]["actions"][0]["tool"] == WEATHER["function"]["name"]
    assert [one["turn"] for one in get(shared, f"{walked.id}/actions", start=2, limit=2)] == [2]
    assert [one["turn"] for one in get(shared, f"{walked.id}/turns")] == [1, 2, 4]
    [own] = get(shared, f"{walked.id}/turns", start=3, limit=2)
    assert [one["message"] for one in own["messages"]] == walked.messages[-2:]
    assert [one["sampled"] for one in own["messages"]] == [False, True]
    assert get(shared, f"{walked.id}/find", text="otHER") == {"turns": [4], "brought": []}

    talk = shared.talk()
    talk.say("Go", sim={"calls": [{"name": "bash", "arguments": {"command": "x"}}]})
    failed = {
        "role": "tool",
        "tool_call_id": talk.messages[-1]["tool_calls"][0]["id"],
        "content": "Exit code 127\nx: command not found",
    }
    talk.add(failed, user("ü" * 100_000), sim={"tool_calls": False})
    talk.say("and more" * 200_000, sim={"tool_calls": False})
    talk.say("on", sim={"tool_calls": False})
    assert get(shared, f"{talk.id}/find", text="not found") == {"turns": [], "brought": [2]}
    assert [one["failed"] for one in get(shared, f"{talk.id}/actions")] == [0, 1, 0, 0]
    [_, second, *_] = get(shared, f"{talk.id}/turns")
    [result, cut, _] = second["messages"]
    assert (result["failed"], cut["failed"]) == (True, False)
    assert len(get(shared, f"{talk.id}/turns", start=2)) == 3
    [only] = get(shared, f"{talk.id}/turns", start=2, whole=True)
    _, whole, _ = only["messages"]
    assert (cut["cut"], cut["message"]["content"], cut["bytes"]) == (True, "ü" * 4000, whole["bytes"])
    assert (whole["cut"], whole["message"]["content"]) == (False, "ü" * 100_000)
    for path in ("actions", "find?text=x", "turns"):
        assert error_of(shared.http.get(f"/ui/api/sessions/nobody/{path}")) == (404, "session_not_found")


def test_prompts_are_text_by_the_pages_own_tokenizer(sglang: SimulatorProcess, places: Places) -> None:
    """And are sent as messages all the same."""
    place = places.new("tokenizer")
    place.folder.mkdir(parents=True, exist_ok=True)
    words = {f"w{number} ": number for number in range(10_000)}
    Tokenizer(WordLevel(words, "w0 ")).save(str(place.folder / "tokenizer.json"))
    environment = {"TURNLOG_PAGE_TOKENIZER": str(place.folder)}
    with serving(place, sglang.base_url, environment=environment) as stand:
        talk = stand.talk()
        talk.say("One")
        found = get(stand, f"{talk.id}/tokens")
        assert found["tokenizer"]
        assert found["texts"] == [f"w{token[1]} " for token in found["tokens"]]
        assert "sent_ids" not in talk.committed()[0]


def test_tokens_are_those_of_the_export(shared: Stand, walked: Talk) -> None:
    [row] = walked.rows()
    found = get(shared, f"{walked.id}/tokens")
    assert found["total"] == len(row["tokens"])
    assert [token[0] for token in found["tokens"]] == list(range(found["total"]))
    for place, name in enumerate(("tokens", "sampled_mask", "loss_mask"), 1):
        assert [token[place] for token in found["tokens"]] == row[name]
    assert [token[4] or 0.0 for token in found["tokens"]] == row["logprobs"]
    versions = [-1 if token[6] < 0 else int(found["versions"][token[6]]) for token in found["tokens"]]
    assert versions == row["weight_versions"]
    assert found["versions"] == ["7", "8"]
    by_place = {token[0]: token[7] for token in found["tokens"]}
    for turn in found["turns"]:
        assert {by_place[at] for at in range(turn["start"], turn["end"])} == {turn["turn"]}
    assert [turn["turn"] for turn in found["turns"]] == [1, 4]
    assert found["boundaries"][0] == {"at": row["prompt_length"], "version": "7"}
    assert [one["version"] for one in found["boundaries"]] == ["7", "8"]
    assert found["branch"] == row["branch"] == 2
    own = {"branch": 2, "cause": "fork", "tokens": found["total"], "prompt_tokens": row["prompt_length"]}
    assert [one for one in found["branches"] if one["exported"]] == [{**own, "exported": True}]
    page = get(shared, f"{walked.id}/tokens", start=5, limit=20)
    assert page["tokens"] == found["tokens"][5:25]
    assert page["texts"] == found["texts"][5:25]
    sampled = get(shared, f"{walked.id}/tokens", start=5, limit=10**4, sampled=True)["tokens"]
    assert sampled == [token for token in found["tokens"] if token[0] >= 5 and token[2]]
    assert get(shared, f"{walked.id}/tokens", start=10**9)["tokens"] == []


def test_a_branch_is_shown_by_its_number(stand: Stand) -> None:
    talk = stand.talk(history="tree")
    talk.say("One")
    first = list(talk.messages)
    talk.say("Two")
    dropped = list(talk.messages)
    for _ in range(2):
        talk.messages = list(first)
        talk.say("Else")
    talk.say("On")
    found = get(stand, talk.id)
    told = talk.tree()
    assert [branch.pop("title") for branch in told["branches"]] == ["One", "Else", "Else"]
    assert [branch.pop("title") for branch in found["tree"]["branches"]] == [None] * 3
    assert found["tree"] == told
    assert [branch["reason"] for branch in found["tree"]["branches"]] == [None, "superseded", None]
    assert get(stand, talk.id, seq=found["turns"][0]["seq"])["tree"] is None
    assert [one["message"] for one in get(stand, f"{talk.id}/conversation", branch=0)["messages"]] == dropped
    assert get(stand, f"{talk.id}/conversation", branch=2) == get(stand, f"{talk.id}/conversation", turn=5)
    tokens = {branch: get(stand, f"{talk.id}/tokens", branch=branch) for branch in range(3)}
    for page in tokens.values():
        assert [(one["branch"], one["exported"]) for one in page["branches"]] == [(0, True), (1, False), (2, True)]
    for row in talk.rows():
        page = tokens[row["branch"]]["tokens"]
        assert [[token[place] for token in page] for place in (1, 3)] == [row["tokens"], row["loss_mask"]]
    assert any(token[2] for token in tokens[1]["tokens"])
    assert not any(token[3] for token in tokens[1]["tokens"])
    for view in ("conversation", "tokens"):
        missing = stand.http.get(f"/ui/api/sessions/{talk.id}/{view}", params={"branch": 7})
        assert error_of(missing) == (404, "not_found")


def test_what_is_damaged_is_named_and_the_rest_is_shown(stand: Stand) -> None:
    talk = stand.talk(metadata={"a": 1})
    for text in ("One", "Two", "Three"):
        talk.say(text)
    last = talk.events()[-1]["seq"]
    where = f"session_id = '{talk.id}'"
    change(stand.url, f"UPDATE turns SET exchange = tokens, tokens = exchange WHERE {where} AND turn = 2")
    change(stand.url, f"UPDATE blobs SET data = :junk WHERE {where} AND number = 0", junk=b"junk")
    said = get(stand, f"{talk.id}/conversation")
    assert [one["message"] is None for one in said["messages"]] == [False, False, True, True, False, False]
    assert [bool(one.get("error")) for one in said["messages"]] == [False, False, True, True, False, False]
    assert get(stand, f"{talk.id}/tokens")["error"]
    assert [one["part"] for one in get(stand, talk.id)["problems"]] == ["metadata"]
    change(stand.url, f"UPDATE events SET data = :junk WHERE {where} AND seq = {last}", junk=b"{junk")
    found = get(stand, talk.id)
    assert (found["seq"], found["last_seq"]) == (last - 1, last)
    assert [one["part"] for one in found["problems"]] == ["log", "metadata"]
    assert [turn["turn"] for turn in found["turns"]] == [1, 2]
    change(stand.url, f"UPDATE events SET data = :junk WHERE {where} AND seq = 1", junk=b"{junk")
    assert error_of(stand.http.get(f"/ui/api/sessions/{talk.id}")) == (500, "session_unreadable")


def test_the_outline_of_a_row(stand: Stand) -> None:
    """Scales and the least likely tokens are those of the whole row, however little of it is asked for."""
    talk = stand.talk()
    talk.say("One", max_tokens=40, top_logprobs=4)
    talk.say("Two", max_tokens=30)
    talk.column(2, "advantage", [number / 8 for number in range(30)])
    [row] = talk.rows(top_k=4, columns="advantage")
    page = get(stand, f"{talk.id}/tokens", start=0, limit=3, sampled=True, outline=True)
    assert [len(page[name]) for name in ("tokens", "texts")] == [3, 3]
    found = page["outline"]
    assert found["sampled"] == 70
    assert found["shares"] == [{"reason": "trained", "at": None, "tokens": 70, "turns": [1, 2]}]
    scales = {scale["name"]: scale for scale in found["scales"]}
    assert {name: sum(scale["counts"]) for name, scale in scales.items()} == {
        "logprob": 70,
        "entropy": 40,
        "advantage": 30,
    }
    sampled = [at for at, there in enumerate(row["sampled_mask"]) if there]
    assert scales["logprob"]["counts"][-1] == sum(row["logprobs"][at] >= math.log(0.9) for at in sampled)
    assert scales["advantage"]["counts"] == [5, 4, 4, 4, 4, 4, 5]
    assert [one["at"] for one in found["least"]] == sorted(sampled, key=lambda at: row["logprobs"][at])[:30]
    whole = get(stand, f"{talk.id}/tokens")
    for one in found["least"]:
        texts = [text or "" for text in whole["texts"]]
        around = (one["before"], one["text"], one["after"])
        at = one["at"]
        assert around == ("".join(texts[max(0, at - 12) : at]), texts[at], "".join(texts[at + 1 : at + 7]))
        assert (one["turn"], one["id"]) == (whole["tokens"][at][7], row["tokens"][at])
    for at, told in ((token[0], token[5]) for token in whole["tokens"]):
        logprobs = [one for one in row["top_logprobs"][at] if one > -9999]
        rest = max(1 - sum(map(math.exp, logprobs)), 1e-12)
        expected = -sum(math.exp(one) * one for one in logprobs) - rest * math.log(rest)
        assert told == (pytest.approx(expected, abs=1e-4) if logprobs else None)
