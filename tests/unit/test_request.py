"""A chat request's body: split, judged, and left as it was spelled."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.domain.request import OURS, hash_body, join_object, parse_chat
from app.errors import InvalidRequest, Unsupported

DEEP = "[" * 150 + "]" * 150


def test_what_is_ours_is_taken_out_and_the_rest_stays_raw() -> None:
    ours = b'"stream":true,"n":1,"stream_options":{},"rid":"x"'
    body = b'{"model":"m","temperature":0.70,' + ours + b',"tools":[ 1 ],"messages":[ {"a": 1} ,2]}'
    request = parse_chat(body)
    assert [bytes(raw) for raw in request.messages] == [b'{"a": 1}', b"2"]
    assert request.tools is not None
    assert bytes(request.tools) == b"[ 1 ]"
    assert {name: bytes(raw) for name, raw in request.params.items()} == {"model": b'"m"', "temperature": b"0.70"}
    assert request.stream
    assert request.body_hash == hash_body(body) != hash_body(body + b" ")


@pytest.mark.parametrize("tools", ["", '"tools": null,'])
def test_no_tools_and_no_stream(tools: str) -> None:
    request = parse_chat(b"{" + tools.encode() + b'"stream":null,"n":null,"messages":[1]}')
    assert (request.tools, request.stream, request.params) == (None, False, {})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"{",
        b"{}{}",
        b"\xff",
        b'{"messages":[1],"a":"\xff"}',
        b"{}",
        b'{"messages":null}',
        b'{"messages":{}}',
        b'{"messages":"x"}',
        b'{"messages":[]}',
        b'{"messages":[1],"stream":1}',
        b'{"messages":[1],"stream":"true"}',
        b'{"messages":[1],"n":0}',
        b'{"messages":[1],"n":-1}',
        b'{"messages":[1],"n":true}',
        b'{"messages":[1],"n":"1"}',
        b'{"messages":[1],"n":1.0}',
        b'{"messages":[1],"n":1e999}',
        b'{"messages":[1],"stream":1e999}',
        b'{"messages":[1],"n":' + b"9" * 5000 + b"}",
        b'{"messages":[1],"n":NaN}',
        f'{{"messages":[1],"tools":{DEEP}}}'.encode(),
        f'{{"messages":[1],"extra":{DEEP}}}'.encode(),
        f'{{"messages":[1],"n":{DEEP}}}'.encode(),
        b'{"a":' * 100_000,
        b'{"messages":[1],"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(body)
    assert not isinstance(caught.value, Unsupported)


def test_more_choices_are_unsupported() -> None:
    with pytest.raises(Unsupported):
        parse_chat(b'{"messages":[1],"n":2}')


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=30) | st.from_regex(rb'\{"(n|stream|messages|tools)":[\[\]{}"0-9a-z,.]{0,8}\}', fullmatch=True)
)
def test_nothing_but_invalid_request(body: bytes) -> None:
    try:
        request = parse_chat(body)
    except InvalidRequest:
        return
    assert request.messages
    assert not OURS & set(request.params)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=3), max_size=4))
def test_joined_fields_are_the_object(fields: dict[str, object]) -> None:
    assert json.loads(join_object({name: json.dumps(value).encode() for name, value in fields.items()})) == fields
