"""Every rule that a malformed reply of an engine can break: one table of changes to sound replies, with the message."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import malformed_payloads
import pytest
from helpers.replies import CHATS, COMPLETIONS, DEEP, GONE, SHAPES, Text, body_of, doubled, known_as, sglang

from workers import job
from workers.parse import PromptDiffers, Rejected, token_text
from workers.payloads import PayloadSpec
from workers.reply import Job

ALL, CHAT, COMPLETION = [*SHAPES], [*CHATS], [*COMPLETIONS]
SGLANG, VLLM = ["sglang"], ["vllm"]

CHOICE = "choices.0"
MESSAGE = f"{CHOICE}.message"
META = f"{CHOICE}.meta_info"
TRIPLES = f"{META}.output_token_logprobs"
CONTENT = f"{CHOICE}.logprobs.content"
VALUES = f"{CHOICE}.logprobs.token_logprobs"
PROMPT = f"{CHOICE}.prompt_token_ids"
INVALID = "the body is not valid JSON"
DEPTH = "nests deeper than 100 levels"

Messages = dict[str, list[Any]]
"""By message, the values that a place must not have. An `@` in the message is the place."""


def got(kind: str, at: str = "@", **values: Any) -> Messages:
    """The value of each type is told by that type."""
    return {f"{at}: Expected `{kind}`, got `{name}`": [value] for name, value in values.items()}


ID: Messages = {
    "@: Expected `int` >= 0": [-1],
    "@: Expected `int` <= 2147483647": [2**31, 2**64],
    **got("int", bool=True, str="4", null=None, array=[]),
    "@: Expected `int`, got `float`": [1.5, Text("1e2"), Text("4.0"), Text("7e0")],
    "@: Number out of range": [Text("1e999")],
}
LOGPROB: Messages = {
    **got("float", bool=True, str="x", null=None, array=[]),
    "@: Expected `float` > -9999.0": [-9999, -9999.0, -10000.5],
    "@: Expected `float` <= 0.0001": [3.5, 0.00011],
    "@: Number out of range": [Text("1e999"), Text("-1e999")],
    f"{INVALID}: JSON is malformed: invalid character": [Text("NaN"), Text("Infinity"), Text("-Infinity")],
}
NO_LIST: Messages = got("array", str="x", object={}, int=4)
NO_COPY: list[Any] = [[], [4], [10, 12], [11, 10], [10, 11, 11]]
"""Lists of ids that are neither the output nor the prompt."""
NO_IDS: Messages = {
    **NO_LIST,
    "@[0]: Expected `int`, got `float`": [[10.0, 11]],
    "@[1]: Expected `int`, got `null`": [[10, None]],
    "@[2]: Expected `int`, got `bool`": [Text("[10,11,true]")],
}
NO_COUNT: list[Any] = [GONE, None, True, "2", 2.0, [2]]
BAD_TEXT: Messages = {
    f"{INVALID}: JSON is malformed: unexpected end of ": [Text('"\\ud800"')],
    "not UTF-8": [Text(b'"' + raw + b'"') for raw in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xc0\x80")],
}
BAD_DEPTH: Messages = {DEPTH: [Text(DEEP), Text('{"a":' * 101 + "1" + "}" * 101), Text("[" * 200_000 + "]" * 200_000)]}
BAD_NUMBER: Messages = {
    INVALID: [Text(value) for value in ("1e999", "-1e999", "NaN", "9" * 5000, f"[1e999, {DEEP}]")],
}


def spans(*bounds: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"version": "1", "start": start, "end": end} for start, end in bounds]


def counts(other: str) -> Messages:
    told: Messages = {f"@ is {n}, but {other} has 2 entries": [n] for n in (1, 3, -2)}
    return {"@ must be an integer": NO_COUNT, "@ is not valid JSON": [Text("9" * 5000)], **told}


def entries(message: str, value: Any, counts: Sequence[int] = (0, 1, 3)) -> Messages:
    """Lists of so many of the value, `#` of them."""
    return {message.replace("#", str(n)): [[value] * n] for n in counts}


def another_than(place: str) -> Messages:
    return {**NO_IDS, f"@ differs from {place}": [*NO_COPY, [1, 2], [1, 2, 4]]}


COVERED = "must cover the 2 output tokens in order"
PLACES: list[tuple[list[str], str, Messages]] = [
    # What holds the rest.
    (ALL, "choices", {"the body: Object missing required field `choices`": [GONE]}),
    (ALL, "choices", got("array", "the body.choices", null=None, object={})),
    (ALL, "choices", {"the body.choices[0]: Expected `object`, got `str`": [["x"]]}),
    (ALL, "choices", {"choices must hold one choice, not 0": [[]], "choices must hold one choice, not 2": [[{}, {}]]}),
    (ALL, f"{CHOICE}.finish_reason", {"@ must be a string": [3], "@ is error: the generation failed": ["error"]}),
    # The message and the text.
    (CHAT, MESSAGE, {"@ is missing": [GONE], "@ must be an object": [None, "hello", []]}),
    (CHAT, f"{MESSAGE}.content", {"@ must be a string": [5, True, ["hello"], {"text": "canary"}]}),
    (CHAT, f"{MESSAGE}.content", {f"{MESSAGE} has no content, no tool calls and no reasoning_content": [None, GONE]}),
    (CHAT, f"{MESSAGE}.content", BAD_TEXT),
    (CHAT, f"{MESSAGE}.role", {"@ must be assistant": ["user", None]}),
    (CHAT, f"{MESSAGE}.tool_calls", {"@ must be a list of objects": ["x", ["x"]]}),
    (COMPLETION, f"{CHOICE}.text", {"@ is missing": [GONE], "@ must be a string": [None, 5, True, [], {}], **BAD_TEXT}),
    # What is not read must be readable all the same.
    *((ALL, at, BAD_TEXT) for at in ("id", f"{CHOICE}.finish_reason")),
    *((ALL, at, {**BAD_NUMBER, **BAD_DEPTH}) for at in ("extra", "created", f"{CHOICE}.extra", "usage.extra")),
    (ALL, f"{CHOICE}.extra", {DEPTH: [Text("[" * 98 + "]" * 98)]}),
    (CHAT, f"{MESSAGE}.extra", {**BAD_NUMBER, **BAD_DEPTH}),
    (ALL, "metadata", BAD_DEPTH),
    *((SGLANG, at, {DEPTH: [Text(DEEP)]}) for at in (f"{META}.extra", f"{TRIPLES}.0.2")),
    *((VLLM, at, {DEPTH: [Text(DEEP)]}) for at in (f"{CONTENT}.0.top_logprobs", f"{CONTENT}.1.bytes")),
    (COMPLETION, f"{CHOICE}.logprobs.top_logprobs", {DEPTH: [Text(DEEP)]}),
    (CHAT, "usage", {INVALID: [Text('{"completion_tokens":2,"\\ud800":1}')]}),
    # SGLang's output tokens.
    (SGLANG, META, {"@ is missing": [GONE], "@ must be an object": [None, [], "x"]}),
    (SGLANG, TRIPLES, {"@ is missing": [GONE], **got("array", null=None, object={}, str="x")}),
    (SGLANG, f"{TRIPLES}.1", got("array", null=None, int=4, str="x", object={})),
    (SGLANG, f"{TRIPLES}.1", entries("@: Expected `array` of at least length 2, got #", -0.25, (0, 1))),
    (SGLANG, f"{TRIPLES}.1.1", ID),
    (SGLANG, f"{TRIPLES}.1.0", LOGPROB),
    (SGLANG, TRIPLES, entries(f"{META}.completion_tokens is 2, but output_token_logprobs has # entries", [-1, 4])),
    (SGLANG, f"{META}.completion_tokens", counts("output_token_logprobs")),
    # The other engines' output tokens.
    ([*VLLM, *COMPLETION], f"{CHOICE}.token_ids", got("array", null=None, str="x", object={})),
    (COMPLETION, f"{CHOICE}.token_ids", {"@ is missing": [GONE]}),
    ([*VLLM, *COMPLETION], f"{CHOICE}.token_ids.1", ID),
    ([*VLLM, *COMPLETION], f"{CHOICE}.logprobs", {"@ is missing": [GONE], "@ must be an object": [None, [], "x"]}),
    ([*VLLM, *COMPLETION], "usage.completion_tokens", counts("token_ids")),
    ([*VLLM, *COMPLETION], "usage", {"@.completion_tokens must be an integer": [GONE, None]}),
    (VLLM, f"{CHOICE}.logprobs", {"@.content is missing": [{}]}),
    (VLLM, CONTENT, got("array", null=None, str="x")),
    (VLLM, CONTENT, entries("@ has # entries for 2 output token ids", {"logprob": -1.0})),
    (VLLM, f"{CONTENT}.1", got("object", null=None, int=4, array=[])),
    (VLLM, f"{CONTENT}.1", {"@: Object missing required field `logprob`": [{}]}),
    (VLLM, f"{CONTENT}.1.logprob", LOGPROB),
    (VLLM, f"{CHOICE}.token_ids", entries(f"{CONTENT} has 2 entries for # output token ids", 4)),
    (COMPLETION, f"{CHOICE}.logprobs", {"@.token_logprobs is missing": [{}]}),
    (COMPLETION, VALUES, {"@ is missing": [GONE], **got("array", null=None, object={})}),
    (COMPLETION, VALUES, entries("@ has # entries for 2 token ids", -1.0)),
    (COMPLETION, f"{VALUES}.1", LOGPROB),
    (COMPLETION, f"{CHOICE}.token_ids", entries(f"{VALUES} has 2 entries for # token ids", 4)),
    # The prompt.
    ([*SGLANG, *COMPLETION], PROMPT, {"@ is missing": [GONE], **got("array", null=None, str="x", object={}, int=3)}),
    ([*SGLANG, *COMPLETION], f"{PROMPT}.1", {**ID, f"{PROMPT} holds a negative zero": [Text("-0")]}),
    (VLLM, "prompt_token_ids", got("array", null=None, str="x", object={}, int=3)),
    (VLLM, "prompt_token_ids.1", {**ID, "prompt_token_ids holds a negative zero": [Text("-0")]}),
    # What stands twice must be the same.
    (ALL, f"{CHOICE}.response_token_ids", {**NO_IDS, "@ is not the 2 ids of the output": NO_COPY}),
    (SGLANG, f"{CHOICE}.token_ids", {**NO_IDS, "@ is not the 2 ids of the output": NO_COPY}),
    ([*SGLANG, *COMPLETION], "prompt_token_ids", another_than(PROMPT)),
    (SGLANG, f"{META}.prompt_token_ids", another_than(PROMPT)),
    (VLLM, PROMPT, another_than("prompt_token_ids")),
    # Weight versions.
    (SGLANG, f"{META}.weight_version", {"weight_version must be a string": [True, 1.5]}),
    (SGLANG, f"{META}.weight_version", {"weight_version is too long": ["v" * 5000]}),
    (COMPLETION, "metadata", {"weight_version must be a string": [{"weight_version": True}, {"weight_version": 1.5}]}),
    (COMPLETION, "metadata", {f"@.weight_versions {COVERED}": [{"weight_versions": spans((0, 1))}]}),
    *(
        (shapes, at, {**got("array", str="x"), f"@ {COVERED}": [spans(one) for one in ((0, 1), (1, 2), (0, 3))]})
        for shapes, at in ((SGLANG, f"{META}.weight_versions"), ([*VLLM, *COMPLETION], f"{CHOICE}.weight_versions"))
    ),
]


class Row(NamedTuple):
    """A malformed body, how the service asked for it, and why it is refused."""

    name: str
    shape: str
    body: bytes
    message: str
    payload_specs: Sequence[PayloadSpec] = ()
    known: list[int] | None = None
    sent: Sequence[int] = ()


def told(path: str) -> str:
    """A path as messages spell it."""
    return re.sub(r"(choices|prompt_token_ids)\S*", lambda found: re.sub(r"\.(\d+)", r"[\1]", found[0]), path)


def of_places() -> Iterator[Row]:
    for shapes, path, messages in PLACES:
        for shape, (message, values) in itertools.product(shapes, messages.items()):
            for value in values:
                name = f"{path}={'gone' if value is GONE else repr(value)}"
                yield Row(name, shape, body_of(shape, {path: value}), told(message.replace("@", path)))


def of_bodies() -> Iterator[Row]:
    bodies = {
        f"{INVALID}: Input data was truncated": [b"", b"{"],
        f"{INVALID}: JSON is malformed: ": [b"x", b'{"choices": [}', b"\xef\xbb\xbf{}"],
        "not UTF-8 at byte 0": [b"\xff", b"\xff\xfe"],
    }
    for kind, body in (("null", b"null"), ("array", b"[]"), ("str", b'"x"'), ("int", b"3")):
        bodies[f"the body: Expected `object`, got `{kind}`"] = [body]
    for shape in ALL:
        yield from (Row(repr(body), shape, body, message) for message, some in bodies.items() for body in some)
        for body in (b"{}", b"{} {}"):
            yield Row(repr(body), shape, body, "the body: Object missing required field `choices`")
    of_another = {
        "sglang": (body_of("vllm"), "choices[0].meta_info is missing"),
        "vllm": (body_of("sglang"), "choices[0].token_ids is missing"),
    }
    for shape, (body, message) in of_another.items():
        yield Row("of the other engine", f"{shape} only", body, message)
    for shape in COMPLETION:
        yield Row("a completion as a chat", "vllm", body_of(shape), "choices[0].logprobs.content is missing")
        message = body_of(shape, {f"{CHOICE}.text": GONE, MESSAGE: {"role": "assistant"}})
        yield Row("a chat as a completion", shape, message, "choices[0].text is missing")


DIFFERENT = "@ has duplicate keys with different values"
TWICE: list[tuple[list[str], str, str, list[str], str]] = [
    # The object, its key, the values before or behind its own, the message (or: that before|that behind).
    (CHAT, "", "choices", ["[]"], f"{DIFFERENT}|choices must hold one choice, not 0"),
    (ALL, "", "model", ['"n"'], DIFFERENT),
    (ALL, "", "created", ["1.0", "true"], DIFFERENT),
    (CHAT, "", "usage", ['{"completion_tokens":2,"prompt_tokens":4}'], DIFFERENT),
    (CHAT, CHOICE, "index", ['"0"'], DIFFERENT),
    (CHAT, CHOICE, "message", ['{"role":"assistant","content":"other"}'], DIFFERENT),
    (CHAT, CHOICE, "finish_reason", ['"length"'], DIFFERENT),
    (CHAT, "usage", "prompt_tokens", ["4"], DIFFERENT),
    (CHAT, MESSAGE, "content", ['"other"'], DIFFERENT),
    (SGLANG, META, "completion_tokens", ["2"], "@ has duplicate keys"),
    (SGLANG, META, "weight_version", ['"12"'], "@ has duplicate keys"),
    (SGLANG, META, "id", ['"r1"'], "@ has duplicate keys"),
    (SGLANG, META, "prompt_tokens", ["3"], "@ has duplicate keys"),
    (VLLM, f"{CHOICE}.logprobs", "content", ["[]"], "@ has duplicate keys"),
    (COMPLETION, f"{CHOICE}.logprobs", "token_logprobs", ["[-1,-1]"], "@ has duplicate keys"),
    (COMPLETION, f"{CHOICE}.logprobs", "tokens", ["[-1,-1]"], "@ has duplicate keys"),
    (COMPLETION, CHOICE, "token_ids", ["[4,5]"], DIFFERENT),
    (COMPLETION, CHOICE, "text", ['"x"'], DIFFERENT),
]


def of_doubles() -> Iterator[Row]:
    for shapes, path, key, values, message in TWICE:
        for shape, value, first in itertools.product(shapes, values, (True, False)):
            for separators, escape in itertools.product([(",", ":"), (", ", ": "), (" ,\n", " :\t")], (False, True)):
                name = f'"\\u{ord(key[0]):04x}{key[1:]}"' if escape else f'"{key}"'
                body = doubled(shape, path, (name, value), first, separators)
                before, _, behind = message.replace("@", told(path) or "the reply").partition("|")
                yield Row(f"twice {path}.{key}={value}", shape, body, before if first else behind or before)
    new = body_of(
        "sglang", {META: Text('{"completion_tokens":2,"output_token_logprobs":[[-1,4],[-1,5]],"a":1, "a":1}')}
    )
    yield Row("a new key twice, of other lengths", "sglang", new, "choices[0].meta_info has duplicate keys")
    for shape in COMPLETION:
        new = body_of(shape, {f"{CHOICE}.logprobs": Text('{"token_logprobs":[-1,-1],"new":1,"new":2}')})
        yield Row("a new key twice", shape, new, "choices[0].logprobs has duplicate keys")
    long = sglang([1, 2, 3] * 100)
    for value in ([1, 2, 3] * 100 + [4], [7, 2, 3] * 100):
        for first in (True, False):
            body = doubled(long, CHOICE, ('"prompt_token_ids"', json.dumps(value)), first, (", ", ": "))
            yield Row("long lists of ids", "sglang", body, "choices[0] has duplicate keys with different values")


def of_prompts() -> Iterator[Row]:
    """A prompt that was sent as ids, or whose beginning is known."""
    for shape in ALL:
        at = "prompt_token_ids" if shape == "vllm" else PROMPT
        where, ids = told(at), [1, 2, 3]
        for message, values in {**NO_LIST, **{m.replace("@", "@[2]"): v for m, v in ID.items()}}.items():
            for value in values:
                change = {at: value} if message in NO_LIST else {f"{at}.2": value}
                yield Row(f"sent, {at}={value!r}", shape, body_of(shape, change), message.replace("@", where), sent=ids)
                if message not in NO_LIST:
                    behind = message.replace("@[2]", f"{where}[0]")
                    yield Row(f"known, {at}={value!r}", shape, body_of(shape, change), behind, known=[1, 2])
        zero = body_of(shape, {at: Text("[0,-0]")})
        yield Row("sent, negative zero", shape, zero, f"{where} holds a negative zero", sent=[0, 0])
        yield Row("sent, deep", shape, body_of(shape, {"extra": Text(DEEP)}), DEPTH, sent=ids)
        yield Row("sent, empty", shape, b"{}", "the body: Object missing required field `choices`", sent=ids)
        for kind, count in (("null", None), ("str", "3"), ("float", 3.5), ("bool", True)):
            own = [{f"{META}.prompt_tokens": GONE}] if shape == "sglang" else []
            body = body_of(shape, {at: GONE, "usage.prompt_tokens": count}, *own)
            missing, wrong = f"{where} is missing, and so is the number", f"prompt_tokens: Expected `int`, got `{kind}`"
            message = missing if count is None else wrong
            yield Row(f"sent, prompt_tokens={count!r}", shape, body, message, sent=ids)
    for shape in CHAT:
        body = body_of(shape, {MESSAGE: GONE})
        yield Row("sent, no message", shape, body, "choices[0].message is missing", sent=[1, 2, 3])


def of_payloads() -> Iterator[Row]:
    for name, body, message, payload_specs in malformed_payloads.bodies():
        yield Row(name, "vllm" if b'"meta_info"' not in body else "sglang", body, message, payload_specs)


ROWS = [*of_places(), *of_bodies(), *of_doubles(), *of_prompts(), *of_payloads()]


@pytest.mark.parametrize("shape", sorted({row.shape for row in ROWS}))
def test_a_malformed_reply_is_refused_with_a_message(shape: str) -> None:
    for row in ROWS:
        if row.shape == shape:
            try:
                refused(row)
            except BaseException as error:
                error.add_note(f"in the row {row.name!r}")
                raise


def refused(row: Row) -> None:
    kind, _, rest = row.shape.partition(" ")
    protocol: Any = "completions" if rest == "completion" else "chat"
    known = None if row.known is None else known_as(row.known)
    for dialect in (kind,) if rest == "only" else ("auto", kind):
        asked = Job(dialect, known, list(row.payload_specs), [], [], 200, "", b"", protocol, token_text(row.sent))  # type: ignore[arg-type]
        with pytest.raises(Rejected) as refusal:
            job.work(asked, memoryview(row.body))
        message = str(refusal.value)
        assert message.startswith(row.message), message
        assert not isinstance(refusal.value, PromptDiffers)
        assert len(message) < 300, "names the rule and the place, not the content"
        assert "canary" not in message
