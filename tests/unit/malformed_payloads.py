"""Malformed replay payloads: the values that a reply must not have where its payload is, with the message."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from helpers.replies import Text, body_of, sglang, vllm

from workers.payloads import PIECE, PayloadSpec

META = "choices.0.meta_info"
RAW = np.arange(1, 7, dtype="<i4").tobytes()
ENCODED = base64.b64encode(RAW)
"""Six ids: with three rows, two ids a row. A reply of four tokens has three rows."""


def npy(rows: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def quoted(raw: bytes) -> Text:
    return Text(b'"' + base64.b64encode(raw) + b'"')


def spelled(*ids: int) -> list[Any]:
    return [quoted(np.array(ids, "<i4").tobytes()), list(ids)]


FILE = npy(np.arange(1, 7, dtype="<i4").reshape(3, 2))
WIDE = [npy(np.array([[number], [1], [1]], np.uint64)) for number in (2**31, 2**63)]
LAYERS = np.arange(24, dtype="<i4").reshape(3, 2, 4)
PADDED = base64.b64encode(bytes(PIECE * 3 // 4 - 2))


class Case(NamedTuple):
    message: str
    values: list[Any]
    tokens: int = 4
    spec: PayloadSpec = PayloadSpec("routed_experts")
    vllm: bool = False


def head(old: bytes, *new: bytes) -> list[Text]:
    """The .npy file with another text in its header."""
    assert FILE.count(old) == 1
    return [quoted(FILE.replace(old, one)) for one in new]


def texts(*bodies: str) -> list[Text]:
    return [Text(body) for body in bodies]


EXPERTS = "routed_experts"
NO_INTEGERS = f"{EXPERTS} is a .npy file, but not of integers in C order"
NO_BASE64 = [
    *(ENCODED[:-1], ENCODED + b"A", ENCODED + b"=", b" " + ENCODED, ENCODED + b"\n"),
    *(ENCODED[:7] + one + ENCODED[8:] for one in (b"=", b"-", b"_", b"*", b"\n")),
    *(ENCODED[:8] + b" " + ENCODED[8:], ENCODED[:6] + b"==" + ENCODED[8:], "ÀAAA".encode(), b"====", b"not base64"),
]
CASES = [
    Case(f"{EXPERTS} is not base64", [Text(b'"' + text + b'"') for text in NO_BASE64]),
    Case(
        # Each of the two pieces on its own would be valid.
        f"{EXPERTS} is not base64: it has padding before its end",
        [Text(b'"' + PADDED + base64.b64encode(bytes(6)) + b'"')],
        tokens=2,
    ),
    Case(
        f"{EXPERTS} is not a whole number of ids",
        [*map(quoted, (RAW[:-1], RAW[:-2], RAW[:-3], RAW + b"\0", b"\0")), "AAAA"],
    ),
    # Lists.
    Case(
        f"{EXPERTS} must be a list of integers, or lists of equal length of them, at most three deep",
        [
            *([[1, 2], [3, 4], [5]], [[1, 2], [3], [4, 5, 6]], [[1], 2, [3]], [1, [2], 3]),
            *([[[1], [2]], [[3], [4]], [[5]]], [[[[1]]], [[[2]]], [[[3]]]]),
            *([1.0, 2, 3], [True, 2, 3], [None, 2, 3], ["1", 2, 3], [{}, 2, 3], *texts("[1e0,2,3]", "[+1,2,3]")),
        ],
    ),
    Case(
        f"{EXPERTS} holds something else than ids",
        [
            *([[], [], []], [1, 2, 2**31], [1, 2, 2**64]),
            *texts("[01,2,3]", "[1-2,3,4]", "[-,2,3]", "[1,,3]", "[1,2,3,]"),
        ],
    ),
    Case(f"{EXPERTS} must be base64 or nested lists", [{}, 3, True, {EXPERTS: [1, 2]}]),
    # Ids out of range.
    Case(f"{EXPERTS} holds an id out of range", [[1, 2, -1]]),
    Case(f"{EXPERTS} holds an id out of range", [*spelled(3, -1), spelled(3, -(2**31))[0]], tokens=2),
    Case(f"{EXPERTS} holds something else than ids", [[3, -(2**31)]], tokens=2),
    Case("indexer_topk holds an id out of range", spelled(3, -2)[:1], tokens=2, spec=PayloadSpec("indexer_topk")),
    Case("indexer_topk holds something else than ids", spelled(3, -2)[1:], tokens=2, spec=PayloadSpec("indexer_topk")),
    Case(f"{EXPERTS} holds an id out of range", list(map(quoted, WIDE)), vllm=True),
    # Numbers of rows, and their shape.
    *(Case(f"{EXPERTS} has {n} ids, which make no 3 rows", spelled(*range(n))) for n in (0, 2, 4, 5, 7)),
    *(
        Case(f"{EXPERTS} has {len(rows) * width} ids of shape {len(rows), width} where 3 rows belong", [rows])
        for rows, width in (([[1, 2], [3, 4]], 2), ([[1, 2], [3, 4], [5, 6], [7, 8]], 2), ([[]], 0))
    ),
    *(
        Case(f"{EXPERTS} has {width} ids a row, of shape [], where [1, 2] is expected", spelled(*range(ids)), 4, spec)
        for width, ids, spec in (
            (1, 3, PayloadSpec(EXPERTS, shape=(1, 2))),
            (4, 12, PayloadSpec(EXPERTS, shape=(1, 2))),
            (3, 6, PayloadSpec(EXPERTS, shape=(1, 2), start=1)),
        )
    ),
    *(
        Case(f"{EXPERTS} has {ids} ids where no row belongs to the tokens", spelled(*range(ids)), tokens, spec)
        for ids, tokens, spec in (
            (6, 4, PayloadSpec(EXPERTS, start=3)),
            (6, 4, PayloadSpec(EXPERTS, start=9)),
            (6, 1, PayloadSpec(EXPERTS)),
            (2, 1, PayloadSpec(EXPERTS, shape=(1, 2))),
        )
    ),
    *(
        Case(
            f"indexer_topk has {ids} ids, which make no 1000 rows",
            spelled(*range(ids))[:1],
            1001,
            PayloadSpec("indexer_topk"),
        )
        for ids in (64_001, 64_063)
    ),
    *(
        Case(
            f"{EXPERTS} has 8 ids a row, of shape [2, 4], where [4, 2] is expected",
            [rows],
            4,
            PayloadSpec(EXPERTS, shape=(4, 2)),
            vllm,
        )
        for rows, vllm in ((LAYERS.tolist(), False), (quoted(npy(LAYERS)), True))
    ),
    # Files.
    Case(f"{EXPERTS} is a .npy file where int32 was expected", [quoted(FILE)], tokens=1 + len(FILE) // 4),
    Case(f"{EXPERTS} has 0 ids, which make no 3 rows", [""], vllm=True),
    Case(f"{EXPERTS} is not a whole number of ids", [quoted(FILE[:-1])], vllm=True),
    Case(
        f"{EXPERTS} is not base64 of a .npy file", [*map(quoted, (RAW, FILE[:5])), *head(b"NUMPY", b"NUMPI")], vllm=True
    ),
    Case(f"{EXPERTS} is not base64 of a .npy file", head(b"NUMPY\x01\0", b"NUMPY\x01\x01", b"NUMPY\x04\0"), vllm=True),
    Case(NO_INTEGERS, [*map(quoted, (FILE[:9], FILE[:60])), *head(b"<i4", b">i4", b"<f4", b"|O4")], vllm=True),
    Case(NO_INTEGERS, head(b"'fortran_order': False", b"'fortran_order': True "), vllm=True),
    Case(NO_INTEGERS, head(b"(3, 2)", b"(6,)  ", b"()    ", b"(3 2) "), vllm=True),
    Case(NO_INTEGERS, head(b"(3, 2), }            ", b"(3, 99999999999999), }"), vllm=True),
    *(
        Case(f"{EXPERTS} has {ids} ids of shape {shape} where 3 rows belong to the tokens", [value], vllm=True)
        for ids, shape, value in (
            (0, (3, 2), quoted(FILE[: -len(RAW)])),
            (5, (3, 2), quoted(FILE[:-4])),
            (7, (3, 2), quoted(FILE + bytes(4))),
            (6, (2, 3), *head(b"(3, 2)", b"(2, 3)")),
            (6, (3, 0), *head(b"(3, 2)", b"(3, 0)")),
            (6, (3, 3), *head(b"(3, 2)", b"(3, 3)")),
        )
    ),
    # Values that are no JSON.
    *(
        Case(f"the body is not valid JSON: JSON is malformed: {message}", texts(*values))
        for message, values in (
            ("expected ',' or '}'", ('"AA', '"\\"', "[1,2]]")),
            ("expected ',' or ']'", ("[[1",)),
            ("invalid escaped character", ('"AAAA\\',)),
            ("invalid character", ("nul", "tru", "-")),
            ("unexpected end of hex escape", ('"\\ud800"',)),
        )
    ),
]


def bodies() -> Iterator[tuple[str, bytes, str, list[PayloadSpec]]]:
    """Name, body, message, and what was asked for."""
    for case in CASES:
        prompt = list(range(case.tokens - 1))
        reply, at = (vllm(prompt, [10]), "choices.0") if case.vllm else (sglang(prompt, [10]), META)
        for value in case.values:
            body = body_of(reply, {f"{at}.{case.spec.kind}": value})
            yield f"{case.spec.kind}={value!r}", body, case.message, [case.spec]
    asked = f"{EXPERTS} was requested and is missing"
    required = PayloadSpec(EXPERTS, required=True)
    for shape in ("sglang", "vllm"):
        yield "missing", body_of(shape), asked, [required]
    yield "null", body_of("sglang", {f"{META}.{EXPERTS}": None}), asked, [required]
    yield "elsewhere", body_of("sglang", {"metadata": {EXPERTS: "AAAA"}}), asked, [required]
    topk = "indexer_topk was requested and is missing"
    yield "missing", body_of("sglang"), topk, [PayloadSpec("indexer_topk", required=True)]
    one = [[1, 2]] * 4
    for other in ("AAAA", [[9, 9]] * 4, 7, {"a": 1}):
        body = body_of("sglang", {f"{META}.{EXPERTS}": one, "sglext": {EXPERTS: other}})
        yield f"twice, {other}", body, f"{EXPERTS} occurs twice, with different values", [PayloadSpec(EXPERTS)]
    sound = body_of("sglang", {f"{META}.{EXPERTS}": one})
    key = f'"{EXPERTS}": '.encode()
    for first in ("null", json.dumps(one), "[]", '"@turnlog:0@"'):
        body = sound.replace(key, key + first.encode() + b", " + key)
        yield f"twice, {first}", body, "choices[0].meta_info has duplicate keys", [PayloadSpec(EXPERTS)]
    body = body_of("sglang", {f"{META}.{EXPERTS}": one, f"{META}.completion_tokens": 7})
    yield "a payload, and another fault", body, "choices[0].meta_info.completion_tokens is 7", [PayloadSpec(EXPERTS)]
