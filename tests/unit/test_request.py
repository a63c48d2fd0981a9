"""A request's body, chat or completion: split, judged, and left as it was spelled."""

from __future__ import annotations

import json

import pytest
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import rows

from app.domain.request import OURS, TokenIds, canonical_hash
from app.errors import InvalidRequest, Unsupported
from app.protocols.chat import parse_chat
from app.protocols.completions import parse_completion

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
        b'{"messages":[1],"lora_path":"a\\u0000"}',
        b'{"messages":[1],"lora_path":"%b"}' % (b"a" * 513),
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


@settings(max_examples=cases(400), deadline=None)
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


def test_ids_are_taken_out_of_the_parameters() -> None:
    request = parse_chat(b'{"messages":[1],"input_ids":[ 1 ,\n2, 3],"top_k":5}')
    assert request.ids == TokenIds(3, b"1,2,3")
    assert set(request.params) == {"top_k"}
    assert parse_chat(b'{"messages":[1],"input_ids":null}').ids is None


BAD_IDS = rows("request_bad_ids")


@pytest.mark.parametrize("ids", BAD_IDS)
def test_what_are_no_ids(ids: str) -> None:
    with pytest.raises(InvalidRequest, match="input_ids must be a list of token ids"):
        parse_chat(f'{{"messages":[1],"input_ids":{ids}}}'.encode())


@pytest.mark.parametrize(
    ("prompt", "text", "ids"),
    [
        ('"a"', "a", None),
        ('""', "", None),
        ('["a"]', "a", None),
        ('[ "a" ]', "a", None),
        ('"\\ud83d\\ude00"', "\U0001f600", None),
        ("[5, 6]", None, TokenIds(2, b"5,6")),
        ("[[5, 6]]", None, TokenIds(2, b"5,6")),
        ("[2147483647]", None, TokenIds(1, b"2147483647")),
    ],
)
def test_a_prompt_is_text_or_ids_alone_or_in_a_list(prompt: str, text: str | None, ids: TokenIds | None) -> None:
    request = parse_completion(f'{{"prompt":{prompt},"n":1,"best_of":1,"echo":false,"rid":"x","top_k":5}}'.encode())
    assert (request.text, request.ids, set(request.params)) == (text, ids, {"top_k"})


@pytest.mark.parametrize(
    "prompt",
    rows("request_no_prompt"),
    ids=lambda prompt: prompt[:20],
)
def test_what_is_no_prompt(prompt: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_completion(f'{{"prompt":{prompt}}}'.encode())
    assert not isinstance(caught.value, Unsupported)


@pytest.mark.parametrize("rest", ['"n":2', '"best_of":2', '"echo":true', '"prompt":["a","b"]', '"prompt":[[1],[2]]'])
def test_a_turn_has_one_prompt_one_choice_and_no_echo(rest: str) -> None:
    with pytest.raises(Unsupported):
        parse_completion(f'{{"prompt":"a",{rest}}}'.encode())


def test_a_body_is_another_request_on_another_route() -> None:
    body = b'{"messages":[1],"prompt":"a"}'
    assert canonical_hash(parse_chat(body), "history") != canonical_hash(parse_completion(body), "history")
    assert canonical_hash(parse_chat(body), "history") == canonical_hash(parse_chat(b" " + body), "history")


SAID = b'{"role":"user","content":""}'


def keys(count: int) -> bytes:
    return b",".join(b'"key%d":1' % number for number in range(count))


def body(**fields: bytes) -> bytes:
    return b'{"messages":[1],' + b",".join(b'"%b":%b' % (k.encode(), v) for k, v in fields.items()) + b"}"


def listed(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


TOO_MUCH = {
    "fields": (b'{"messages":[1],' + keys(1_000_000) + b"}", "the body has more than 1000 fields"),
    "fields that are few": (b'{"messages":[1],' + keys(1000) + b"}", "the body has more than 1000 fields"),
    "tools": (body(tools=listed(b'{"type":"function"}', 500_001)), "tools has more than 500000 entries"),
    "tools that are fewer": (
        body(tools=listed(b'{"type":"function"}', 25_000)),
        "tools has .* values; the limit is 500000",
    ),
    "a tool": (body(tools=b"[{" + keys(100_000) + b"}]"), "tools has .* values; the limit is 500000"),
    "members": (body(x=b"{" + keys(100_000) + b"}"), "x has .* values; the limit is 500000"),
    "a field's entries": (body(stop=listed(b'""', 600_000)), "stop has more than 500000 entries"),
    "messages": (b'{"messages":' + listed(SAID, 65_537) + b"}", "messages has more than 65536 entries"),
    "a message": (
        b'{"messages":[1,{"role":"user","content":' + listed(b"{}", 60_000) + b"},1]}",
        "one of the messages has .* values; the limit is 500000",
    ),
    "all messages": (
        b'{"messages":' + listed(b'{"role":"user","content":' + listed(b"{}", 40_000) + b"}", 12) + b"}",
        "messages has .* values; the limit is 5000000",
    ),
    "control": (body(nvext=b"{" + keys(100_000) + b"}"), "nvext has .* values"),
}


@pytest.mark.threat("request that blocks the event loop")
@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_holds_too_much_is_refused_and_the_limit_is_named(name: str) -> None:
    text, message = TOO_MUCH[name]
    with pytest.raises(InvalidRequest, match=message):
        parse_chat(text)


def test_what_somebody_needs_is_taken() -> None:
    tool = json.dumps({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}).encode()
    assert parse_chat(body(tools=listed(tool, 4000))).tools is not None
    said = b'{"role":"user","content":"' + b"a, b, [c], {d}; " * 20 + b'"}'
    assert len(parse_chat(b'{"messages":' + listed(said, 50_000) + b"}").messages) == 50_000
    assert len(parse_chat(body(allowed_token_ids=listed(b"1", 200_000))).params["allowed_token_ids"]) == 400_001


@pytest.mark.parametrize("spaces", [b"", b" \n"])
def test_millions_of_ids_are_read_in_parts(spaces: bytes) -> None:
    text = b"[" + (b"," + spaces).join([b"%d" % number for number in range(1_000_000)]) + b"]"
    request = parse_completion(b'{"prompt":' + text + b"}")
    assert request.ids == TokenIds(1_000_000, text[1:-1].replace(spaces, b"") if spaces else text[1:-1])
    for bad in (text[:-1] + more + b"]" for more in (b",", b",-1", b",[1]", b',"1"', b",01", b",1.0", b",2147483648")):
        with pytest.raises(InvalidRequest):
            parse_completion(b'{"prompt":' + bad + b"}")
    with pytest.raises(Unsupported):
        parse_completion(b'{"prompt":' + listed(b'""', 100_000) + b"}")
