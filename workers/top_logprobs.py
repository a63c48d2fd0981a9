"""The most likely tokens at each position, and the logprobs of a prompt's tokens, as engines report them.

    SGLang  chat         `meta_info.output_top_logprobs`: for each sampled token a list of
                         `[logprob, id, text]`, or null; it need not have the sampled token
            /generate    also `input_token_logprobs` and `input_top_logprobs`, of the prompt's
                         last tokens
            completions  texts instead of ids: nothing is read
    vLLM    chat         `logprobs.content[].top_logprobs`, which name their tokens `token_id:N`
                         where asked to; the sampled token is the first, in place of the least
                         likely one if it is not among them
            completions  `logprobs.top_logprobs`: an object for each sampled token, with that too
            both         `prompt_logprobs`: for each prompt token an object by id, with that too

A row is kept from its most likely token to the least likely one. An alternative without a
probability (null, or vLLM's -9999) is not there: what a grammar rules out.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from workers.codec import TOKEN_BYTES, CorruptContent, TopLogprobs, TopRows
from workers.parse_json import Fields, Rejected, is_null, typed
from workers.parse_prompt import MAX_TOKEN_ID, Prompt, TokenId

MAX_LOGPROB = 1e-4
"""Rounding in an engine may make a logprob slightly positive. It is stored as sent."""

MISSING_LOGPROB = -9999.0
"""vLLM's placeholder for a missing logprob."""

Logprob = Annotated[float, msgspec.Meta(gt=MISSING_LOGPROB, le=MAX_LOGPROB)]
"""The decoder takes neither NaN nor infinity, which are no JSON, nor what is infinite as a double (`1e999`)."""

MAX_TOP = 20
"""The most alternatives that a request may ask for, as in OpenAI's API."""

NO_ID, NO_LOGPROB = -1, MISSING_LOGPROB
"""What stands where a row has no further token: exp(-9999) is 0, so it weighs nothing in a divergence."""

FLOAT_BYTES = 4

Pair = tuple[float | None, int]


class LogprobWish(msgspec.Struct, frozen=True, array_like=True):
    """`top`: how many of the most likely tokens each sampled token is to have. `prompt`: likewise for the prompt's
    tokens, which then have logprobs; None if none are asked for."""

    top: int = 0
    prompt: int | None = None


_Maybe = Annotated[float, msgspec.Meta(le=MAX_LOGPROB)] | None


class _Triple(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, id, text]`."""

    logprob: _Maybe
    id: TokenId


class _PromptTriple(msgspec.Struct, array_like=True, gc=False):
    logprob: Logprob | None
    id: TokenId


class _Named(msgspec.Struct, gc=False):
    token: str
    logprob: _Maybe


class _Entry(msgspec.Struct, gc=False):
    top_logprobs: list[_Named] = []


class _ById(msgspec.Struct, gc=False):
    logprob: _Maybe


_ROWS = msgspec.json.Decoder(list[list[_Triple] | None])
_PROMPT_TRIPLES = msgspec.json.Decoder(list[_PromptTriple])
_ENTRIES = msgspec.json.Decoder(list[_Entry])
_BY_NAME = msgspec.json.Decoder(list[dict[str, _Maybe] | None])
_BY_ID = msgspec.json.Decoder(list[dict[str, _ById] | None])

_NAME = "token_id:"
_LOGPROB_KEY = re.compile(rb'"logprob"\s*:')
"""A key: the colon tells it from a token of this text, which vLLM names too."""


def of_sglang_chat(meta: Fields, where: str, prompt: Prompt, output: int, wish: LogprobWish) -> TopLogprobs | None:
    """What a chat's reply says of `output` sampled tokens and of the prompt. Raises Rejected."""
    rows = None
    if wish.top and output:
        rows = _triples(meta.get("output_top_logprobs"), f"{where}.output_top_logprobs", output, wish.top)
    raw = meta.get("input_token_logprobs")
    if wish.prompt is None or raw is None or is_null(raw):
        return _made(rows)
    place = f"{where}.input_token_logprobs"
    triples: list[_PromptTriple] = typed(_PROMPT_TRIPLES, raw, place)
    if len(triples) > prompt.tokens:
        raise Rejected(f"{place} has {len(triples)} entries for {prompt.tokens} prompt tokens")
    if any(triple.logprob is None for triple in triples[1:]):
        raise Rejected(f"{place} has a null after its first entry")
    own = _own(prompt)
    count = min(len(triples), len(own))
    kept = triples[len(triples) - count :]
    if [triple.id for triple in kept] != own[len(own) - count :]:
        raise Rejected(f"{place} has other ids than the prompt")
    logprobs = [triple.logprob for triple in kept if triple.logprob is not None]
    top, most = None, max(wish.top, wish.prompt)
    raw = meta.get("input_top_logprobs")
    if most and raw is not None and not is_null(raw) and triples:
        rows_of_prompt = _triples(raw, f"{where}.input_top_logprobs", len(triples), most)
        top = rows_of_prompt[len(triples) - len(logprobs) :]
    return _made(rows, logprobs, top)


def of_vllm_chat(
    content: msgspec.Raw, prompt_raw: msgspec.Raw, prompt: Prompt, wish: LogprobWish
) -> TopLogprobs | None:
    """As `of_sglang_chat`; `content` has as many entries as tokens were sampled."""
    rows = None
    if wish.top:
        where = "choices[0].logprobs.content"
        entries: list[_Entry] = typed(_ENTRIES, content, where)
        rows = [
            _row([(top.logprob, _id(top.token, where)) for top in entry.top_logprobs], wish.top, wish.top, where)
            for entry in entries
        ]
        if any(not entry.top_logprobs for entry in entries):
            raise Rejected(f"{where}[].top_logprobs were requested and are missing")
    return _made(rows, *_of_vllm_prompt(prompt_raw, "prompt_logprobs", prompt, wish))


def of_vllm_completion(
    logprobs: Fields, prompt_raw: msgspec.Raw, prompt: Prompt, output: int, wish: LogprobWish
) -> TopLogprobs | None:
    """As `of_sglang_chat`."""
    rows = None
    if wish.top:
        where = "choices[0].logprobs.top_logprobs"
        raw = logprobs.get("top_logprobs")
        objects: list[dict[str, float | None] | None] = typed(_BY_NAME, raw, where)
        _require_rows(len(objects), output, where)
        rows = [
            _row(
                [(logprob, _id(name, where)) for name, logprob in (object_ or {}).items()],
                wish.top,
                wish.top + 1,
                where,
            )
            for object_ in objects
        ]
        _require_distinct(bytes(raw or b"").count(b'"' + _NAME.encode()), objects, where)
    return _made(rows, *_of_vllm_prompt(prompt_raw, "choices[0].prompt_logprobs", prompt, wish))


_Row = list[tuple[float, int]]


def _of_vllm_prompt(
    raw: msgspec.Raw, where: str, prompt: Prompt, wish: LogprobWish
) -> tuple[list[float], list[_Row] | None]:
    """The logprobs of the prompt's last new tokens, and the most likely tokens there."""
    if wish.prompt is None:
        return [], None
    if is_null(raw):
        raise Rejected(f"{where} was requested and is missing")
    objects: list[dict[str, _ById] | None] = typed(_BY_ID, raw, where)
    _require_rows(len(objects), prompt.tokens, where)
    _require_distinct(len(_LOGPROB_KEY.findall(raw)), objects, where)
    logprobs: list[float] = []
    rows: list[_Row] = []
    for place, token in enumerate(_own(prompt), prompt.base):
        entry = objects[place]
        if entry is None and place == 0:
            continue
        own = None if entry is None else entry.get(str(token))
        if entry is None or own is None or own.logprob is None or own.logprob <= MISSING_LOGPROB:
            raise Rejected(f"{where}[{place}] has no logprob of the prompt's token")
        logprobs.append(own.logprob)
        if wish.prompt:
            pairs = [(candidate.logprob, _number(name, where)) for name, candidate in entry.items()]
            rows.append(_row(pairs, wish.prompt, wish.prompt + 1, where))
    return logprobs, rows or None


def _triples(raw: msgspec.Raw | None, where: str, count: int, top: int) -> list[_Row]:
    rows: list[list[_Triple] | None] = typed(_ROWS, raw, where)
    _require_rows(len(rows), count, where)
    return [_row([(triple.logprob, triple.id) for triple in row or ()], top, top, where) for row in rows]


def _row(pairs: list[Pair], top: int, most: int, where: str) -> _Row:
    """The `top` most likely of at most `most` tokens, most likely first. Raises Rejected."""
    if len(pairs) > most:
        raise Rejected(f"{where}: {len(pairs)} tokens at one place, {top} were requested")
    if len({token for _, token in pairs}) < len(pairs):
        raise Rejected(f"{where} has a token twice at one place")
    there = [(logprob, token) for logprob, token in pairs if logprob is not None and logprob > MISSING_LOGPROB]
    there.sort(key=_logprob, reverse=True)
    return there[:top]


def _logprob(pair: tuple[float, int]) -> float:
    return pair[0]


def _own(prompt: Prompt) -> list[int]:
    """The prompt's new ids."""
    return memoryview(prompt.suffix_ids).cast("i").tolist()


def _id(name: str, where: str) -> int:
    if not name.startswith(_NAME):
        raise Rejected(f"{where} names a token by its text, not as {_NAME}N")
    return _number(name[len(_NAME) :], where)


def _number(text: str, where: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 10:
        token = int(text)
        if token <= MAX_TOKEN_ID and str(token) == text:
            return token
    raise Rejected(f"{where} names a token that is not an id from 0 to {MAX_TOKEN_ID}")


def _require_rows(actual: int, count: int, where: str) -> None:
    if actual != count:
        raise Rejected(f"{where} has {actual} entries for {count} tokens")


def _require_distinct(keys: int, objects: Iterable[dict[str, Any] | None], where: str) -> None:
    """The decoder keeps the last of several equal keys. Raises Rejected."""
    if keys != sum(map(len, filter(None, objects))):
        raise Rejected(f"{where} has duplicate keys")


def _made(
    rows: list[_Row] | None, logprobs: Sequence[float] = (), prompt_rows: list[_Row] | None = None
) -> TopLogprobs | None:
    output = None if rows is None else packed(rows)
    if output is None and not logprobs:
        return None
    prompt = None if prompt_rows is None else packed(prompt_rows)
    return TopLogprobs(output, prompt, array("f", logprobs).tobytes())


def packed(rows: Sequence[_Row]) -> TopRows | None:
    """None if no row has a token.

    Ids and logprobs are stored byte by byte: all lowest bytes, then the next ones. The high bytes repeat, and those of
    ids that are all 0 are left out: that halves what zstd makes of them.
    """
    k = max(map(len, rows), default=0)
    if not k:
        return None
    ids = np.array([[token for _, token in row] + [NO_ID] * (k - len(row)) for row in rows], "<i4")
    logprobs = np.array([[value for value, _ in row] + [NO_LOGPROB] * (k - len(row)) for row in rows], "<f4")
    positive = (ids.T + 1).astype("<u4")
    id_bytes = max((int(positive.max()).bit_length() + 7) // 8, 1)
    return TopRows(k, _planes(positive)[: id_bytes * positive.size], _planes(logprobs.T))


def unpacked(rows: TopRows) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Ids (int32, NO_ID) and logprobs (float32, NO_LOGPROB), both [rows, k]. Raises CorruptContent."""
    count = len(rows.logprobs) // FLOAT_BYTES
    id_bytes = len(rows.ids) // max(count, 1)
    if not (0 < rows.k <= count and count % rows.k == 0 and 0 < id_bytes <= TOKEN_BYTES):
        raise CorruptContent("the most likely tokens do not line up")
    if (len(rows.ids), len(rows.logprobs)) != (id_bytes * count, FLOAT_BYTES * count):
        raise CorruptContent("the most likely tokens do not line up")
    positive = _whole(rows.ids.ljust(TOKEN_BYTES * count, b"\0"), count, "<u4")
    ids = (positive.astype(np.int64) - 1).astype(np.int32)
    logprobs = _whole(rows.logprobs, count, "<f4")
    return ids.reshape(rows.k, -1).T, logprobs.reshape(rows.k, -1).T


def _planes(values: npt.NDArray[Any]) -> bytes:
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, 4).T.tobytes()


def _whole(planes: bytes, count: int, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(planes, np.uint8).reshape(4, count).T.copy().view(dtype).reshape(-1)
