"""Requests with junk in every place, cut and changed: each is refused, or the rest of the server can use it."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest
from helpers.amounts import cases
from helpers.replies import DEEP, GONE, Text, body_of, paths
from tables import rows

from app.domain.history import RequestHistory
from app.domain.request import ChatRequest, canonical_hash, join_object
from app.errors import InvalidRequest
from app.protocols.registry import PROTOCOLS
from app.protocols.responses.reply import read_echo

WHOLE: dict[str, Any] = dict(rows("protocol_bodies"))

JUNK = [
    *("null", "true", "0", "-1", "1.5", "1e999", "9" * 5000, '""', '"x"', '"\\ud800"', '"\\u0000"', "[]", "{}", "[[]]"),
    *(
        '{"type":"text","text":"a"}',
        '[{"type":"text","text":"a"}]',
        '{"type":5}',
        '{"type":"message"}',
        "[null]",
        "tru",
    ),
    *(
        json.dumps(name)
        for name in ("user", "assistant", "text", "tool_use", "tool_result", "thinking", "image", "tool")
    ),
    *("", DEEP, '{"a":1,"a":2}', '{"INVALID_JSON":"x"}'),
]
BYTES = [b"", b'"', b"{", b"}", b"[", b"]", b",", b"\\", b"\xff", b"\x00", b"1e9", b"1e999", b"null", b"\\ud800"]


def judge(name: str, body: bytes) -> bool:
    """Was it accepted? Then all that the server does with a request can be done."""
    try:
        asked = PROTOCOLS[name].parse(body)
        assert isinstance(asked, ChatRequest)
        incoming = RequestHistory(asked.messages, "tolerant")
        for index in range(len(incoming)):
            incoming.canonical(index)
    except InvalidRequest:
        return False
    canonical_hash(asked, "h")
    roles = [json.loads(bytes(raw))["role"] for raw in asked.messages]
    assert set(roles) <= {"system", "user", "assistant", "tool"}
    assert "system" not in roles[1:]
    json.loads(join_object({name: bytes(raw) for name, raw in asked.params.items()}), parse_int=len)
    assert asked.tools is None or json.loads(bytes(asked.tools), parse_int=len)
    assert json.loads(asked.echo or b"", parse_int=len)
    if name == "responses":
        read_echo(asked.echo)
    assert asked.protocol == name
    return True


@pytest.mark.parametrize("name", WHOLE)
def test_every_place_with_every_junk_value(name: str) -> None:
    whole = WHOLE[name]
    bodies = [body_of(whole, {at: junk}) for at in paths(whole) for junk in (*map(Text, JUNK), GONE)]
    assert judge(name, body_of(whole))
    assert len(bodies) > 2000
    assert 100 < sum(judge(name, body) for body in bodies) < len(bodies) / 2


@pytest.mark.parametrize("name", WHOLE)
def test_random_changes_and_cuts(name: str) -> None:
    whole, places = body_of(WHOLE[name]), paths(WHOLE[name])
    for seed in range(cases(2000)):
        random = Random(seed)
        at, length = random.randrange(len(whole)), random.randrange(5)
        judge(name, whole[:at] + random.choice(BYTES) + whole[at + length :])
        judge(name, whole[:at])
        first, second = random.sample(places, 2)
        if not first.startswith(second) and not second.startswith(first):
            judge(name, body_of(WHOLE[name], {place: Text(random.choice(JUNK)) for place in (first, second)}))
