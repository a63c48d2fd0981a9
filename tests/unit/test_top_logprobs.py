"""The most likely tokens and the prompt's logprobs: what is read of a reply, what is refused, and how it is stored."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.replies import Changes, Text, body_of
from hypothesis import given
from hypothesis import strategies as st

from workers import codec, job
from workers.codec import CorruptContent, TopLogprobs, TopRows
from workers.parse import Rejected
from workers.reply import Job, Speculative
from workers.top_logprobs import LogprobWish, packed, unpacked

META, LOGPROBS = "choices.0.meta_info", "choices.0.logprobs"
OUT, GIVEN, GIVEN_TOP = (
    f"{META}.{name}" for name in ("output_top_logprobs", "input_token_logprobs", "input_top_logprobs")
)
CHAT_TOP = f"{LOGPROBS}.content.0.top_logprobs"
BY_NAME = f"{LOGPROBS}.top_logprobs"
OF_CHOICE = "choices.0.prompt_logprobs"


def named(*pairs: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"token": f"token_id:{token}", "logprob": logprob, "bytes": None} for token, logprob in pairs]


def by_id(*pairs: tuple[int, float]) -> dict[str, Any]:
    texts = ('"logprob":', "logprob")
    return {str(token): {"logprob": logprob, "rank": 1, "decoded_token": texts[token % 2]} for token, logprob in pairs}


ROWS = [[[-0.25, 10, "a"], [-1.5, 7, "b"]], [[-0.5, 3, None], [-2.0, 9, '"token_id:']]]
"""The second row lacks the sampled token, 11, which is less likely."""

SOUND: dict[str, Changes] = {
    "sglang": {
        OUT: ROWS,
        GIVEN: [[None, 1, None], [-0.5, 2, None], [-3.25, 3, "c"]],
        GIVEN_TOP: [None, [[-0.5, 2, None]], [[-0.125, 8, None], [-3.25, 3, None]]],
    },
    "vllm": {
        CHAT_TOP: named((10, -0.25), (7, -1.5)),
        CHAT_TOP.replace("0.top", "1.top"): named((9, -2.0), (3, -0.5)),
        "prompt_logprobs": [None, by_id((2, -0.5)), by_id((3, -3.25), (8, -0.125))],
    },
    "vllm completion": {
        BY_NAME: [
            {"token_id:10": -0.25, "token_id:7": -1.5},
            {"token_id:11": -4.0, "token_id:3": -0.5, "token_id:9": -2.0},
        ],
        OF_CHOICE: [None, by_id((2, -0.5)), by_id((3, -3.25), (8, -0.125))],
    },
}
WISH = LogprobWish(2, 2)


def read(shape: str, *changes: Changes, wish: LogprobWish | None = WISH) -> TopLogprobs | None:
    protocol: Any = "completions" if shape.endswith("completion") else "chat"
    asked = Job("auto", None, [], [], [], 200, "", b"", protocol, wish=wish)
    done = job.work(asked, memoryview(body_of(shape, *changes)))
    return codec.unpack_tokens(done.tokens, done.exchange).top


@pytest.mark.parametrize("shape", SOUND)
def test_what_is_read(shape: str) -> None:
    found = read(shape, SOUND[shape])
    assert found is not None
    assert found.output is not None
    assert found.prompt is not None
    ids, logprobs = unpacked(found.output)
    assert (ids.tolist(), logprobs.tolist()) == ([[10, 7], [3, 9]], [[-0.25, -1.5], [-0.5, -2.0]])
    assert (ids.dtype, logprobs.dtype) == (np.int32, np.float32)
    ids, logprobs = unpacked(found.prompt)
    assert (ids.tolist(), logprobs.tolist()) == ([[2, -1], [8, 3]], [[-0.5, -9999.0], [-0.125, -3.25]])
    assert np.frombuffer(found.prompt_logprobs, "<f4").tolist() == [-0.5, -3.25]
    assert read(shape, SOUND[shape], wish=None) is None


def test_what_an_engine_need_not_have() -> None:
    gone = {OUT: [None, [[None, 4, None], [-9999.0, 5, None], [-1, 6, None]]]}
    found = read("sglang", gone, {GIVEN: []}, wish=LogprobWish(3, 0))
    assert found is not None
    assert found.output is not None
    assert (unpacked(found.output)[0].tolist(), found.prompt_logprobs) == ([[-1], [6]], b"")
    assert read("sglang", {OUT: [[], None]}) is None
    assert read("sglang completion") is None
    assert read(
        "sglang", {OUT: ROWS, GIVEN: [[None, 2, None], [-1.0, 3, None]]}, wish=LogprobWish(0, 0)
    ) == TopLogprobs(prompt_logprobs=np.array([-1.0], "<f4").tobytes())


NAMES = ("3", "token_id:", "token_id:-1", "token_id:03", "token_id:2147483648", "token_id:²", "token_id:99999999999")


def first(*triples: Any) -> list[Any]:
    return [list(triples), None]


Broken = tuple[str, Changes]
"""The message, and what is changed."""

OF_SGLANG: list[Broken] = [
    ("Expected `array`, got `null`", {OUT: None}),
    ("Expected `array`, got `object`", {OUT: {}}),
    ("has 1 entries for 2 tokens", {OUT: ROWS[:1]}),
    ("has a token twice", {OUT: first([-1, 2, None], [-1, 2, None])}),
    ("3 tokens at one place, 2 were requested", {OUT: first([-1, 1], [-1, 2], [-1, 3])}),
    ("Expected `int` >= 0", {OUT: first([-1, -2, None])}),
    ("Expected `int` <= 2147483647", {OUT: first([-1, 2**31, None])}),
    ("Expected `int`, got `bool`", {OUT: first([-1, True, None])}),
    ("Expected `float` <= 0.0001", {OUT: first([0.5, 1, None])}),
    ("Number out of range", {OUT: Text("[[[1e999, 1, null]], null]")}),
    ("not valid JSON", {OUT: Text("[[[NaN, 1, null]], null]")}),
    ("`float | null`, got `bool`", {OUT: first([True, 1, None])}),
    ("Expected `array` of at least length 2", {OUT: first([-1])}),
    ("has 4 entries for 3 prompt tokens", {GIVEN: [[-1, 1, None]] * 4}),
    ("other ids", {GIVEN: [[-1, 2, None], [-1, 4, None]]}),
    ("a null after", {GIVEN: [[-1, 2, None], [None, 3, None]]}),
    ("Expected `float` > -9999.0", {GIVEN: [[-9999, 3, None]]}),
    ("has 2 entries for 1 tokens", {GIVEN: [[-1, 3, None]], GIVEN_TOP: [None, None]}),
]
OF_VLLM: list[Broken] = [
    *(("names a token", {CHAT_TOP: [{"token": name, "logprob": -1}]}) for name in NAMES),
    ("are missing", {CHAT_TOP: []}),
    ("3 tokens at one place", {CHAT_TOP: named((1, -1), (2, -1), (3, -1))}),
    ("Expected `float` <= 0.0001", {CHAT_TOP: named((1, 0.5))}),
]
OF_COMPLETIONS: list[Broken] = [
    ("has 0 entries for 2 tokens", {BY_NAME: []}),
    ("names a token by its text", {BY_NAME: [None, {"a": -1}]}),
    ("4 tokens at one place", {BY_NAME: [None, {f"token_id:{one}": -1 for one in range(4)}]}),
    ("duplicate keys", {BY_NAME: Text('[null, {"token_id:3": -1, "token_id:3": -2}]')}),
]
PROMPT: list[tuple[str, Any]] = [
    ("is missing", None),
    ("has 1 entries for 3 tokens", [None]),
    ("no logprob of the prompt's token", [None, None, by_id((3, -1))]),
    ("no logprob of the prompt's token", [None, by_id((2, -1)), by_id((4, -1))]),
    ("no logprob of the prompt's token", [None, by_id((2, -1)), by_id((3, -9999))]),
    ("not an id from 0", [None, by_id((2, -1)), {**by_id((3, -1)), "x": {"logprob": -1}}]),
    ("4 tokens at one place", [None, by_id((2, -1)), by_id((3, -1), (4, -1), (5, -1), (6, -1))]),
    ("duplicate keys", Text('[null, {"2": {"logprob": -1}}, {"3": {"logprob": -1}, "3": {"logprob": -2}}]')),
]
BAD: list[tuple[str, str, Changes]] = [
    *(("sglang", message, changes) for message, changes in OF_SGLANG),
    *(("vllm", message, changes) for message, changes in OF_VLLM),
    *(("vllm completion", message, changes) for message, changes in OF_COMPLETIONS),
    *(("vllm", message, {"prompt_logprobs": value}) for message, value in PROMPT),
    *(("vllm completion", message, {OF_CHOICE: value}) for message, value in PROMPT),
]


@pytest.mark.parametrize(("shape", "message", "changes"), BAD, ids=map(str, range(len(BAD))))
def test_what_is_refused(shape: str, message: str, changes: Changes) -> None:
    with pytest.raises(Rejected, match=message):
        read(shape, {**SOUND[shape], **changes})


PAIRS = st.lists(
    st.tuples(st.floats(-9000, 0, width=32), st.sampled_from([0, 1, 255, 256, 65_535, 65_536, 2**24 - 1, 2**31 - 1])),
    max_size=5,
)


@given(st.lists(PAIRS, max_size=4))
def test_rows_come_back_as_they_were(rows: list[list[tuple[float, int]]]) -> None:
    made = packed(rows)
    k = max(map(len, rows), default=0)
    if made is None:
        assert not k
        return
    ids, logprobs = unpacked(msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=TopRows))
    assert ids.tolist() == [[token for _, token in row] + [-1] * (k - len(row)) for row in rows]
    assert logprobs.tolist() == [[value for value, _ in row] + [-9999.0] * (k - len(row)) for row in rows]


@pytest.mark.parametrize(
    "rows",
    [TopRows(0, b"", b""), TopRows(2, b"\1", b"1234"), TopRows(1, b"12345", b"1234"), TopRows(1, b"12", b"12345")],
)
def test_damaged_rows(rows: TopRows) -> None:
    with pytest.raises(CorruptContent):
        unpacked(rows)


COUNTED = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 7, "per_step_accepted": None}


def counters(steps: Any, *others: str) -> Changes:
    given = dict(zip(others, (12, 7), strict=False))
    return {f"{META}.{name}": count for name, count in {"spec_verify_ct": steps, **given}.items()}


NOW, BEFORE = ("spec_num_proposed_drafts", "spec_num_correct_drafts"), ("spec_draft_token_num", "spec_accept_token_num")


@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ("sglang", counters(4, *NOW), True),
        ("sglang", counters(4, *BEFORE), True),
        ("sglang", counters(4), False),
        ("sglang", counters(-4, *NOW), False),
        ("vllm", {"metrics": {"speculative_decoding": COUNTED}}, True),
        ("vllm completion", {"metrics": {"speculative_decoding": COUNTED}}, True),
        ("vllm", {"metrics": {"speculative_decoding": None}}, False),
        ("vllm", {"metrics": {"speculative_decoding": {**COUNTED, "num_spec_steps": "4"}}}, False),
    ],
)
def test_speculative_counters(shape: str, changes: Changes, expected: bool) -> None:
    """They are statistics: what is no counter refuses no reply."""
    asked = Job("auto", None, [], [], [], 200, "", b"", "completions" if "completion" in shape else "chat")
    body = body_of(shape, changes, separators=(",", ":")).replace(b"\\u00e9", "é".encode())
    counted = Speculative(4, 12, 7) if expected else None
    assert job.read_whole(asked, body)[0].speculative == counted
    assert job.read(asked, body)[0].speculative == counted
