"""What a reply says twice: copies of ids, counts and keys, which must agree."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from helpers.replies import GONE, Text, encode, sglang, spoiled, vllm

from workers.parse import Rejected, parse_reply

CHOICE = ("choices", 0)
META = (*CHOICE, "meta_info")
TRIPLES = (*META, "output_token_logprobs")
CONTENT = (*CHOICE, "logprobs", "content")
MESSAGE = (*CHOICE, "message")


MISCOUNTS: list[Any] = [2, 4, -3, 0, True, "3", 3.0, [3], {}]


@pytest.mark.parametrize("count", MISCOUNTS)
@pytest.mark.parametrize(
    ("dialect", "path"),
    [
        ("sglang", ("usage", "prompt_tokens")),
        ("sglang", (*META, "prompt_tokens")),
        ("vllm", ("usage", "prompt_tokens")),
    ],
)
def test_a_prompt_that_is_miscounted_is_told(dialect: str, path: tuple[Any, ...], count: Any) -> None:
    """Only who knows the request can say whether it may be: an image's tokens are counted in many ways."""
    reply = sglang() if dialect == "sglang" else vllm()
    told = parse_reply(spoiled(reply, *path, to=count), "auto").miscounted
    assert told is not None
    assert ".".join(map(str, path)).replace("choices.0", "choices[0]") in told
    for silent in (None, GONE):
        assert parse_reply(spoiled(reply, *path, to=silent), "auto").miscounted is None


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
@pytest.mark.parametrize("spelling", [b"[4,5]", b"[4, 5]", b" [ 4 ,5 ]", b"null"])
def test_copies_that_say_the_same(dialect: str, spelling: bytes) -> None:
    reply = sglang() if dialect == "sglang" else vllm()
    prompt = spelling.replace(b"4", b"1, 2").replace(b"5", b"3")
    copied = spoiled(reply, *CHOICE, "response_token_ids", to=Text(spelling))
    assert parse_reply(copied, "auto") == parse_reply(encode(reply), "auto")
    at = ("prompt_token_ids",) if dialect == "sglang" else (*CHOICE, "prompt_token_ids")
    again = parse_reply(spoiled(reply, *at, to=Text(prompt)), "auto")
    assert again == parse_reply(encode(reply), dialect)  # type: ignore[arg-type]
    assert again.miscounted is None


@pytest.mark.parametrize("value", [b"0", b"1e-4", b"0.0001", b"5e-324", b"0.00009999"])
@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_logprob_that_rounding_put_over_zero_is_kept(dialect: str, value: bytes) -> None:
    reply, at = (sglang(), (*TRIPLES, 1, 0)) if dialect == "sglang" else (vllm(), (*CONTENT, 1, "logprob"))
    parsed = parse_reply(spoiled(reply, *at, to=Text(value)), "auto")
    assert array("d", parsed.logprobs)[1] == float(value)


AGAIN = [
    # Where, a key, its value, and whether that says something else: in the reply, its choice, `usage`, the message.
    ((), "choices", b"[]", True),
    ((), "model", b'"m"', False),
    ((), "model", b'"n"', True),
    ((), "created", b"1.0", True),
    ((), "created", b"true", True),
    ((), "usage", b'{"completion_tokens":2 , "prompt_tokens":3}', False),
    ((), "usage", b'{"completion_tokens":2,"prompt_tokens":4}', True),
    (CHOICE, "index", b"0", False),
    (CHOICE, "index", b'"0"', True),
    (CHOICE, "message", b'{"content": "hello","role":"assistant"}', False),
    (CHOICE, "message", b'{"role":"assistant","content":"other"}', True),
    (CHOICE, "finish_reason", b'"length"', True),
    (("usage",), "prompt_tokens", b"3", False),
    (("usage",), "prompt_tokens", b"4", True),
    (MESSAGE, "content", b'"hello"', False),
    (MESSAGE, "content", b'"other"', True),
]


@pytest.mark.parametrize(("path", "key", "value", "differs"), AGAIN)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("spacing", [(",", ":"), (", ", ": "), (" ,\n", " :\t")])
@pytest.mark.parametrize("escape", [False, True])
@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_keys_that_stand_twice(
    dialect: str, path: tuple[Any, ...], key: str, value: bytes, differs: bool, first: bool, spacing: Any, escape: bool
) -> None:
    reply = sglang() if dialect == "sglang" else vllm()
    place: Any = reply
    for step in path:
        place = place[step]
    again = f'"\\u{ord(key[0]):04x}{key[1:]}"' if escape else f'"{key}"'
    marker = f"{again}{spacing[1]}".encode() + value
    pairs = dict(place)
    place.clear()
    place.update({"@": 0, **pairs} if first else {**pairs, "@": 0})
    body = json.dumps(reply, separators=spacing).encode().replace(f'"@"{spacing[1]}0'.encode(), marker)
    assert b'"@"' not in body
    if not differs:
        assert parse_reply(body, "auto").output_ids
        return
    with pytest.raises(Rejected):
        parse_reply(body, "auto")


def test_ids_that_stand_twice() -> None:
    """Long lists are not looked at again where all is well."""
    body = json.dumps(sglang([1, 2, 3] * 100), separators=(",", ":")).encode()
    ids = b'"prompt_token_ids":' + json.dumps([1, 2, 3] * 100, separators=(",", ":")).encode()
    assert parse_reply(body.replace(ids, ids + b"," + ids), "auto") == parse_reply(body, "auto")
    for other in (ids[:-1] + b",4]", ids.replace(b"[1,", b"[7,"), b'"prompt_token_ids":null'):
        for both in (ids + b"," + other, other + b"," + ids):
            with pytest.raises(Rejected):
                parse_reply(body.replace(ids, both), "auto")


def test_logprobs_of_vllm_stand_there_once() -> None:
    body = encode(vllm())
    at = body.index(b'"content": [')
    with pytest.raises(Rejected, match="duplicate"):
        parse_reply(body[:at] + b'"content": [], ' + body[at:], "auto")
