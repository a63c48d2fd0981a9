"""The task of `ops.train`: what an agent says next, and what a rollout is worth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ops.train import task

CALLED, ANSWERED = task.task_of(1, 0), task.task_of(1, 1)
ELSEWHERE = next(city for city in task.CITIES if city != ANSWERED.city)


def call(tool: str, arguments: Any) -> task.Message:
    function = {"name": tool, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "call-1", "type": "function", "function": function}]}


def answer(text: str | None) -> task.Message:
    return {"role": "assistant", "content": text}


def right_call(of: task.Task) -> task.Message:
    return call(of.tool, {"city": of.city})


def test_tasks_are_a_function_of_seed_and_group() -> None:
    tasks = [task.task_of(3, group) for group in range(200)]
    assert tasks == [task.task_of(3, group) for group in range(200)]
    assert tasks != [task.task_of(4, group) for group in range(200)]
    assert {drawn.tool for drawn in tasks} == set(task.NOUNS)
    assert {drawn.city for drawn in tasks} == set(task.CITIES)
    assert [drawn.kind for drawn in tasks[:4]] == ["call", "answer", "call", "answer"]


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        (right_call(CALLED), 1.0),
        (call("another", {"city": CALLED.city}), 0.0),
        (call(CALLED.tool, {"city": "Atlantis"}), 0.0),
        (call(CALLED.tool, {"city": CALLED.city, "days": 2}), 0.0),
        (call(CALLED.tool, '{"city": "Os'), 0.0),
        (answer("I know it"), 0.0),
        (answer(None), 0.0),
    ],
)
def test_a_call(reply: task.Message, reward: float) -> None:
    assert task.advance(CALLED, []) == [CALLED.question]
    assert task.advance(CALLED, [reply]) == reward


@pytest.mark.parametrize(
    ("first", "said", "text", "reward"),
    [
        (right_call(ANSWERED), ANSWERED.result, task.answer_of(ANSWERED.city, ANSWERED.result), 1.0),
        (right_call(ANSWERED), ANSWERED.result, "It is purple", 0.0),
        (right_call(ANSWERED), ANSWERED.result, " ".join(task.WORDS), 0.0),
        (right_call(ANSWERED), ANSWERED.result, None, 0.0),
        (call(ANSWERED.tool, {"city": ELSEWHERE}), "unknown", f"It is {ANSWERED.result}", 0.0),
    ],
)
def test_an_answer(first: task.Message, said: str, text: str | None, reward: float) -> None:
    messages = task.advance(ANSWERED, [first])
    result = {"role": "tool", "tool_call_id": "call-1", "content": said}
    assert messages == [ANSWERED.question, first, result]
    assert task.advance(ANSWERED, [first, answer(text)]) == reward


def test_no_call_ends_the_rollout() -> None:
    assert task.advance(ANSWERED, [answer(ANSWERED.result)]) == 0.0
