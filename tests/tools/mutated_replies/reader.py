"""What a reply says, read slowly and strictly with the standard library: the judge of what the server stored.

It shares nothing with `app` or `workers`, so that an error there is not repeated here. Its rules are the least
that a reply must keep to; what it lets pass the server may still refuse.

    object ("{", [(key, value), …]) with duplicates · number ("#", spelling) · string, list, bool, None
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from tests.tools.mutated_replies.payload_reader import KINDS, Malformed, Rows, read_payload

Value = Any

MAX_DEPTH = 100
MAX_ID = 2**31 - 1
MISSING = -9999.0
MAX_LOGPROB = 1e-4
_INTEGER = re.compile(r"-?[0-9]{1,40}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"')
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_STEPS = {byte: 1 if byte in b"[{" else -1 for byte in b"[]{}"}


@dataclass(slots=True)
class Reading:
    """A sound reply. `versions` has one entry an output token, `payloads` those that are there; `root` is all of it."""

    dialect: str
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    versions: list[str]
    finish_reason: str | None
    message: Value
    root: Value = None
    payloads: dict[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Demand:
    """What the engine was asked for: kinds of payload, the first row wanted. `judged`: the server knows payloads."""

    judged: bool
    kinds: Collection[str] = ()
    start: int = 0


def _no_constant(name: str) -> Value:
    raise Malformed(f"{name} is not JSON")


_DECODER = json.JSONDecoder(
    object_pairs_hook=lambda pairs: ("{", pairs),
    parse_int=lambda spelling: ("#", spelling),
    parse_float=lambda spelling: ("#", spelling),
    parse_constant=_no_constant,
)


def decode(body: bytes, depth: int = MAX_DEPTH) -> Value:
    """Raises Malformed for what is not UTF-8, not JSON or deeper than `depth` levels."""
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise Malformed("not UTF-8") from error
    except ValueError as error:
        raise Malformed(f"not JSON: {error}") from error
    except RecursionError as error:
        raise Malformed("nests too deep to be read") from error
    if _depth(body) > depth:
        raise Malformed(f"nests deeper than {depth}")
    return value


def _depth(body: bytes) -> int:
    """How deep sound JSON nests, what a duplicate key hides included."""
    brackets = _STRING.sub(b"", body).translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0)


def is_object(value: Value) -> bool:
    """Is it a JSON object, as this module decodes one?"""
    return isinstance(value, tuple) and value[0] == "{"


def get(value: Value, name: str) -> Value:
    """The last value of that key, as JSON readers take it; None where it is absent or `value` is no object."""
    if not is_object(value):
        return None
    return next((inner for key, inner in reversed(value[1]) if key == name), None)


def has(value: Value, name: str) -> bool:
    """Is there such a key, whatever its value?"""
    return is_object(value) and any(key == name for key, _ in value[1])


def spell(value: Value) -> str:
    """JSON text of a decoded value, numbers as they were."""
    if isinstance(value, list):
        return "[" + ",".join(map(spell, value)) + "]"
    if isinstance(value, tuple):
        if value[0] == "#":
            return str(value[1])
        return "{" + ",".join(f"{json.dumps(key)}:{spell(inner)}" for key, inner in value[1]) + "}"
    return json.dumps(value)


def integer(value: Value, what: str) -> int:
    """Raises Malformed for floats, however whole, bools and the rest."""
    if not (isinstance(value, tuple) and value[0] == "#" and _INTEGER.fullmatch(value[1])):
        raise Malformed(f"{what} is not an integer")
    return int(value[1])


def _token_id(value: Value) -> int:
    number = integer(value, "a token id")
    if not 0 <= number <= MAX_ID:
        raise Malformed("a token id is out of range")
    return number


def _logprob(value: Value) -> float:
    if not (isinstance(value, tuple) and value[0] == "#"):
        raise Malformed("a logprob is not a number")
    number = float(value[1])
    if not MISSING < number <= MAX_LOGPROB:
        raise Malformed("a logprob is infinite, a stand-in or over 0")
    return number


def _list(value: Value, what: str) -> list[Value]:
    if not isinstance(value, list):
        raise Malformed(f"{what} is not a list")
    return value


def _object(value: Value, what: str) -> Value:
    if not is_object(value):
        raise Malformed(f"{what} is not an object")
    return value


def read(body: bytes, demand: Demand) -> Reading:
    """Raises Malformed with the first rule that the reply breaks."""
    root = _object(decode(body), "the reply")
    choices = _list(get(root, "choices"), "choices")
    if len(choices) != 1:
        raise Malformed("choices does not hold one choice")
    choice = _object(choices[0], "the choice")
    vllm = not has(choice, "meta_info") and (has(choice, "token_ids") or get(root, "prompt_token_ids") is not None)
    reading = _vllm(root, choice) if vllm else _sglang(root, choice)
    reading.root = root
    _check_message(reading)
    _check_copies(reading, choice)
    for place in (root, choice, reading.message, get(root, "usage")):
        _check_once(place)
    if demand.judged:
        homes = [choice] if vllm else [get(choice, "meta_info"), get(root, "sglext")]
        _read_payloads(reading, homes, demand)
    return reading


def _check_copies(reading: Reading, choice: Value) -> None:
    """What the reply says more than once of its prompt and its output."""
    meta, usage = get(choice, "meta_info"), get(reading.root, "usage")
    for home in (reading.root, choice, meta):
        copy = get(home, "prompt_token_ids")
        if copy is not None and _prompt(copy) != reading.prompt:
            raise Malformed("two copies of the prompt's ids differ")
    for name in ("response_token_ids", "token_ids"):
        copy = get(choice, name)
        if copy is not None and [_token_id(item) for item in _list(copy, name)] != reading.output:
            raise Malformed(f"{name} is not the output's ids")
    for home in (meta, usage):
        count = get(home, "prompt_tokens")
        if count is not None and integer(count, "prompt_tokens") != len(reading.prompt):
            raise Malformed("prompt_tokens is not the number of the prompt's ids")


def _check_once(value: Value) -> None:
    """A key that stands twice says the same each time."""
    found: dict[str, Value] = {}
    for key, inner in value[1] if is_object(value) else ():
        plain = _last(inner)
        if found.setdefault(key, plain) != plain:
            raise Malformed("a key stands twice, with different values")


def _last(value: Value) -> Value:
    """As a reader of JSON has it: of a key that stands twice the last value, in no order."""
    if is_object(value):
        return {key: _last(inner) for key, inner in value[1]}
    return [_last(inner) for inner in value] if isinstance(value, list) else value


def _sglang(root: Value, choice: Value) -> Reading:
    meta = _object(get(choice, "meta_info"), "meta_info")
    names = [name for name, _ in meta[1]]
    if len(set(names)) != len(names):
        raise Malformed("duplicate keys in meta_info")
    entries = [_list(entry, "an entry") for entry in _list(get(meta, "output_token_logprobs"), "the logprobs")]
    if any(len(entry) < 2 for entry in entries):
        raise Malformed("an entry has fewer than two items")
    output = [_token_id(entry[1]) for entry in entries]
    logprobs = [_logprob(entry[0]) for entry in entries]
    _count(get(meta, "completion_tokens"), len(output))
    reason = get(choice, "finish_reason")
    if reason is None:
        reason = get(meta, "finish_reason")
        reason = get(reason, "type") if is_object(reason) else reason
    return Reading(
        dialect="sglang",
        prompt=_prompt(get(choice, "prompt_token_ids")),
        output=output,
        logprobs=logprobs,
        versions=_versions(root, get(meta, "weight_versions"), get(meta, "weight_version"), len(output)),
        finish_reason=_reason(reason),
        message=get(choice, "message"),
    )


def _vllm(root: Value, choice: Value) -> Reading:
    output = [_token_id(item) for item in _list(get(choice, "token_ids"), "token_ids")]
    holder = _object(get(choice, "logprobs"), "logprobs")
    if len(dict(holder[1])) != len(holder[1]):
        raise Malformed("duplicate keys in logprobs")
    content = _list(get(holder, "content"), "logprobs.content")
    logprobs = [_logprob(get(_object(entry, "an entry"), "logprob")) for entry in content]
    if len(logprobs) != len(output):
        raise Malformed("as many logprobs as token ids are needed")
    _count(get(_object(get(root, "usage"), "usage"), "completion_tokens"), len(output))
    return Reading(
        dialect="vllm",
        prompt=_prompt(get(root, "prompt_token_ids")),
        output=output,
        logprobs=logprobs,
        versions=_versions(root, get(choice, "weight_versions"), None, len(output)),
        finish_reason=_reason(get(choice, "finish_reason")),
        message=get(choice, "message"),
    )


def _prompt(value: Value) -> list[int]:
    return [_token_id(item) for item in _list(value, "the prompt's ids")]


def _count(value: Value, found: int) -> None:
    if integer(value, "completion_tokens") != found:
        raise Malformed("completion_tokens is not the number of entries")


def _reason(value: Value) -> str | None:
    if value is not None and not isinstance(value, str):
        raise Malformed("finish_reason is not a string")
    return value


def _versions(root: Value, spans: Value, version: Value, tokens: int) -> list[str]:
    """Spans, in `meta_info` or vLLM's choice, win over the single version, that in `meta_info` over `metadata`'s."""
    if spans is not None:
        versions: list[str] = []
        for span in _list(spans, "weight_versions"):
            version = get(_object(span, "a span"), "version")
            start, end = integer(get(span, "start"), "a span's start"), integer(get(span, "end"), "a span's end")
            if not isinstance(version, str) or start != len(versions) or not start <= end <= tokens:
                raise Malformed("weight_versions do not cover the output in order")
            versions += [version] * (end - start)
        if len(versions) != tokens:
            raise Malformed("weight_versions do not cover the output")
        return versions
    if version is None:
        version = get(get(root, "metadata"), "weight_version")
    if version is None:
        return ["unknown"] * tokens
    if isinstance(version, tuple) and version[0] == "#":
        version = str(integer(version, "weight_version"))
    if not isinstance(version, str):
        raise Malformed("weight_version is not a string")
    return [version] * tokens


def _check_message(reading: Reading) -> None:
    message = _object(reading.message, "message")
    content = get(message, "content")
    if content is None:
        instead = [get(message, name) for name in ("tool_calls", "reasoning_content", "reasoning")]
        if reading.output and not any(instead):
            raise Malformed("message has nothing in it")
    elif not isinstance(content, str):
        raise Malformed("content is not a string")


def _read_payloads(reading: Reading, homes: list[Value], demand: Demand) -> None:
    """The first home that has a payload counts; a second copy must be the same, which is not looked at here."""
    total = len(reading.prompt) + len(reading.output) - 1
    for kind in KINDS:
        value = next((found for home in homes if (found := get(home, kind)) is not None), None)
        if value is not None:
            start = demand.start if kind == "routed_experts" else 0
            npy = reading.dialect == "vllm"
            reading.payloads[kind] = read_payload(value, kind, max(total - start, 0), start, npy)
        elif kind in demand.kinds and reading.output and not (kind == "indexer_topk" and reading.dialect == "vllm"):
            raise Malformed(f"{kind} was asked for and is not there")
