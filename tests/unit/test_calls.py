"""Ids and arguments of calls as clients and engines can take them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from app.domain.calls import given_ids, is_object, lenient_object, sampled_calls, sendable

PROOF = "3_" + "ab" * 12
HISTORY = [msgspec.Raw(b'{"role":"assistant","tool_calls":[{"id":"call_0"}]}')]


def message(*calls: tuple[Any, Any]) -> bytes:
    made = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": a}} for call_id, a in calls]
    return json.dumps({"role": "assistant", "content": None, "tool_calls": made}).encode()


@pytest.mark.parametrize(
    ("ids", "in_chat", "elsewhere"),
    [
        (["a", "b"], (), ()),
        (["", "b"], (0,), (0,)),
        ([None, 7, {}], (0, 1, 2), (0, 1, 2)),
        (["a", "a"], (1,), (1,)),
        (["functions.f:0"], (), (0,)),
        (["call_0"], (), (0,)),
        (["call_00"], (), ()),
        ([f"c{number}" for number in range(33)], (), tuple(range(33))),
    ],
)
def test_the_places_of_ids_that_a_client_could_not_use(
    ids: list[Any], in_chat: tuple[int, ...], elsewhere: tuple[int, ...]
) -> None:
    calls = sampled_calls(message(*((call_id, "{}") for call_id in ids)))
    for protocol, places in (("chat", in_chat), ("messages", elsewhere), ("responses", elsewhere)):
        given = given_ids(calls, protocol, lambda: PROOF, HISTORY)
        assert (() if given is None else given.places) == places
        assert all(PROOF in call_id for call_id in ([] if given is None else given.by_place().values()))


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a": 1e3}', None),
        ({"a": 1}, None),
        ('{"cmd": "echo', "{}"),
        ("[1]", "{}"),
        ("null", "{}"),
        ("", "{}"),
        (None, "{}"),
        (5, "{}"),
        ('{"a":"x\ty\n"}', '{"a":"x\\ty\\n"}'),
        ('{"a":1e999,"b":NaN}', '{"a":null,"b":null}'),
        ('{"a":"\\ud800"}', '{"a":"\ufffd"}'),
        ('{"a":' * 9000, "{}"),
    ],
)
def test_an_engine_is_sent_an_object(arguments: Any, sent: str | None) -> None:
    raw = message(("a", arguments), ("b", '{"b": 1.0}'))
    assert is_object(arguments) == (sent is None)
    if sent is None:
        assert sendable(raw) is raw
        return
    assert lenient_object(arguments) == sent
    [mended, kept] = json.loads(sendable(raw))["tool_calls"]
    assert (mended["function"], kept["function"]["arguments"]) == ({"name": "f", "arguments": sent}, '{"b": 1.0}')


@pytest.mark.parametrize("calls", ["null", "5", "[1]", '[{"id":"a"}]', '[{"function":null}]', "[]"])
def test_what_is_no_call_stays(calls: str) -> None:
    raw = b'{"role":"assistant","tool_calls":%b}' % calls.encode()
    assert sendable(raw) == raw
    assert all(call.id in (None, "a") for call in sampled_calls(raw))
