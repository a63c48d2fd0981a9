"""Completions: a prompt as text or ids, recorded as turns of the same log."""

from __future__ import annotations

import json
from typing import Any

import pytest

from integration.stand import Stand, error_of, user
from integration.tito import text_of
from integration.writing import Writing


def test_a_text_is_continued(every: Stand) -> None:
    writing = Writing(every)
    for text in ("Once upon a time", " and then", " until"):
        writing.write(text)
    committed = writing.committed()
    assert [event["protocol"] for event in committed] == ["completions"] * 3
    assert [event["parent"] for event in committed] == [0, 1, 2]
    assert [event.get("segment_cause") for event in committed] == [None] * 3
    assert [body["prompt"] for body in writing.asked()] == [
        record["request"]["prompt"] for record in writing.state()["records"]
    ]
    assert "RolledBack" not in writing.types()


def test_ids_are_continued_exactly(every: Stand) -> None:
    writing = Writing(every)
    for ids in ([5, 6, 7], [8], [9, 10]):
        writing.add_ids(*ids)
    [row] = writing.rows()
    assert row["tokens"] == writing.ids == writing.state()["metadata"]["accumulated_token_ids"]
    assert [event["suffix_tokens"] for event in writing.committed()] == [3, 1, 2]
    assert sum(row["loss_mask"]) == sum(event["output_tokens"] for event in writing.committed())
    assert [body["prompt"] for body in writing.asked()] == [
        record["request"]["prompt"] for record in writing.state()["records"]
    ]
    assert len([blob for event in writing.committed() for blob in event.get("new_blobs", ())]) == 1


def test_an_export_row_holds_text_as_messages_and_the_engines_tokens(every: Stand) -> None:
    writing = Writing(every)
    one = writing.write("Once", max_tokens=4)
    [row] = writing.rows()
    choice = one.json()["choices"][0]
    assert row["tokens"] == choice["prompt_token_ids"] + choice["token_ids"]
    assert text_of(row["tokens"]).startswith("Once")
    assert row["logprobs"][-len(choice["token_ids"]) :] == choice["logprobs"]["token_logprobs"]
    assert row["messages"] == [user("Once"), {"role": "assistant", "content": choice["text"]}]
    assert (row["status"], row["turns"][0]["finish_reason"]) == ("truncated", "length")


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_the_same_prompt_again_is_a_retry_of_its_turn(every: Stand, kind: str) -> None:
    writing = Writing(every)
    step = writing.write if kind == "text" else writing.add_ids
    parts: list[Any] = ["One", " two"] if kind == "text" else [5, 6]
    step(parts[0])
    before = writing.text if kind == "text" else writing.ids
    step(parts[1])
    prompt = before + parts[1] if kind == "text" else [*before, parts[1]]  # type: ignore[operator, misc]
    response = writing.ask(prompt)
    assert (response.status_code, response.headers["x-turnlog-turn"]) == (200, "3")
    assert writing.types()[-2:] == ["RolledBack", "TurnCommitted"]
    assert [record["turn"] for record in writing.state()["records"]] == [1, 3]
    rows = writing.rows()
    assert rows[-1]["turns"][-1]["turn"] == 3


def test_chat_and_completion_do_not_continue_each_other(stand: Stand) -> None:
    writing, other, segmented = Writing(stand), Writing(stand), Writing(stand, on_divergence="segment")
    for one in (writing, segmented):
        one.say("Hello")
    assert error_of(writing.ask("Hello")) == (400, "history_mismatch")
    writing.say("On")
    other.write("Once")
    assert error_of(other.chat([user("Once")])) == (400, "history_mismatch")
    assert segmented.ask("Hello").status_code == 200
    assert segmented.chat([user("Hello again")]).status_code == 200
    assert [row["segment_cause"] for row in segmented.rows()] == [None, "divergence", "divergence"]
    chat, completions = "/v1/chat/completions", "/v1/completions"
    assert [record["path"] for record in segmented.state()["records"]] == [chat, completions, chat]


def test_what_is_no_completion_is_400_and_never_reaches_the_engine(stand: Stand) -> None:
    writing = Writing(stand)
    prompts: tuple[Any, ...] = (None, [], [-1], [True], [1, "a"], [[[1]]], {}, 5)
    invalid = (
        *({"prompt": prompt} for prompt in prompts),
        {"echo": "yes"},
        {"stream": "yes"},
        {"stream_mode": "later"},
    )
    unsupported = ({"n": 2}, {"best_of": 2}, {"echo": True}, {"prompt": ["a", "b"]}, {"prompt": [[1], [2]]})
    for code, every in (("invalid_request", invalid), ("unsupported", unsupported)):
        for fields in every:
            assert error_of(writing.ask(**{"prompt": "Once", **fields})) == (400, code), fields
    assert (writing.asked(), writing.types()) == ([], ["SessionCreated"])


@pytest.mark.parametrize("depth", [3, 90, 700])
def test_a_prompt_nested_deep_is_400(stand: Stand, depth: int) -> None:
    writing = Writing(stand)
    body = '{"prompt":' + "[" * depth + "1" + "]" * depth + "}"
    assert error_of(stand.http.post(writing.url, content=body))[0] == 400


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_another_prompt_than_was_sent_is_told_where_ids_were_sent(every: Stand, kind: str) -> None:
    writing = Writing(every)
    response = writing.ask("Once upon" if kind == "text" else [5, 6, 7], sim={"fault": "other_prompt"})
    if kind == "text":
        assert response.status_code == 200
        return
    assert error_of(response) == (500, "token_prefix_mismatch")
    assert writing.committed() == []
    assert writing.ask([5, 6, 7]).status_code == 200


def test_missing_prompt_ids_are_502_for_text_and_none_for_ids(every: Stand) -> None:
    writing = Writing(every)
    assert error_of(writing.ask("Once", sim={"fault": "missing_prompt_ids"})) == (502, "upstream_invalid")
    writing.add_ids(5, 6, 7, sim={"fault": "missing_prompt_ids"})
    assert writing.state()["metadata"]["accumulated_token_ids"] == writing.ids


def test_a_text_whose_tokens_drift_begins_a_segment_or_is_refused(stand: Stand) -> None:
    for policy in ("segment", "reject"):
        writing = Writing(stand, on_drift=policy)
        writing.write("Once", sim={"text": "quart"}, max_tokens=40)
        writing.text = writing.text.removesuffix("<|im_end|>")
        response = writing.ask(writing.text + "ers of it")
        if policy == "segment":
            assert response.status_code == 200
            assert [row["segment_cause"] for row in writing.rows()] == [None, "drift"]
            continue
        assert error_of(response) == (500, "token_prefix_mismatch")
        assert len(writing.committed()) == 1


def test_a_key_of_a_chat_with_the_same_body_is_no_retry_of_it(stand: Stand) -> None:
    talk = Writing(stand)
    body = json.dumps({"messages": [user("x")], "prompt": "x"})
    headers = {"idempotency-key": "k"}
    chat = stand.http.post(talk.chat_path, content=body, headers=headers)
    assert chat.status_code == 200
    other = stand.http.post(talk.url, content=body, headers=headers)
    assert error_of(other) == (422, "idempotency_mismatch")
    marked = stand.http.post(talk.url, content=body, headers={"x-stainless-retry-count": "1"})
    assert error_of(marked) == (400, "history_mismatch")
