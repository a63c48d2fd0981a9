"""One reply from bytes to what is committed: its payloads are cut out, and can be put back to the byte."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from helpers.replies import Changes, Text, body_of
from hypothesis import given
from hypothesis import strategies as st

from workers import codec, job, payloads
from workers.codec import Exchange
from workers.parse import REPLAY, KnownTokens, Rejected, token_text
from workers.payloads import PayloadSpec
from workers.reply import Job, ValidatedReply
from workers.scan import WINDOW

EXPERTS, POSITIONS = PayloadSpec("routed_experts"), PayloadSpec("indexer_topk")
BOTH = (EXPERTS, POSITIONS)
META = "choices.0.meta_info"
CONTENT = "choices.0.message.content"

ROWS = np.arange(8).reshape(4, 1, 2)
OTHER = ROWS + 300
TEXT = '"' + base64.b64encode(ROWS.astype("<i4").tobytes()).decode() + '"'
LISTS = str(ROWS.tolist())
SPELLINGS = {
    "base64": TEXT,
    "lists": LISTS,
    "compact": LISTS.replace(" ", ""),
    "flat": str(ROWS.reshape(-1).tolist()),
    "escaped": TEXT.replace("A", "\\u0041", 1),
    "uneven": LISTS.replace(", ", ",  ", 1),
}


def a_job(*payload_specs: PayloadSpec, dialect: Any = "auto", known: KnownTokens | None = None) -> Job:
    return Job(dialect, known, list(payload_specs), [b'{"role":"user"}'], [("a", "b")], 200, "rid", b"")


def done_of(body: bytes, *payload_specs: PayloadSpec, **fields: Any) -> ValidatedReply:
    return job.work(a_job(*(payload_specs or BOTH), **fields), memoryview(body))


def exchange_of(done: ValidatedReply) -> Exchange:
    return codec.unpack(done.exchange, Exchange)


def pasted(done: ValidatedReply, kinds: tuple[str, ...] = REPLAY) -> bytes:
    """The reply as it would be given again."""
    exchange, tokens = exchange_of(done), codec.unpack_tokens(done.tokens, done.exchange)
    values: dict[str, bytes] = {}
    for cut in exchange.cuts:
        [payload] = (payload for payload in done.payloads if payload.kind == cut.kind)
        rows = payloads.join([payloads.load(new.chunk, new.frame) for new in payload.new])
        if cut.kind in kinds:
            values[cut.kind] = b"" if cut.form == "text" else payloads.render(cut, rows)
    return codec.paste(exchange, memoryview(tokens.suffix_ids).cast("i"), values)


def sglang(experts: str = TEXT, *changes: Changes) -> bytes:
    return body_of("sglang", {f"{META}.routed_experts": Text(experts)}, *changes)


def vllm(rows: Any = ROWS) -> bytes:
    head = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {rows.shape}, }}".encode().ljust(117) + b"\n"
    raw = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + rows.astype("<i4").tobytes()
    return body_of("vllm", {"choices.0.routed_experts": base64.b64encode(raw).decode()})


def check(body: bytes, done: ValidatedReply, **values: str) -> None:
    """The values of these kinds, and nothing else, were taken out where they stand."""
    assert pasted(done) == body
    assert {place.kind: body[place.start : place.end].decode() for place in done.places} == values
    assert {payload.kind for payload in done.payloads} == {cut.kind for cut in exchange_of(done).cuts} == values.keys()
    gone = body
    for place in sorted(done.places, key=lambda place: -place.start):
        gone = gone[: place.start] + b"null" + gone[place.end :]
    assert pasted(done, ()) == gone


def long_text(size: int, *, lists: bool) -> str:
    rows = np.arange(size // 16 * 4).reshape(4, -1) % 10
    return str(rows.tolist()) if lists else '"' + base64.b64encode(rows.astype("<i4").tobytes()).decode() + '"'


SIZES = (WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW)
LONG_TEXTS = [long_text(size, lists=lists) for size in SIZES for lists in (False, True)]


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_payload_is_cut_out_and_put_back(name: str) -> None:
    text = SPELLINGS[name]
    body = sglang(text)
    done = done_of(body)
    check(body, done, routed_experts=text)
    [payload] = done.payloads
    assert (payload.start, payload.stop, payload.shared) == (0, 4, 0)
    assert payloads.load(payload.new[0].chunk, payload.new[0].frame).tolist() == ROWS.reshape(4, 2).tolist()
    assert (text.encode() in exchange_of(done).reply) == (name in ("escaped", "uneven"))
    assert job.run(job.encode(a_job(*BOTH)), memoryview(body))


def test_a_npy_payload_is_cut_out_and_put_back() -> None:
    body = vllm()
    done = done_of(body)
    text = json.dumps(json.loads(body)["choices"][0]["routed_experts"])
    check(body, done, routed_experts=text)
    assert (done.payloads[0].shape, done.dialect) == ((1, 2), "vllm")
    assert text.encode() not in exchange_of(done).reply


@pytest.mark.parametrize("order", [("routed_experts", "indexer_topk"), ("indexer_topk", "routed_experts")])
def test_both_kinds(order: tuple[str, str]) -> None:
    texts = {"routed_experts": TEXT, "indexer_topk": str(OTHER.tolist())}
    body = body_of("sglang", *({f"{META}.{kind}": f"@{kind}@"} for kind in order))
    for kind, text in texts.items():
        body = body.replace(f'"@{kind}@"'.encode(), text.encode())
    done = done_of(body)
    check(body, done, **texts)
    assert exchange_of(done).reply.count(b"[[[") == 0
    assert pasted(done, ("indexer_topk",)) == body.replace(TEXT.encode(), b"null")


SLASHES = '"' + base64.b64encode(np.full((4, 3), 0xFFFFFF, "<i4").tobytes()).decode().replace("/", "\\/") + '"'
FIELD = b'"routed_experts"'
BODIES: list[tuple[bytes, str | None]] = [
    *((body, None) for body in (body_of("sglang"), body_of("vllm"), sglang("null"), sglang(" null"))),
    (body_of("sglang", {"sglext": {"routed_experts": json.loads(TEXT)}}), TEXT),
    (sglang().replace(FIELD, b'"routed\\u005fexperts"'), TEXT),
    (sglang(SLASHES), SLASHES),
    *(
        (sglang(text).replace(FIELD + b": ", FIELD + space + b":" + space), text)
        for text in (TEXT, LISTS)
        for space in (b"", b" ", b"\n", b" \t\r\n ", b" " * 9)
    ),
    *(
        (sglang(long_text(size, lists=lists)), long_text(size, lists=lists))
        for size in SIZES
        for lists in (False, True)
    ),
]
"""Replies, and the payload in each: none, in the extension alone, spelled otherwise, longer than what is searched."""


@pytest.mark.parametrize(("body", "text"), BODIES, ids=map(str, range(len(BODIES))))
def test_a_payload_is_found_however_it_is_spelled(body: bytes, text: str | None) -> None:
    check(body, done_of(body), **({} if text is None else {"routed_experts": text}))
    assert text is None or len(text) < WINDOW - 1 or len(exchange_of(done_of(body)).reply) < 2000


def test_a_payload_that_holds_the_prompts_text() -> None:
    """Found first in the payload, which is cut out itself."""
    reply = json.loads(body_of("vllm", {"choices.0.routed_experts": [[1, 2, 3]] * 4}, {CONTENT: "routed_experts"}))
    for order in (sorted(reply), sorted(reply, reverse=True)):
        body = json.dumps({name: reply[name] for name in order}).encode()
        check(body, done_of(body), routed_experts=str([[1, 2, 3]] * 4))


@pytest.mark.parametrize("name", SPELLINGS)
@pytest.mark.parametrize("first", [True, False])
def test_a_payload_that_stands_in_sglext_too_is_stored_once(name: str, first: bool) -> None:
    text = SPELLINGS[name]
    extension = f'"sglext": {{"routed_experts": {text}}}'.encode()
    body = b"{" + extension + b"," + sglang(text)[1:] if first else sglang(text)[:-1] + b"," + extension + b"}"
    done = done_of(body)
    check(body, done, routed_experts=text)
    assert (len(done.places), len(done.payloads)) == (2, 1)
    if name not in ("escaped", "uneven"):
        assert len(exchange_of(done).reply) < len(body) - 2 * len(text) + 10


def test_a_reply_of_no_tokens_needs_no_payload() -> None:
    body = body_of("sglang", {f"{META}.completion_tokens": 0}, {f"{META}.output_token_logprobs": []}, {CONTENT: ""})
    assert done_of(body, PayloadSpec("routed_experts", required=True)).payloads == []


def test_a_kind_that_is_not_wanted_stays_in_the_reply() -> None:
    done = done_of(sglang(), POSITIONS)
    assert (done.payloads, exchange_of(done).cuts) == ([], [])
    assert pasted(done, ()) == sglang()


@pytest.mark.parametrize("short", [*range(-2, 20), 400])
def test_a_key_at_the_end_of_what_is_searched_at_a_time(short: int) -> None:
    bare = sglang(TEXT, {CONTENT: "x"})
    padding = WINDOW - bare.index(b'"routed_experts"') - short
    body = sglang(TEXT, {CONTENT: "x" * (padding + 1)})
    assert body.index(b'"routed_experts"') == WINDOW - short
    assert job.find_long_values(memoryview(body)).base64_bytes == len(TEXT)
    done = done_of(body)
    check(body, done, routed_experts=TEXT)
    assert TEXT.encode() not in exchange_of(done).reply


@pytest.mark.parametrize("body", [sglang(), sglang(SPELLINGS["escaped"]), vllm(), body_of("vllm")])
def test_a_child_gives_what_the_process_itself_would(body: bytes) -> None:
    work = a_job(*BOTH)
    result = job.run(memoryview(job.encode(work)), memoryview(body))
    assert job.decode_done(result) == job.work(work, memoryview(body))


def test_a_child_refuses_what_the_process_itself_would() -> None:
    work, body = job.encode(a_job(*BOTH)), memoryview(sglang('"AAAA"'))
    with pytest.raises(Rejected) as refused:
        job.run(work, body)
    with pytest.raises(Rejected, match=str(refused.value)):
        done_of(bytes(body))


def test_rows_behind_a_prompt_that_drifted_are_not_joined_to_the_parents() -> None:
    """Two rows of the four, said to follow two that are known, but the prompt's tokens are others."""
    first = done_of(sglang(TEXT)).payloads[0]
    parent = payloads.Parent(0, 4, 2, [new.chunk for new in first.new])
    text = token_text([9, 9, 9])
    strange = KnownTokens(3, len(text), "0" * 64)
    body = sglang('"' + base64.b64encode(bytes(8)).decode() + '"', {"choices.0.prompt_token_ids": [1, 2, 3, 4]})
    done = done_of(body, PayloadSpec("routed_experts", start=4, parent=parent), known=strange)
    [stored] = done.payloads
    assert (done.base, stored.start, stored.stop, stored.sent, stored.shared) == (0, 4, 5, 4, 0)


PARTS = ["routed_experts", '"', "\\", ":", " ", "@turnlog:0@", "[[", "]]", "é", "[1, 2, 3]", "A" * 20]


@given(
    st.lists(st.sampled_from(PARTS), max_size=6).map("".join),
    st.lists(st.sampled_from(PARTS), max_size=6).map("".join),
    st.sampled_from(sorted(SPELLINGS)),
    st.booleans(),
)
def test_any_texts_around_a_payload(text: str, note: str, name: str, wide: bool) -> None:
    changes = [{CONTENT: text}, {"metadata": {note: text, "routed_experts": note, "weight_version": "1"}}]
    body = sglang(SPELLINGS[name], *changes)
    if not wide:
        body = json.dumps(json.loads(body), separators=(",", ":"), ensure_ascii=False).encode()
    at = body.index(b'"routed_experts"', body.index(b'"meta_info"'))
    done = done_of(body)
    assert pasted(done) == body
    assert [place.start > at for place in done.places] == [True]
    assert payloads.load(done.payloads[0].new[0].chunk, done.payloads[0].new[0].frame).reshape(-1).tolist() == [
        *range(8)
    ]
