"""What a 200 tells that is no valid reply: an engine's own error, or a content in parts of text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tables import rows

from app.upstream.odd_replies import failure_in, with_text


@pytest.mark.parametrize(("body", "status", "told"), rows("odd_replies_errors"))
def test_an_error_in_a_200_is_the_engines_own(body: Any, status: int, told: Any) -> None:
    failure = failure_in(json.dumps(body).encode())
    assert failure is not None
    assert (failure.status, json.loads(failure.body)) == (status, told)


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"finish_reason":"error"}]}',
        b'{"choices":[{"finish_reason":"stop","error":{"code":500}}]}',
        b'{"error":null}',
        b'{"error":{"code":1e999}}',
        b"[]",
        b"",
        b"[" * 5000,
        b'{"error":"\xff"}',
    ],
)
def test_other_replies_tell_none(body: bytes) -> None:
    assert failure_in(body) is None


def reply(**message: Any) -> bytes:
    return json.dumps({"id": 1e3, "choices": [{"message": {"role": "assistant", **message}, "x": [1]}]}).encode()


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("message", "mended"),
    [
        ({"content": [TEXT, TEXT]}, {"content": "aa"}),
        ({"content": [THOUGHT, TEXT]}, {"content": "a", "reasoning_content": "hm"}),
        ({"content": [THOUGHT, TEXT], "reasoning": "own"}, {"content": "a", "reasoning": "own"}),
        ({"content": [], "tool_calls": [{"id": "x"}]}, {"content": "", "tool_calls": [{"id": "x"}]}),
    ],
)
def test_parts_of_text_become_text_and_all_else_stays(message: Any, mended: Any) -> None:
    found = with_text(reply(**message))
    assert found is not None
    assert json.loads(found) == json.loads(reply(**mended))
    assert b'"id":1000.0' in found


@pytest.mark.parametrize("content", [None, "a", 5, [{"type": "image_url"}], [{"type": "text"}], ["a"], [TEXT, [TEXT]]])
def test_other_contents_are_left_to_the_rules(content: Any) -> None:
    assert with_text(reply(content=content)) is None
