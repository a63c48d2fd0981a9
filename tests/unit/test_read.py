"""What is said of a reply whose long values are cut out is what is said of the whole, to the error."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.amounts import cases
from helpers.replies import CHATS, Changes, Text, body_of, doubled, known_as, paths
from hypothesis import given, settings
from hypothesis import strategies as st
from test_malformed import ROWS
from test_parse_fuzz import BYTES, JUNK, mutated

from app.turn.client_reply import shown
from app.upstream.body import Body
from workers import codec, job, payloads
from workers.codec import Exchange, StoredTokens
from workers.parse import REPLAY, Rejected, token_text
from workers.parse_prompt import KnownText
from workers.payloads import Parent, PayloadSpec
from workers.reply import NAMES, Job, ReplayKind, ValidatedReply

COMPACT = (",", ":")
LONG = [place * 7919 % 50_000 for place in range(3000)]
PROMPT = {"sglang": "choices.0.prompt_token_ids", "vllm": "prompt_token_ids"}
PLAIN = Job("auto", None, [], [b'{"role":"user"}'], [("a", "b")], 200, "rid", b"")


def a_body(shape: str, *changes: Changes) -> bytes:
    return body_of(shape, *changes, separators=COMPACT).replace(b"\\u00e9", "é".encode())


def long_body(shape: str, ids: list[int], *changes: Changes) -> bytes:
    counts = ["usage.prompt_tokens", *["choices.0.meta_info.prompt_tokens"] * (shape == "sglang")]
    return a_body(shape, dict.fromkeys(counts, len(ids)), {PROMPT[shape]: ids}, *changes)


def text_of(ids: list[int]) -> KnownText:
    text = token_text(ids)
    return KnownText(known_as(ids), bytearray(text), hashlib.sha256(text))


def content_of(result: ValidatedReply) -> tuple[ValidatedReply, StoredTokens, Exchange]:
    """A result with its frames unpacked. Where the prompt's ids were taken out differs, if they are there twice."""
    exchange = codec.unpack(result.exchange, Exchange)
    tokens = codec.unpack_tokens(result.tokens, result.exchange)
    cuts = [msgspec.structs.replace(cut, at=0) for cut in exchange.cuts]
    known = msgspec.structs.replace(exchange, reply=b"", prompt_ids_at=None, separator=",", tokens=None, cuts=cuts)
    places = [msgspec.structs.replace(place, is_list=False) for place in result.places]
    return msgspec.structs.replace(result, tokens=None, exchange=b"", prompt=None, places=places), tokens, known


def is_read(body: bytes, asked: Job = PLAIN, text: KnownText | None = None, before: list[int] | None = None) -> bool:
    """Is it accepted? From shared memory, where nothing is known of it, too; `before` are the known ids."""
    whole, own = outcome(lambda: job.read_whole(asked, body)), outcome(lambda: job.read(asked, body, text))
    cut = [outcome(lambda: job.read_cut(asked, body, text)), outcome(lambda: job.read_cut(asked, memoryview(body)))]
    if isinstance(whole, str) or isinstance(own, str):
        refusals = {own, outcome(lambda: job.work(asked, memoryview(body)))}
        # A payload is judged by its own rules before the rest of its reply by those of JSON.
        assert refusals == {whole} or (len(refusals) == 1 and any(kind in str(own) for kind in REPLAY))
        assert all(one is None or one in (whole, own) for one in cut)
        return False
    assert all(one is None or content_of(one[0]) == content_of(own[0]) for one in cut)
    places = [*own.reply.places, *([own.reply.prompt] if own.reply.prompt else [])]
    assert b"".join(shown(Body([body]), places, {}, own.plain)) == b"".join(shown(Body([body]), places, {}))
    exchange, tokens = codec.unpack(own[0].exchange, Exchange), codec.unpack_tokens(own[0].tokens, own[0].exchange)
    for other in (whole[0], job.work(asked, memoryview(body))):
        assert content_of(own[0]) == content_of(other)
    ids = [*(before or [])[: own[0].base], *memoryview(tokens.suffix_ids).cast("i")]
    if (place := own[0].prompt) is not None:
        assert json.loads(body[place.start : place.end]) == ids
    values = {cut.kind: payloads.render(cut, rows_of(own[0], cut.kind)) for cut in exchange.cuts if cut.form != "text"}
    values |= {cut.kind: b"" for cut in exchange.cuts if cut.form == "text"}
    assert codec.paste(exchange, memoryview(msgspec_ids(ids)).cast("i"), values) == body
    if own[1] is not None:
        made, output = own[1](), list(memoryview(tokens.output_ids).cast("i"))
        assert made is not None
        assert made.known == own[0].sequence == known_as([*ids, *output])
        assert made.begins(token_text([*ids, *output]), 0)
    return True


def outcome(read: Callable[[], Any]) -> Any:
    """What it returns, or the refusal."""
    try:
        return read()
    except Rejected as error:
        return f"{type(error).__name__}: {error}"


def rows_of(result: ValidatedReply, kind: str) -> Any:
    [payload] = (payload for payload in result.payloads if payload.kind == kind)
    return payloads.join([payloads.load(new.chunk, new.frame) for new in payload.new])


def msgspec_ids(ids: list[int]) -> bytes:
    return b"".join(one.to_bytes(4, "little") for one in ids)


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("ids", [[1, 2, 3], LONG], ids=["short", "long"])
def test_the_usual_reply_is_read(shape: str, ids: list[int]) -> None:
    body = long_body(shape, ids)
    assert job.work(PLAIN, body).prompt is not None
    for asked in (PLAIN, msgspec.structs.replace(PLAIN, dialect=shape)):
        assert is_read(body, asked)
    other = "vllm" if shape == "sglang" else "sglang"
    assert not is_read(body, msgspec.structs.replace(PLAIN, dialect=other))
    sent = msgspec.structs.replace(PLAIN, sent=token_text(ids))
    assert is_read(body, sent)
    assert not is_read(body, msgspec.structs.replace(sent, sent=token_text([*ids, 1])))


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("ids", [[1, 2, 3], LONG], ids=["short", "long"])
@pytest.mark.parametrize("at_hand", [True, False])
def test_known_tokens(shape: str, ids: list[int], at_hand: bool) -> None:
    body = long_body(shape, ids)
    for known in (ids, ids[:-1], ids[:1], [*ids[:-1], 50_001], [*ids, 7], []):
        asked = msgspec.structs.replace(PLAIN, known=known_as(known))
        assert is_read(body, asked, text_of(known) if at_hand else None, before=known)


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize(
    "text", ["[1,2,]", "[1,2,,3]", "[,1]", "[1,-0]", "[1,07]", "[1 ,2]", "[1,2.0]", "[1]", "[]", "[["]
)
def test_ids_that_are_none(shape: str, text: str) -> None:
    changes: Changes = {PROMPT[shape]: Text(text), "usage": {"completion_tokens": 2}}
    for known in ([], [1], [1, 2]):
        asked = msgspec.structs.replace(PLAIN, known=known_as(known))
        body = a_body(shape, changes, *([{"choices.0.meta_info.prompt_tokens": None}] if shape == "sglang" else []))
        for at_hand in (None, text_of(known)):
            assert is_read(body, asked, at_hand, before=known) == (text in ("[1 ,2]", "[1]", "[]"))


@pytest.mark.parametrize("shape", CHATS)
def test_an_empty_message_of_a_part(shape: str) -> None:
    body = a_body(shape, {"choices.0.message.content": None})
    assert not is_read(body)
    assert is_read(body, msgspec.structs.replace(PLAIN, is_part=True))
    for change in ({"reasoning_content": "I"}, {"reasoning": "I"}, {"tool_calls": [{"id": 1}]}):
        assert is_read(a_body(shape, {f"choices.0.message.{name}": value for name, value in change.items()}))


@pytest.mark.parametrize("shape", CHATS)
def test_what_is_told_of_a_reply(shape: str) -> None:
    meta = "choices.0.meta_info" if shape == "sglang" else "choices.0"
    spans = [{"version": "8", "start": 0, "end": 1}, {"version": "9", "start": 1, "end": 2}]
    assert is_read(a_body(shape, {f"{meta}.weight_versions": spans}))
    assert not is_read(a_body(shape, {f"{meta}.weight_versions": spans[:1]}))
    assert is_read(a_body(shape, {"metadata": {"weight_version": 7}}))
    assert is_read(a_body(shape, {"usage.prompt_tokens_details": {"cached_tokens": 2}}))
    assert is_read(a_body(shape, {"choices.0.response_token_ids": [10, 11]}))
    assert not is_read(a_body(shape, {"choices.0.response_token_ids": [10]}))
    assert is_read(a_body(shape, {"usage.prompt_tokens": 4}))  # Of a request with images.
    entry = {"token": "é", "logprob": -1e-07, "bytes": [1], "top_logprobs": [{"token": "a", "logprob": -9e-05}]}
    assert is_read(a_body(shape, {"choices.0.logprobs": {"content": [entry, entry]}}))


@pytest.mark.parametrize("kind", REPLAY)
def test_a_payload_that_is_required(kind: ReplayKind) -> None:
    required = msgspec.structs.replace(PLAIN, payload_specs=[PayloadSpec(kind, required=True)])
    for shape, meta in (("sglang", "choices.0.meta_info"), ("vllm", "choices.0")):
        name = NAMES[shape][kind]
        assert is_read(a_body(shape, {f"{meta}.{name}": None}))
        assert is_read(a_body(shape), required) == ((shape, kind) == ("vllm", "indexer_topk"))
        assert not is_read(a_body(shape, {f"{meta}.{name}": "AAAA"}), required)


META = {"sglang": "choices.0.meta_info", "vllm": "choices.0"}
ASKED = msgspec.structs.replace(
    PLAIN, payload_specs=[PayloadSpec("routed_experts", required=True), PayloadSpec("indexer_topk")]
)


def rows_text(shape: str, rows: int) -> str:
    ids = np.arange(6 * rows, dtype="<i4").reshape(rows, 2, 3) % 300
    file = io.BytesIO()
    np.save(file, ids)
    return base64.b64encode(ids.tobytes() if shape == "sglang" else file.getvalue()).decode()


def with_rows(shape: str, ids: list[int], *changes: Changes) -> bytes:
    return long_body(shape, ids, {f"{META[shape]}.routed_experts": rows_text(shape, len(ids) + 1)}, *changes)


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("ids", [[1, 2, 3], LONG], ids=["short", "long"])
@pytest.mark.parametrize("at_hand", [True, False])
def test_rows_are_cut_out_of_the_usual_reply(shape: str, ids: list[int], at_hand: bool) -> None:
    body = with_rows(shape, ids)
    assert is_read(body, ASKED)
    for known in (ids, ids[:-1], [*ids[:-1], 50_001], []):
        asked = msgspec.structs.replace(ASKED, known=known_as(known))
        assert is_read(body, asked, text_of(known) if at_hand else None, before=known)


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("start", [1, 2])
@pytest.mark.parametrize("before", [[], [1, 2, 3]])
def test_rows_after_those_that_are_known(shape: str, start: int, before: list[int]) -> None:
    first = job.work(ASKED, memoryview(with_rows(shape, [1, 2])))
    [new] = first.payloads[0].new
    parent = Parent(0, start, 6, [msgspec.structs.replace(new.chunk, rows=start)])
    spec = PayloadSpec("routed_experts", start=start, parent=parent)
    asked = msgspec.structs.replace(ASKED, known=known_as(before), payload_specs=[spec])
    rows = {f"{META[shape]}.routed_experts": rows_text(shape, 4 - start)}
    body = long_body(shape, [1, 2, 3], rows)
    read, whole = job.work(asked, memoryview(body)), job.read_whole(asked, body)[0]
    assert content_of(read) == content_of(whole)
    assert read.payloads[0].shared == (1 if before else 0)


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("kind", REPLAY)
@pytest.mark.parametrize("value", ["", "AAAA", None, [], 'A","routed_experts":"'])
def test_rows_elsewhere_as_well(shape: str, kind: str, value: Any) -> None:
    own = META[shape]
    for home in ("", "choices.0.", "choices.0.message.", f"{own}.", "usage."):
        for change in ({f"{home}{kind}": value}, {f"{home}sglext": {kind: value}}, {f"{home}sglext": value}):
            if f"{own}.routed_experts" not in change:
                is_read(with_rows(shape, [1, 2, 3], change), ASKED)
            first = json.dumps({key.rpartition(".")[2]: one for key, one in change.items()}, separators=COMPACT)
            is_read(first.encode()[:-1] + b"," + with_rows(shape, [1, 2, 3])[1:], ASKED)


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("other", ["", "AAAA", "same"])
def test_rows_twice(shape: str, other: str) -> None:
    text = rows_text(shape, 4)
    for twice in ((text, other.replace("same", text)), (other.replace("same", text), text)):
        rows = Text('"{}","routed_experts":"{}"'.format(*twice))
        body = with_rows(shape, [1, 2, 3], {f"{META[shape]}.routed_experts": rows})
        assert is_read(body, ASKED) == (other == "same" and shape == "vllm")  # Its choice may repeat itself.


@pytest.mark.parametrize("shape", CHATS)
@settings(max_examples=cases(500), deadline=None)
@given(at=st.floats(0, 1), length=st.integers(0, 4), junk=st.sampled_from(BYTES) | st.binary(max_size=3))
def test_mutated_bytes_of_a_reply_with_rows(shape: str, at: float, length: int, junk: bytes) -> None:
    body = with_rows(shape, [1, 2, 3])
    start = int(at * len(body))
    is_read(body[:start] + junk + body[start + length :], ASKED)


def compact(body: bytes) -> bytes:
    return body.replace(b", ", b",").replace(b": ", b":").replace(b"\\u00e9", "é".encode())


def test_no_malformed_reply_is_read() -> None:
    """Both engines' rules refuse most of them, and then nothing may be read."""
    for row in ROWS:
        protocol: Any = "completions" if "completion" in row.shape else "chat"
        known = None if row.known is None else known_as(row.known)
        for dialect in ("auto", "sglang", "vllm"):
            asked = Job(dialect, known, list(row.payload_specs), [], [], 200, "", b"", protocol, token_text(row.sent))  # type: ignore[arg-type]
            for body in {row.body, compact(row.body)}:
                is_read(body, asked)


@pytest.mark.parametrize("shape", CHATS)
def test_every_place_with_every_junk_value(shape: str) -> None:
    for at in (at for at in paths(CHATS[shape])):
        for junk in JUNK:
            is_read(a_body(shape, {at: Text(junk)}))
            is_read(a_body(shape, {f"{at.rpartition('.')[0]}.added".lstrip("."): Text(junk)})) if not at[
                -1
            ].isdigit() else 0


@pytest.mark.parametrize("shape", CHATS)
def test_a_key_twice_is_refused(shape: str) -> None:
    ids, triples = "[1,2,3]", json.dumps([[-0.25, 10, None], [-1, 11, None]], separators=COMPACT)
    for path, key in itertools.product(("", "choices.0", "choices.0.message", "usage"), ("x", ids, triples)):
        pair = (json.dumps(key), "1")
        once = doubled(shape, path, pair, True, COMPACT)
        assert is_read(once.replace(b"\\u00e9", "é".encode()))
        twice = once.replace(f"{pair[0]}:1".encode(), f"{pair[0]}:1,{pair[0]}:2".encode())
        assert not is_read(twice.replace(b"\\u00e9", "é".encode()))


LURES = ['"prompt_token_ids":[1,2,3]', '"prompt_token_ids":[]', '"prompt_token_ids":[', '"content":[', "[1,2,3]", "\\"]


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("lure", LURES)
@pytest.mark.parametrize("place", ["choices.0.message.content", "model", "choices.0.message.reasoning_content", "note"])
def test_a_text_that_looks_like_ids(shape: str, lure: str, place: str) -> None:
    assert is_read(a_body(shape, {place: lure}))


@pytest.mark.parametrize("shape", CHATS)
@pytest.mark.parametrize("value", [[], [1, 2, 3], [[-0.25, 10, None], [-1, 11, None]], [9], None])
@pytest.mark.parametrize("key", ["prompt_token_ids", "content", "output_token_logprobs"])
def test_the_same_key_elsewhere(shape: str, value: Any, key: str) -> None:
    for place in ("choices.0.message.more", "more"):
        body = a_body(shape, {place: {key: value}})
        is_read(body)
        is_read(b'{"first":' + json.dumps({key: value}, separators=COMPACT).encode() + b"," + body[1:])


@pytest.mark.parametrize("shape", CHATS)
@settings(max_examples=cases(500), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_mutated_json(shape: str, seed: int) -> None:
    is_read(mutated(shape, Random(seed), COMPACT))


@pytest.mark.parametrize("shape", CHATS)
@settings(max_examples=cases(500), deadline=None)
@given(at=st.floats(0, 1), length=st.integers(0, 4), junk=st.sampled_from(BYTES) | st.binary(max_size=3))
def test_mutated_bytes(shape: str, at: float, length: int, junk: bytes) -> None:
    body = a_body(shape)
    start = int(at * len(body))
    is_read(body[:start] + junk + body[start + length :])


@pytest.mark.parametrize("shape", CHATS)
def test_no_cut_is_read(shape: str) -> None:
    body = a_body(shape)
    assert is_read(body)
    assert not any(is_read(body[:end]) for end in range(len(body)))
