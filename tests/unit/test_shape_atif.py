"""The format `atif`: what a trajectory holds, and Harbor's own models on it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tables
from hypothesis import given, settings
from shape_rows import TWO_SEGMENTS, TWO_TURNS, Given, conversations, expected, lists, rows

from app.export import jsontext
from app.export.row import Row, Unfit
from app.export.shapes import atif

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def call(name: str, arguments: object, function: str = "add") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": function, "arguments": arguments}}


WITH_TOOLS = [
    Given(
        [1, 2],
        [3, 4],
        [-0.5, -0.25],
        messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}),
        message={
            "role": "assistant",
            "content": None,
            "reasoning_content": "add them",
            "tool_calls": [call("c1", '{"a": 2,\n "b": 12345678901234567890123}'), call("c2", "not json")],
        },
        tools=TOOLS,
        params={"model": "m"},
        finish_reason="tool_calls",
    ),
    Given(
        [5],
        [6],
        [-0.125],
        trimmed=1,
        messages=(
            {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "4"}]},
            {"role": "tool", "tool_call_id": "c1", "content": "four"},
            {"role": "tool", "tool_call_id": "nobody", "content": "lost"},
            {"role": "assistant", "content": "injected"},
            {"role": "user", "content": "So?"},
        ),
        message={"role": "assistant", "content": "4"},
        params={"model": "m"},
    ),
]

PARTS = [
    {"type": "text", "text": "look"},
    {"type": "image_url", "image_url": {"url": "https://example.org/cat.PNG?size=2"}},
    {"type": "image_url", "image_url": {"url": "data:image/jpeg;base64,AA=="}},
    {"type": "input_audio", "input_audio": {"data": "AA==", "format": "mp3"}},
    {"type": "image_url", "image_url": {"url": "https://example.org/cat"}},
    {"type": "video_url", "video_url": {"url": "https://example.org/cat.mp4"}},
]


def trajectory(row: Row) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(jsontext.encode(atif.fields(row)))
    return made


def test_two_turns_with_tools_in_full() -> None:
    found = trajectory(rows(WITH_TOOLS, metadata={"task": 1})[0])
    assert found == tables.shape("atif")
    assert set(found) == set(atif.COLUMNS) - {"notes"}


def test_a_long_session_does_not_repeat_its_prompts() -> None:
    turns = [Given(list(range(600_000)), [1], [-1.0]), Given([7], [8], [-2.0])]
    found = trajectory(rows(turns)[0])
    first, last = [step["metrics"] for step in found["steps"] if "metrics" in step]
    assert "prompt_token_ids" not in first
    assert last["prompt_token_ids"][: first["prompt_tokens"]] == list(range(600_000))
    assert last["prompt_token_ids"][first["prompt_tokens"] :] == [1, 7]
    assert found["notes"] == atif.NOTES


def test_a_later_segment_marks_what_it_copied() -> None:
    first, second = (trajectory(row) for row in rows(TWO_SEGMENTS))
    assert [step.get("is_copied_context") for step in first["steps"]] == [None, None]
    assert [step.get("is_copied_context") for step in second["steps"]] == [True, True, None, None]
    assert ["metrics" in step for step in second["steps"]] == [False, False, False, True]


def test_content_parts() -> None:
    turns = [Given([1], [2], [-1.0], messages=({"role": "user", "content": PARTS},))]
    step = trajectory(rows(turns)[0])["steps"][0]
    assert step["message"] == [
        {"type": "text", "text": "look"},
        {"type": "image", "source": {"media_type": "image/png", "path": "https://example.org/cat.PNG?size=2"}},
        {"type": "image", "source": {"media_type": "image/jpeg", "path": "data:image/jpeg;base64,AA=="}},
        {"type": "audio", "source": {"media_type": "audio/mpeg", "path": "data:audio/mpeg;base64,AA=="}},
    ]
    assert step["extra"]["content_parts"] == PARTS[4:]


def test_content_of_unknown_parts_alone_is_an_empty_text() -> None:
    turns = [Given([1], [2], [-1.0], messages=({"role": "user", "content": PARTS[5:]},))]
    step = trajectory(rows(turns)[0])["steps"][0]
    assert (step["message"], step["extra"]) == ("", {"content_parts": PARTS[5:]})


@pytest.mark.parametrize(
    ("given_call", "made"),
    [
        (call("x", {"a": 1}), {"tool_call_id": "x", "function_name": "add", "arguments": {"a": 1}}),
        (call("x", ""), {"tool_call_id": "x", "function_name": "add", "arguments": {}}),
        (
            call("x", "[1]"),
            {"tool_call_id": "x", "function_name": "add", "arguments": {}, "extra": {"arguments": "[1]"}},
        ),
        (
            {"function": {"name": "add", "arguments": "{}"}},
            {"tool_call_id": "2.0", "function_name": "add", "arguments": {}},
        ),
        (
            {"id": "x", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
            {"tool_call_id": "x", "function_name": "shell", "arguments": {"input": "ls"}},
        ),
    ],
)
def test_tool_calls(given_call: dict[str, Any], made: dict[str, Any]) -> None:
    message = {"role": "assistant", "tool_calls": [given_call]}
    (step,) = trajectory(rows([Given([1], [2], [-1.0], message=message)])[0])["steps"][1:]
    assert step["tool_calls"] == [made]


def test_a_result_goes_to_the_latest_call_of_that_id() -> None:
    again = {"role": "assistant", "tool_calls": [call("c", "{}")]}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    turns = [Given([1], [2], [-1.0], message=again), Given([3], [4], [-1.0], messages=(result,), message=again)]
    turns.append(Given([5], [6], [-1.0], messages=({**result, "content": "s"},)))
    found = [step.get("observation") for step in trajectory(rows(turns)[0])["steps"]]
    assert found[1:3] == [
        {"results": [{"source_call_id": "c", "content": "r"}]},
        {"results": [{"source_call_id": "c", "content": "s"}]},
    ]


def test_a_result_goes_to_its_call_though_another_agent_spoke_since() -> None:
    turns = [Given([1], [2], [-1.0], message={"role": "assistant", "tool_calls": [call("c", "{}")]})]
    spoken = {"role": "assistant", "content": "wait"}
    turns.append(Given([3], [4], [-1.0], messages=(spoken, {"role": "tool", "tool_call_id": "c", "content": "r"})))
    found = [step.get("observation") for step in trajectory(rows(turns)[0])["steps"]]
    assert found == [None, {"results": [{"source_call_id": "c", "content": "r"}]}, None, None]


def test_a_result_before_any_agent_is_the_systems() -> None:
    turns = [Given([1], [2], [-1.0], messages=({"role": "tool", "tool_call_id": "c", "content": "r"},))]
    step = trajectory(rows(turns)[0])["steps"][0]
    assert (step["source"], step["message"]) == ("system", "")
    assert step["observation"] == {"results": [{"content": "r", "extra": {"tool_call_id": "c"}}]}


@pytest.mark.parametrize(
    "message", [{"role": 3}, {"role": "user", "content": 3}, {"role": "user", "content": "\ud800"}]
)
def test_no_chat_message_is_unfit(message: dict[str, object]) -> None:
    with pytest.raises(Unfit, match="a message cannot be read"):
        atif.fields(rows([Given([1], [2], [-1.0], messages=(message,))])[0])


def test_a_model_that_is_no_text_is_no_model() -> None:
    for params in ({"model": 3}, {"model": "\ud800"}, {}):
        found = trajectory(rows([Given([1], [2], [-1.0], params=params)])[0])
        assert "model_name" not in found["agent"]


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_the_ids_of_the_steps_are_the_sample(turns: list[Given]) -> None:
    wanted = expected(turns)
    found = trajectory(rows(turns)[0])
    metrics = [step["metrics"] for step in found["steps"] if "metrics" in step]
    assert len(metrics) == len(turns)
    for given_turn, metric in zip(turns, metrics, strict=True):
        prompt, output = metric["prompt_token_ids"], metric["completion_token_ids"]
        assert metric["prompt_tokens"] == len(prompt)
        assert metric["completion_tokens"] == len(given_turn.output)
        assert output == given_turn.output[: len(output)]
        assert prompt + output == wanted.tokens[: len(prompt + output)]
        assert metric["logprobs"] == given_turn.logprobs[: len(output)]
    assert metrics[-1]["prompt_token_ids"] + metrics[-1]["completion_token_ids"] == wanted.tokens


@pytest.mark.parametrize("module", ["harbor.models.trajectories", "atif"])
def test_the_formats_own_models_read_it(module: str) -> None:
    """Harbor's, and the free-standing ones of the same specification; both forbid unknown fields."""
    models = pytest.importorskip(module, reason=f"{module} is not installed, see CONTRIBUTING.md")
    with_parts = [Given([1], [2], [-1.0], messages=({"role": "user", "content": PARTS},))]
    for turns in (WITH_TOOLS, TWO_TURNS, TWO_SEGMENTS, with_parts):
        for row in rows(turns, metadata={"task": 1}):
            text = jsontext.encode(atif.fields(row))
            read = models.Trajectory.model_validate_json(text)
            assert read.to_json_dict()["steps"] == json.loads(text)["steps"]
    with pytest.raises(ValueError, match="step_id"):
        models.Trajectory.model_validate({**lists(atif.fields(rows(TWO_TURNS)[0])), "steps": [{"step_id": 2}]})
