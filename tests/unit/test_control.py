"""What a request says of its session's engine, and what of it goes on to the engine."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tables import rows

from app.domain.control import SessionControl, session_named
from app.domain.request import ChatRequest
from app.errors import InvalidRequest
from app.features.session_control.controls import ControlledTurn
from app.protocols.chat import parse_chat
from app.protocols.completions import parse_completion


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [{"role": "user", "content": "Hello"}], **fields}).encode())


@pytest.mark.parametrize("nvext", [None, 7, [], "session_control", {"priority": 3, "annotations": ["a"]}])
def test_a_request_without_control_is_untouched(nvext: Any) -> None:
    """Extensions of another kind are the engine's to judge."""
    request = chat(nvext=nvext)
    assert request.control is chat().control is None
    assert bytes(request.params["nvext"]) == json.dumps(nvext).encode()


def test_the_control_is_taken_out_and_the_rest_stays_in_its_place() -> None:
    request = chat(model="m", nvext={"a": 1, "session_control": {"session_id": "c"}, "b": [2]}, top_p=1)
    assert request.control == SessionControl("c")
    assert list(request.params) == ["model", "nvext", "top_p"]
    assert json.loads(bytes(request.params["nvext"])) == {"a": 1, "b": [2]}
    for control in ({"session_id": "c", "action": "open"}, {"session_id": "c", "action": "close"}, None):
        assert chat(top_p=1, nvext={"session_control": control}).params == chat(top_p=1).params


def test_a_completion_may_have_one_too() -> None:
    body = {"prompt": "Once", "nvext": {"session_control": {"session_id": "c", "action": "bind"}}}
    request = parse_completion(json.dumps(body).encode())
    assert (request.control, request.params) == (SessionControl("c", "bind"), {})


@pytest.mark.parametrize(
    ("action", "timeout"),
    [*((action, None) for action in ("open", "close", "bind", None)), *((None, s) for s in (1, 1.5, 300, 604800))],
)
def test_actions_and_timeouts(action: Any, timeout: float | None) -> None:
    given = {"session_id": "c", "action": action} | ({} if timeout is None else {"timeout": timeout})
    assert chat(nvext={"session_control": given}).control == SessionControl("c", action, timeout)


@pytest.mark.parametrize(("control", "place"), rows("control_refused"))
def test_a_bad_shape_is_refused_and_the_field_named(control: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        chat(nvext={"session_control": control})
    assert str(refused.value).startswith(place)


@pytest.mark.parametrize("raw", [b"1e999", b"NaN", b"1e5000"])
def test_numbers_that_are_none_are_refused(raw: bytes) -> None:
    said = b'{"messages":[{"role":"user","content":"x"}],"nvext":{"session_control":{"session_id":"c","timeout":%b}}}'
    with pytest.raises(InvalidRequest):
        parse_chat(said % raw)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"nvext":{"session_control":{"session_id":"c"}}}', "c"),
        *((body, None) for body in (b'{"nvext":{"session_control":null}}', b'{"nvext":{}}', b'{"messages":[]}')),
        *((body, None) for body in (b"[]", b"{", b"\xff")),
    ],
)
def test_the_session_that_a_control_names(body: bytes, name: str | None) -> None:
    assert session_named(body) == name


@pytest.mark.anyio
async def test_a_turns_name_is_ended_behind_its_aborts() -> None:
    turn = ControlledTurn(cast(Any, SimpleNamespace(finished=lambda turn: None)), SessionControl("c"), "s", "default")
    aborting = asyncio.create_task(asyncio.Event().wait())
    turn.finish([cast(Any, aborting)])
    waiting = asyncio.create_task(turn.aborted())
    await asyncio.sleep(0)
    assert not waiting.done()
    aborting.cancel()
    await waiting
