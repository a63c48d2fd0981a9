"""Every rule of what makes a 200 malformed, for both shapes of reply."""

from __future__ import annotations

import json
from array import array
from typing import Any

import pytest
from helpers.replies import GONE, Reply, Text, encode, sglang, spoiled, vllm

from workers.parse import Parsed, Rejected, Span, parse_reply

CHOICE = ("choices", 0)
META = (*CHOICE, "meta_info")
TRIPLES = (*META, "output_token_logprobs")
CONTENT = (*CHOICE, "logprobs", "content")
MESSAGE = (*CHOICE, "message")

BOTH: list[tuple[tuple[Any, ...], Any]] = [
    (("choices",), GONE),
    (("choices",), None),
    (("choices",), {}),
    (("choices",), []),
    (("choices",), [sglang()["choices"][0]] * 2),
    (("choices",), ["x"]),
    (MESSAGE, GONE),
    (MESSAGE, None),
    (MESSAGE, "hello"),
    (MESSAGE, []),
    ((*MESSAGE, "content"), 5),
    ((*MESSAGE, "content"), True),
    ((*MESSAGE, "content"), ["hello"]),
    ((*MESSAGE, "content"), {"text": "hello"}),
    ((*MESSAGE, "content"), None),
    ((*MESSAGE, "content"), GONE),
    ((*MESSAGE, "role"), "user"),
    ((*MESSAGE, "role"), None),
    ((*MESSAGE, "tool_calls"), "x"),
    ((*MESSAGE, "tool_calls"), ["x"]),
    ((*MESSAGE, "content"), Text(b'"\xff"')),
    ((*MESSAGE, "content"), Text(b'"\\ud800')),
    ((*CHOICE, "finish_reason"), 3),
    ((*CHOICE, "extra"), Text(b"[" * 101 + b"]" * 101)),
    ((*CHOICE, "extra"), Text(b'{"a":' * 101 + b"1" + b"}" * 101)),
    ((*CHOICE, "extra"), Text(b"[" * 200_000 + b"]" * 200_000)),
]

IDS: list[Any] = [
    -1,
    2**31,
    2**64,
    1.5,
    True,
    "4",
    None,
    [],
    Text(b"1e2"),
    Text(b"4.0"),
]
LOGPROBS: list[Any] = [
    True,
    "x",
    None,
    [],
    -9999,
    -9999.0,
    -10000.5,
    Text(b"NaN"),
    Text(b"Infinity"),
    Text(b"-Infinity"),
    Text(b"1e999"),
    Text(b"-1e999"),
    3.5,
    0.00011,
]
OTHERS: list[Any] = ["x", {}, 4, [], [4], [4, 6], [5, 4], [4, 5, 5], [4.0, 5], [4, None]]
"""No copy of the output, which is 4 and 5, nor of the prompt: 1, 2, 3."""
COUNTS: list[Any] = [GONE, None, True, "2", 2.0, 1, 3, -2, [2]]

SGLANG: list[tuple[tuple[Any, ...], Any]] = [
    *BOTH,
    (META, GONE),
    (META, None),
    (META, []),
    (META, "x"),
    (TRIPLES, GONE),
    (TRIPLES, None),
    (TRIPLES, {}),
    (TRIPLES, "x"),
    (TRIPLES, []),
    (TRIPLES, [[-0.25, 4, None]]),
    (TRIPLES, [[-0.25, 4, None]] * 3),
    *(((*TRIPLES, 1), entry) for entry in (None, 4, "x", {}, [], [-0.25])),
    *(((*TRIPLES, 1, 1), token) for token in IDS),
    *(((*TRIPLES, 1, 0), value) for value in LOGPROBS),
    *(((*META, "completion_tokens"), count) for count in COUNTS),
    *(((*CHOICE, "prompt_token_ids"), ids) for ids in (GONE, None, "x", {}, 3)),
    *(((*CHOICE, "prompt_token_ids", 1), token) for token in IDS),
    *(((*CHOICE, name), ids) for name in ("response_token_ids", "token_ids") for ids in OTHERS),
    *((("prompt_token_ids",), ids) for ids in [*OTHERS, [1, 2], [1, 2, 4], Text(b"[1,2,true]")]),
    *(((*META, "prompt_token_ids"), ids) for ids in (*OTHERS, [1, 2], [1, 2, 4])),
    ((*META, "weight_version"), True),
    ((*META, "weight_version"), 1.5),
    ((*META, "weight_versions"), [{"version": "1", "start": 0, "end": 1}]),
    ((*META, "weight_versions"), [{"version": "1", "start": 1, "end": 2}]),
    ((*META, "weight_versions"), [{"version": "1", "start": 0, "end": 3}]),
    ((*META, "weight_versions"), "x"),
]
VLLM: list[tuple[tuple[Any, ...], Any]] = [
    *BOTH,
    *(((*CHOICE, "token_ids"), ids) for ids in (None, "x", {}, [], [4], [4, 5, 6])),
    *(((*CHOICE, "token_ids", 1), token) for token in IDS),
    *(((*CHOICE, "logprobs"), value) for value in (GONE, None, [], "x", {})),
    *((CONTENT, value) for value in (None, [], "x", [{"logprob": -1.0}], [{"logprob": -1.0}] * 3)),
    *(((*CONTENT, 1), entry) for entry in (None, 4, [], {}, [-0.25, 4])),
    *(((*CONTENT, 1, "logprob"), value) for value in LOGPROBS),
    *((("usage", "completion_tokens"), count) for count in COUNTS),
    (("usage",), GONE),
    (("usage",), None),
    *(((*CHOICE, "response_token_ids"), ids) for ids in OTHERS),
    *(((*CHOICE, "prompt_token_ids"), ids) for ids in (*OTHERS, [1, 2], [1, 2, 4])),
    *((("prompt_token_ids",), ids) for ids in (None, "x", {}, 3)),
    *((("prompt_token_ids", 1), token) for token in IDS),
]


def rows(table: list[tuple[tuple[Any, ...], Any]]) -> list[Any]:
    return [
        pytest.param(path, to, id=f"{number}-{'.'.join(map(str, path))}={'gone' if to is GONE else repr(to)[:30]}")
        for number, (path, to) in enumerate(table)
    ]


@pytest.mark.parametrize(("path", "to"), rows(SGLANG))
@pytest.mark.parametrize("dialect", ["sglang", "auto"])
def test_malformed_sglang(path: tuple[Any, ...], to: Any, dialect: Any) -> None:
    with pytest.raises(Rejected) as raised:
        parse_reply(spoiled(sglang(), *path, to=to), dialect)
    assert len(str(raised.value)) < 300, "names the rule and the place, not the content"


@pytest.mark.parametrize(("path", "to"), rows(VLLM))
@pytest.mark.parametrize("dialect", ["vllm", "auto"])
def test_malformed_vllm(path: tuple[Any, ...], to: Any, dialect: Any) -> None:
    with pytest.raises(Rejected):
        parse_reply(spoiled(vllm(), *path, to=to), dialect)


@pytest.mark.parametrize(
    "body",
    [b"", b"x", b"{", b"null", b"[]", b'"x"', b"3", b"\xff\xfe", b"{} {}", b'{"choices": [}', b"\xef\xbb\xbf{}"],
)
@pytest.mark.parametrize("dialect", ["sglang", "vllm", "auto"])
def test_not_an_object_of_json(body: bytes, dialect: Any) -> None:
    with pytest.raises(Rejected):
        parse_reply(body, dialect)


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_body_of_the_other_engine_is_refused_where_the_dialect_is_fixed(dialect: Any) -> None:
    with pytest.raises(Rejected):
        parse_reply(encode(vllm() if dialect == "sglang" else sglang()), dialect)


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("spacing", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("key", ["completion_tokens", "weight_version", "id", "new"])
def test_duplicate_keys_in_meta_info(place: str, spacing: tuple[str, str], key: str) -> None:
    reply = sglang()
    meta = reply["choices"][0]["meta_info"]
    pair = f'"{key}"{spacing[1]}{json.dumps(meta.get(key, 1))}'
    text = json.dumps(meta, separators=spacing)
    twice = f"{pair}{spacing[0]}" if place == "first" else ""
    again = f"{spacing[0]}{pair}" if place == "last" or key == "new" else ""
    more = f"{spacing[0]}{pair}" if key == "new" and place == "last" else ""
    raw = "{" + twice + text[1:-1] + again + more + "}"
    with pytest.raises(Rejected, match="duplicate"):
        parse_reply(spoiled(reply, *META, to=Text(raw.encode())), "sglang")


def test_an_escaped_duplicate_is_a_duplicate() -> None:
    raw = json.dumps(sglang()["choices"][0]["meta_info"], separators=(",", ":"))
    raw = raw[:-1] + ',"completion\\u005ftokens":2}'
    with pytest.raises(Rejected, match="duplicate"):
        parse_reply(spoiled(sglang(), *META, to=Text(raw.encode())), "sglang")


def test_duplicates_of_long_and_short_spelling_do_not_cancel_out() -> None:
    """Keys that stand twice with other lengths, whitespace that fills the difference."""
    raw = b'{"completion_tokens":2,"output_token_logprobs":[[-1,4],[-1,5]],"a":1, "a":1}'
    with pytest.raises(Rejected, match="duplicate"):
        parse_reply(spoiled(sglang(), *META, to=Text(raw)), "sglang")


def sound(dialect: str, reply: Reply) -> Parsed:
    parsed = parse_reply(encode(reply), "auto")
    assert parsed.dialect == dialect
    assert parse_reply(encode(reply), dialect) == parsed  # type: ignore[arg-type]
    return parsed


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_a_sound_reply(dialect: str) -> None:
    make = sglang if dialect == "sglang" else vllm
    parsed = sound(dialect, make([1, 2**31 - 1], [0, 9, 8], [-0.1, 0.0, -9998.5]))
    assert array("i", parsed.suffix_ids).tolist() == [1, 2**31 - 1]
    assert array("i", parsed.output_ids).tolist() == [0, 9, 8]
    assert array("d", parsed.logprobs).tolist() == [-0.1, 0.0, -9998.5]
    assert json.loads(parsed.message) == {"role": "assistant", "content": "hello"}
    assert json.loads(parsed.prompt_text) == [1, 2**31 - 1]
    assert parsed.finish_reason == "stop"


@pytest.mark.parametrize(
    "entry", [[-1, 4], [-1.5, 4, "text"], [-1, 4, None, {"more": [1]}], [0, 4, None], [Text(b"-1E-3"), 4]]
)
def test_entries_of_two_items_or_more(entry: list[Any]) -> None:
    reply = sglang(output=[4])
    raw = b"[" + b",".join(item.raw if isinstance(item, Text) else json.dumps(item).encode() for item in entry) + b"]"
    parsed = parse_reply(spoiled(reply, *TRIPLES, to=Text(b"[" + raw + b"]")), "auto")
    assert array("i", parsed.output_ids).tolist() == [4]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": {}}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
        {"role": "assistant", "tool_calls": [{"id": "c"}]},
        {"role": "assistant", "content": "x", "tool_calls": None, "reasoning_content": None},
    ],
)
@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_messages_that_are_fine(message: dict[str, Any], dialect: str) -> None:
    reply = sglang() if dialect == "sglang" else vllm()
    reply["choices"][0]["message"] = message
    assert json.loads(sound(dialect, reply).message) == message


@pytest.mark.parametrize("dialect", ["sglang", "vllm"])
def test_no_output_tokens_and_no_content(dialect: str) -> None:
    reply = sglang(output=[]) if dialect == "sglang" else vllm(output=[])
    reply["choices"][0]["message"] = {"role": "assistant", "content": None}
    parsed = sound(dialect, reply)
    assert parsed.output_ids == parsed.logprobs == b""
    assert parsed.weight_versions == []


def test_nesting_up_to_the_limit_is_fine() -> None:
    """The value sits in the root, the list of choices and the choice: 97 levels are left of 100."""
    deep = Text(b"[" * 97 + b"]" * 97)
    assert parse_reply(spoiled(sglang(), *CHOICE, "extra", to=deep), "auto").dialect == "sglang"
    deeper = Text(b"[" * 98 + b"]" * 98)
    with pytest.raises(Rejected, match="deeper"):
        parse_reply(spoiled(sglang(), *CHOICE, "extra", to=deeper), "auto")


@pytest.mark.parametrize("where", [(*TRIPLES, 0, 2), (*CHOICE, "hidden")])
def test_nesting_inside_bulk_counts_too(where: tuple[Any, ...]) -> None:
    with pytest.raises(Rejected, match="deeper"):
        parse_reply(spoiled(sglang(), *where, to=Text(b"[" * 150 + b"]" * 150)), "auto")


@pytest.mark.parametrize(
    ("meta", "root", "spans"),
    [
        ({"weight_version": "7"}, {}, [Span("7", 0, 2)]),
        ({"weight_version": "default"}, {}, [Span("default", 0, 2)]),
        ({"weight_version": 7}, {}, [Span("7", 0, 2)]),
        ({}, {"metadata": {"weight_version": "9"}}, [Span("9", 0, 2)]),
        ({}, {}, [Span("unknown", 0, 2)]),
        (
            {
                "weight_version": "7",
                "weight_versions": [
                    {"version": "1", "start": 0, "end": 1},
                    {"version": "2", "start": 1, "end": 2},
                ],
            },
            {},
            [Span("1", 0, 1), Span("2", 1, 2)],
        ),
        ({"weight_version": "7", "weight_versions": None}, {}, [Span("7", 0, 2)]),
    ],
)
def test_weight_versions(meta: dict[str, Any], root: dict[str, Any], spans: list[Span]) -> None:
    reply = {**sglang(), **root}
    del reply["choices"][0]["meta_info"]["weight_version"]
    reply["choices"][0]["meta_info"].update(meta)
    assert sound("sglang", reply).weight_versions == spans


@pytest.mark.parametrize("reason", ["stop", "length", "tool_calls", "abort", None])
def test_finish_reason(reason: str | None) -> None:
    reply = sglang()
    reply["choices"][0]["finish_reason"] = reason
    assert sound("sglang", reply).finish_reason == reason


def test_finish_reason_of_meta_info_where_the_choice_has_none() -> None:
    reply = sglang()
    reply["choices"][0]["finish_reason"] = None
    reply["choices"][0]["meta_info"]["finish_reason"] = {"type": "abort", "message": "x"}
    assert sound("sglang", reply).finish_reason == "abort"


def test_errors_hold_no_content() -> None:
    reply = sglang()
    reply["choices"][0]["message"]["content"] = {"secret": "canary-in-content"}
    with pytest.raises(Rejected) as raised:
        parse_reply(encode(reply), "auto")
    assert "canary" not in str(raised.value)
