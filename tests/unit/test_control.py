"""What a request says of its session's engine, and what of it goes on to the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tables import rows

from app.domain.control import SessionControl, session_named
from app.domain.request import ChatRequest, CompletionRequest
from app.errors import InvalidRequest
from app.protocols.chat import parse_chat
from app.protocols.completions import parse_completion


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode())


def controlled(**control: Any) -> SessionControl | None:
    return chat(nvext={"session_control": {"session_id": "c", **control}}).control


def test_a_request_without_control_is_untouched() -> None:
    assert chat().control is None
    request = chat(nvext={"priority": 3, "annotations": ["a"]})
    assert request.control is None
    assert bytes(request.params["nvext"]) == b'{"priority": 3, "annotations": ["a"]}'


def test_the_control_is_taken_out_and_the_rest_stays_in_its_place() -> None:
    request = chat(model="m", nvext={"a": 1, "session_control": {"session_id": "c"}, "b": [2]}, top_p=1)
    assert request.control == SessionControl("c")
    assert list(request.params) == ["model", "nvext", "top_p"]
    assert json.loads(bytes(request.params["nvext"])) == {"a": 1, "b": [2]}


@pytest.mark.parametrize("control", [{"session_id": "c"}, None])
def test_extensions_that_hold_nothing_else_are_not_sent(control: Any) -> None:
    assert "nvext" not in chat(nvext={"session_control": control}).params


def test_parameters_do_not_change_with_the_control() -> None:
    turns = [
        chat(top_p=1, nvext={"session_control": {"session_id": "c", "action": action}}) for action in ("open", "close")
    ]
    assert turns[0].params == turns[1].params == chat(top_p=1).params
    assert turns[0].control != turns[1].control


def test_a_completion_may_have_one_too() -> None:
    body = {"prompt": "Once", "nvext": {"session_control": {"session_id": "c", "action": "bind"}}}
    request: CompletionRequest = parse_completion(json.dumps(body).encode())
    assert request.control == SessionControl("c", "bind")
    assert request.params == {}


@pytest.mark.parametrize("action", ["open", "close", "bind", None])
def test_actions(action: Any) -> None:
    assert controlled(action=action) == SessionControl("c", action)


@pytest.mark.parametrize("timeout", [1, 1.5, 300, 604800])
def test_timeouts_are_seconds(timeout: float) -> None:
    assert controlled(timeout=timeout) == SessionControl("c", None, timeout)


@pytest.mark.parametrize(("control", "place"), rows("control_refused"))
def test_a_bad_shape_is_refused_and_the_field_named(control: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(nvext={"session_control": control})
    assert str(refused.value).startswith(place)


@pytest.mark.parametrize("raw", [b"1e999", b"NaN", b"1e5000"])
def test_numbers_that_are_none_are_refused(raw: bytes) -> None:
    body = (
        b'{"messages":[{"role":"user","content":"x"}],"nvext":{"session_control":{"session_id":"c","timeout":%b}}}'
        % raw
    )
    with pytest.raises(InvalidRequest):
        parse_chat(body)


@pytest.mark.parametrize("nvext", [None, 7, [], "session_control"])
def test_extensions_of_another_kind_are_the_engines_to_judge(nvext: Any) -> None:
    request = chat(nvext=nvext)
    assert request.control is None
    assert json.loads(bytes(request.params["nvext"])) == nvext


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"nvext":{"session_control":{"session_id":"c"}}}', "c"),
        (b'{"nvext":{"session_control":null}}', None),
        (b'{"nvext":{}}', None),
        (b'{"messages":[]}', None),
        (b"[]", None),
        (b"{", None),
        (b"\xff", None),
    ],
)
def test_the_session_that_a_control_names(body: bytes, name: str | None) -> None:
    assert session_named(body) == name
