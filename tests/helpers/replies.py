"""Sound replies of both engines on both routes, and what a test changes in them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from workers import parse
from workers.parse import KnownTokens, Protocol, token_text
from workers.reply import DialectChoice, Job, LogprobsOf, Speculative, VersionSpan
from workers.top_logprobs import LogprobWish

Reply = dict[str, Any]
Changes = dict[str, Any]
"""What to put where: the path has dots between names and numbers; the value may be `GONE` or raw `Text`."""

GONE = object()
DEEP = "[" * 150 + "]" * 150
NUMBERS = ["-1", "0", "7", "2.0", "1e999", "NaN", "-9999", "1e3", str(2**31), str(2**70), "9" * 5000]
NESTED = ["[]", "{}", "[[]]", "[-1,3]", "[[-1,3],[-2,4]]", '{"a":1,"a":2}', '{"role":"assistant"}', DEEP]
JUNK = ["null", "true", "tru", "", '""', '"x"', '"\\ud800"', '"\\u0000"', *NUMBERS, *NESTED]
BYTES = [*(bytes([byte]) for byte in b'"{}[],:0-\\\xff\x00 '), b"", b"e9", b"1e999", b"NaN", b"true"]


class Text:
    """Raw JSON that `json.dumps` would not write."""

    def __init__(self, raw: str | bytes) -> None:
        self.raw = raw.encode() if isinstance(raw, str) else raw

    def __repr__(self) -> str:
        return self.raw[:40].decode(errors="replace")


def sglang(prompt: list[int] | None = None, output: list[int] | None = None, logprobs: Any = None) -> Reply:
    prompt, output, logprobs = _tokens(prompt, output, logprobs)
    entries = [[logprob, token, None] for logprob, token in zip(logprobs, output, strict=True)]
    meta = {
        "id": "r1",
        "finish_reason": {"type": "stop", "matched": 7},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(output),
        "weight_version": "12",
        "output_token_logprobs": entries,
    }
    message = {"role": "assistant", "content": "hé", "reasoning_content": None, "tool_calls": None}
    more = {"logprobs": None, "matched_stop": 7, "prompt_token_ids": prompt, "meta_info": meta}
    reply = _reply("chat.completion", {"message": message, **more}, prompt, output)
    return {**reply, "metadata": {"weight_version": "12"}}


def vllm(prompt: list[int] | None = None, output: list[int] | None = None, logprobs: Any = None) -> Reply:
    prompt, output, logprobs = _tokens(prompt, output, logprobs)
    content = [{"token": "t", "logprob": value, "bytes": None, "top_logprobs": []} for value in logprobs]
    message: Reply = {"role": "assistant", "content": "hé", "reasoning": None, "tool_calls": []}
    more = {"logprobs": {"content": content}, "stop_reason": None, "token_ids": output}
    reply = _reply("chat.completion", {"message": message, **more}, prompt, output)
    return {**reply, "prompt_token_ids": prompt}


def _completion(vllm: bool) -> Reply:
    prompt, output, values = _tokens(None, None, None)
    top = [{"h": -0.25}, {"é": -1}] if vllm else []
    offset = [0, 1] if vllm else [-1, -1]
    logprobs = {"text_offset": offset, "token_logprobs": values, "tokens": ["h", "é"], "top_logprobs": top}
    more: Reply = {"matched_stop": 7}
    if vllm:
        more = dict.fromkeys(("stop_reason", "prompt_logprobs", "routed_experts", "weight_versions"))
    choice = {"text": "hé", "logprobs": logprobs, "token_ids": output, "prompt_token_ids": prompt, **more}
    reply = _reply("text_completion", choice, prompt, output)
    return {**reply, **({"kv_transfer_params": None} if vllm else {"metadata": {"weight_version": "12"}})}


def _tokens(prompt: list[int] | None, output: list[int] | None, logprobs: Any) -> tuple[list[int], list[int], Any]:
    prompt = [1, 2, 3] if prompt is None else prompt
    output = [10, 11] if output is None else output
    return prompt, output, [-0.25, *[-1] * len(output)][: len(output)] if logprobs is None else logprobs


def _reply(kind: str, choice: Reply, prompt: list[int], output: list[int]) -> Reply:
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(output), "total_tokens": len(prompt) + len(output)}
    choices = [{"index": 0, "finish_reason": "stop", **choice}]
    return {"id": "r1", "object": kind, "created": 1, "model": "m", "choices": choices, "usage": usage}


CHATS = {"sglang": sglang(), "vllm": vllm()}
COMPLETIONS = {"sglang completion": _completion(vllm=False), "vllm completion": _completion(vllm=True)}
SHAPES = {**CHATS, **COMPLETIONS}


def body_of(reply: str | Reply, *changes: Changes, separators: tuple[str, str] = (", ", ": ")) -> bytes:
    """The body of one of SHAPES, or of a reply, with changes."""
    made = copy.deepcopy(SHAPES[reply] if isinstance(reply, str) else reply)
    marks: dict[str, bytes] = {}
    for path, value in (pair for change in changes for pair in change.items()):
        *parts, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        place: Any = made
        for part in parts:
            place = place[part]
        if value is GONE:
            del place[last]
            continue
        place[last] = value
        if isinstance(value, Text):
            place[last] = f"@{len(marks)}@"
            marks[json.dumps(place[last])] = value.raw
    body = json.dumps(made, separators=separators).encode()
    for mark, raw in marks.items():
        body = body.replace(mark.encode(), raw, 1)
    return body


def mutated(reply: str | Reply, random: Random, separators: tuple[str, str] = (", ", ": ")) -> bytes:
    """Replace, drop or add at one or two random places."""
    changes: Changes = {}
    for at in random.sample(paths(SHAPES[reply] if isinstance(reply, str) else reply), random.choice([1, 2])):
        if not any(at.startswith(other + ".") or other.startswith(at + ".") for other in changes):
            added = f"{at.rpartition('.')[0]}.added".lstrip(".")
            to = added if random.randrange(4) == 0 and not at.rpartition(".")[2].isdigit() else at
            changes[to] = GONE if random.randrange(4) == 0 and to == at else Text(random.choice(JUNK))
    # From the last item of a list to the first, since one that goes moves those behind it.
    return body_of(reply, dict(sorted(changes.items(), reverse=True)), separators=separators)


def doubled(reply: Reply | str, path: str, pair: tuple[str, str], first: bool, separators: tuple[str, str]) -> bytes:
    """The reply, in one of whose objects a pair of a key and a value stands before or behind all others."""
    place: Any = SHAPES[reply] if isinstance(reply, str) else reply
    for part in path.split(".") if path else ():
        place = place[int(part) if part.isdigit() else part]
    text = json.dumps(place, separators=separators)
    both = [separators[1].join(pair), text[1:-1]]
    doubled = Text("{" + separators[0].join(both if first else reversed(both)) + "}")
    return body_of(reply, {path: doubled}, separators=separators) if path else doubled.raw


def paths(value: Any, path: str = "") -> list[str]:
    """Every place in a reply, but itself."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(f"{path}{key}", child) for key, child in children]
    return [one for at, child in found for one in (at, *paths(child, f"{at}."))]


def known_as(ids: Sequence[int]) -> KnownTokens:
    text = token_text(ids)
    return KnownTokens(len(ids), len(text), hashlib.sha256(text).hexdigest())


class Parsed(NamedTuple):
    """What the rules say of a reply."""

    dialect: str
    message: bytes
    prompt_text: bytes
    base: int
    suffix_ids: bytes
    output_ids: bytes
    logprobs: bytes
    sequence: KnownTokens
    finish_reason: str | None
    weight_versions: list[VersionSpan]
    payloads: list[tuple[str, bytes]]
    cached_tokens: int | None
    miscounted: str | None
    top: Any
    speculative: Speculative | None
    was_queued: bool
    logprobs_of: LogprobsOf | None


def parse_reply(
    body: bytes,
    dialect: DialectChoice,
    known: KnownTokens | None = None,
    protocol: Protocol = "chat",
    sent: bytes | None = None,
    is_part: bool = False,
    wish: LogprobWish | None = None,
) -> Parsed:
    """Raises Rejected."""
    asked = Job(dialect, known, [], [], [], 200, "", b"", protocol, sent or b"", is_part=is_part, wish=wish)
    parsed = parse.parse_reply(body, asked)
    reply, tokens, prompt = parsed.reply, parsed.tokens, parsed.prompt
    assert tokens.output_ids == reply.output_ids
    return Parsed(
        reply.dialect,
        reply.message,
        b"" if prompt is None else prompt.text,
        reply.base,
        tokens.suffix_ids,
        tokens.output_ids,
        tokens.logprobs,
        reply.sequence,
        reply.finish_reason,
        list(reply.weight_versions),
        [(kind, bytes(raw)) for kind, raw in parsed.payloads],
        reply.cached_tokens,
        reply.miscounted,
        tokens.top,
        reply.speculative,
        parsed.was_queued,
        reply.logprobs_of,
    )
