"""A reply that its client begins: what is a beginning, and the one message that it is with the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tables import rows

from app.domain.prefill import PARAMS, with_beginning
from app.protocols.chat import parse_chat
from app.protocols.responses import parse as responses
from workers.join_text import whole_message

USER = {"role": "user", "content": "Sun?"}
BEGUN = {"role": "assistant", "content": "It is ("}


def chat(messages: list[Any], **fields: Any) -> Any:
    body = {"model": "m", "messages": messages, "continue_final_message": True, **fields}
    return with_beginning(parse_chat(json.dumps(body).encode()))


@pytest.mark.parametrize(
    ("content", "fields"),
    [
        ("It is (", {}),
        ([{"type": "text", "text": "It is"}, {"type": "text", "text": " ("}], {"add_generation_prompt": False}),
        ("", {"echo": False}),
    ],
)
def test_a_last_message_of_text_alone_begins_the_reply(content: Any, fields: dict[str, Any]) -> None:
    request = chat([USER, {**BEGUN, "content": content, "tool_calls": []}], **fields)
    assert [json.loads(bytes(raw)) for raw in request.messages] == [USER]
    expected = content if isinstance(content, str) else "It is ("
    assert json.loads(request.beginning) == {**BEGUN, "content": expected, "tool_calls": []}
    assert request.refusal is None


@pytest.mark.parametrize(("messages", "fields", "named"), rows("prefill_refused"))
def test_what_cannot_be_continued_is_refused_by_name(messages: list[Any], fields: Any, named: str) -> None:
    request = chat(messages, **fields)
    assert (len(request.messages), request.beginning) == (len(messages), None)
    assert request.refusal.startswith("continue_final_message")
    assert named in request.refusal
    assert not PARAMS.keys() & request.params.keys()


ITEM = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is ("}]}


@pytest.mark.parametrize(
    ("items", "begins"),
    [
        ([USER, {**ITEM, "status": "in_progress"}], True),
        ([USER, {**ITEM, "status": "completed"}], False),
        ([USER, {**ITEM, "status": "in_progress"}, USER], False),
        ([USER, ITEM, {**USER, "status": "in_progress"}], False),
    ],
)
def test_an_item_in_progress_begins_the_reply_if_it_is_the_last(items: list[Any], begins: bool) -> None:
    request = responses.parse_responses(json.dumps({"model": "m", "input": items}).encode())
    assert (request.params.keys() >= PARAMS.keys()) == begins


def test_who_does_not_ask_for_it_gets_none_and_other_items_in_progress_are_refused_by_name() -> None:
    for said in (False, None):
        request = chat([USER, BEGUN], continue_final_message=said)
        assert (len(request.messages), request.beginning, request.refusal) == (2, None, None)
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{", "status": "in_progress"}
    with pytest.raises(Exception, match=r"input\[1\].status in_progress"):
        responses.parse_responses(json.dumps({"model": "m", "input": [USER, call]}).encode())


@pytest.mark.parametrize(
    ("begun", "rest", "whole"),
    [
        ("It is (", {"content": "B)"}, {"content": "It is (B)"}),
        ("It is (", {"content": None, "tool_calls": [{"id": 7}]}, {"content": "It is (", "tool_calls": [{"id": 7}]}),
        ("It is (", {"content": None, "reasoning_content": "B)"}, {"content": "It is (B)"}),
        ("<think>\nI", {"reasoning": " add", "content": "42"}, {"content": "<think>\nI add\n</think>\n\n42"}),
        ("<think>\nI", {"reasoning": " add", "content": None}, {"content": "<think>\nI add"}),
        ("It is (", {"content": "", "x": [1.0]}, {"content": "It is (", "x": [1.0]}),
        ("It is (", {"content": "B)", "reasoning_content": 7}, {"content": "It is (B)"}),
    ],
)
def test_beginning_and_rest_are_one_message_as_the_model_saw_it(begun: str, rest: Any, whole: Any) -> None:
    found = whole_message(json.dumps({**BEGUN, "content": begun}).encode(), json.dumps({**BEGUN, **rest}).encode())
    assert json.loads(found) == {"role": "assistant", **whole}
