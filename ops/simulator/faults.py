"""Faults on request: a table of names and of what each does to a reply."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec
import pybase64

from ops.simulator.wire import BadRequest, FaultOrder, Reply, Sim, json_reply

Edit = Callable[[dict[str, Any]], None]

# A value that JSON cannot represent is encoded as a string with this prefix, then unquoted.
_BARE = "\x07bare:"


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of the good reply: ``edits`` change its decoded object, ``bytes_of`` makes other bytes of it.

    With a ``status`` that is the answer, with ``message`` unless the order has another, and nothing is generated,
    counted or remembered, as with ``generates`` false. ``finish`` is the generation's finish reason.
    """

    edits: tuple[Edit, ...] = ()
    bytes_of: Callable[[bytes], bytes] | None = None
    status: int = 0
    message: str = ""
    delivery: Literal["whole", "drip", "reset", "never"] = "whole"
    finish: str | None = None
    generates: bool = True

    def spoil(self, reply: Reply, order: FaultOrder) -> Reply:
        """The bad reply."""
        if self.status == 307:
            return Reply((b"",), 307, ((b"location", order.location.encode()),))
        if self.status:
            message = order.message or self.message
            body = {"object": "error", "message": message, "type": "SimulatedError", "param": None, "code": self.status}
            headers = ((b"retry-after", order.retry_after.encode()),) if self.status == 429 else ()
            return replace(json_reply(body, self.status), headers=headers)
        if self.edits:
            value = msgspec.json.decode(reply.body)
            for edit in self.edits:
                edit(value)
            reply = replace(reply, parts=(_written(value),))
        if self.bytes_of:
            reply = replace(reply, parts=(self.bytes_of(reply.body),))
        match self.delivery:
            case "never":
                return replace(reply, never=True)
            case "reset":
                return replace(reply, ends_at=len(reply.body) // 2 if order.at_byte is None else order.at_byte)
            case "drip":
                whole, step = reply.body, max(1, -(-len(reply.body) // max(order.pieces, 1)))
                pieces = tuple(whole[at : at + step] for at in range(0, len(whole), step))
                return replace(reply, parts=pieces, over_s=order.delay_s * len(pieces))
        return reply


def _written(value: object) -> bytes:
    """``value`` as JSON, with the bare values unquoted."""
    first, *parts = msgspec.json.encode(value).split(b'"\\u0007bare:')
    return first + b"".join(part.replace(b'"', b"", 1) for part in parts)


def _places(reply: dict[str, Any], paths: tuple[str, ...]) -> list[tuple[Any, Any]]:
    """Those of these places that the reply has: of ``a/0`` the list that is its ``a``, and 0."""
    found = []
    for path in paths:
        holder: Any = reply
        *steps, last = [int(step) if step.lstrip("-").isdigit() else step for step in path.split("/")]
        with contextlib.suppress(LookupError, TypeError):
            for step in steps:
                holder = holder[step]
            _ = holder[last]
            found.append((holder, last))
    return found


def _put(new: object, *paths: str) -> Edit:
    """Put a value in each of these places that the reply has."""
    return _change(lambda _: new, *paths)


def _change(change: Callable[[Any], object], *paths: str) -> Edit:
    def edit(reply: dict[str, Any]) -> None:
        for holder, key in _places(reply, paths):
            holder[key] = change(holder[key])

    return edit


def _drop(*paths: str) -> Edit:
    def edit(reply: dict[str, Any]) -> None:
        for holder, key in _places(reply, paths):
            del holder[key]

    return edit


def _repeat(found: bytes, before: bytes) -> Callable[[bytes], bytes]:
    """Write ``before`` behind the first ``found``, which so repeats a key."""
    return lambda body: body.replace(found, found + before, 1)


def _repeat_meta_key(body: bytes) -> bytes:
    """In a completion, which has no ``meta_info``, in ``logprobs``."""
    if b'"object":"text_completion"' in body:
        return _repeat(b'"logprobs":{', b'"token_logprobs":[-1.0],')(body)
    return _repeat(b'"meta_info":{', b'"completion_tokens":1,')(body)


def _recut(recut: Callable[[bytes], bytes]) -> Edit:
    """The payload's bytes as ``recut`` makes them; a list loses its last."""

    def change(payload: Any) -> object:
        return (
            payload[:-1]
            if isinstance(payload, list)
            else pybase64.b64encode(recut(pybase64.b64decode(payload))).decode()
        )

    return _change(change, *_EXPERTS)


def _two_choices(value: dict[str, Any]) -> None:
    value["choices"].append({**value["choices"][0], "index": 1})


def _other_ids(value: dict[str, Any]) -> None:
    """Send ``response_token_ids`` that differ from the ids of the logprobs."""
    choice = value["choices"][0]
    entries = choice.get("meta_info", {}).get("output_token_logprobs", [])
    ids = [entry[1] for entry in entries] or choice.get("token_ids") or [0]
    choice["response_token_ids"] = [ids[0] ^ 1, *ids[1:]]


def _two_prompts(value: dict[str, Any]) -> None:
    """Send the prompt's ids in two places, the reply and the choice; one copy lacks the last token."""
    choice = value["choices"][0]
    ids = value.get("prompt_token_ids") or choice.get("prompt_token_ids") or [0]
    here, there = (value, choice) if value.get("prompt_token_ids") is None else (choice, value)
    here["prompt_token_ids"], there["prompt_token_ids"] = ids[:-1], ids


def _miscount(value: dict[str, Any]) -> None:
    """In ``meta_info``; in ``usage`` where there is none."""
    value["choices"][0].get("meta_info", value["usage"])["prompt_tokens"] += 1


def _fail(value: dict[str, Any]) -> None:
    """An error in place of a reply or, in a stream, of all chunks but the first."""
    if value.get("object") == "chat.completion.chunk" and "prompt_token_ids" in value:
        raise LookupError
    value.clear()
    value["error"] = {"message": "simulated failure", "type": "InternalServerError", "param": None, "code": 500}


def _end_with_error(value: dict[str, Any]) -> None:
    """A generation that failed, as OpenRouter and proxies tell it: with what had come of it."""
    choice = value["choices"][0]
    if choice.get("finish_reason") is None:
        raise LookupError
    choice |= {"finish_reason": "error", "error": {"code": 502, "message": "simulated idle timeout"}}


def _in_parts(text: str | None) -> list[dict[str, str]] | None:
    return text if text is None else [{"type": "text", "text": piece} for piece in (text[:1], text[1:])]


def _middle_changed(ids: list[int] | None) -> list[int] | None:
    return ids and [*ids[: len(ids) // 2], ids[len(ids) // 2] ^ 1, *ids[len(ids) // 2 + 1 :]]


_TRIPLES = "choices/0/meta_info/output_token_logprobs"
_LOGPROB = ("choices/0/logprobs/content/0/logprob", f"{_TRIPLES}/0/0", "choices/0/logprobs/token_logprobs/0")
_ID = (f"{_TRIPLES}/0/1", "choices/0/response_token_ids/0", "choices/0/token_ids/0")
_PROMPT = ("prompt_token_ids", "choices/0/prompt_token_ids")
_EXPERTS = ("sglext/routed_experts", "choices/0/meta_info/routed_experts", "choices/0/routed_experts")
_CONTENT = ("choices/0/message/content", "choices/0/delta/content", "choices/0/text")

FAULTS: dict[str, Fault] = {
    "status_500": Fault(status=500, message="simulated failure", generates=False),
    "status_503": Fault(status=503, message="simulated overload", generates=False),
    "status_529": Fault(status=529, message="simulated overload", generates=False),
    "status_429": Fault(status=429, message="simulated rate limit", generates=False),
    "status_403": Fault(status=403, message="simulated ban", generates=False),
    "status_400": Fault(status=400, message="simulated refusal", generates=False),
    "context_400": Fault(status=400, message="This model's maximum context length is 8192 tokens", generates=False),
    "redirect": Fault(status=307, generates=False),
    "empty_200": Fault(generates=False),
    "never": Fault(delivery="never", generates=False),
    "not_json": Fault(bytes_of=lambda body: b"<html>Bad gateway</html>"),
    "truncated_json": Fault(bytes_of=lambda body: body[: len(body) * 2 // 3]),
    "bad_utf8": Fault((_put("@@", *_CONTENT),), lambda body: body.replace(b"@@", b"\xff\xfe\x80")),
    "not_object": Fault(bytes_of=lambda body: b"[]"),
    "nan_logprob": Fault((_put(_BARE + "NaN", *_LOGPROB),)),
    "inf_logprob": Fault((_put(_BARE + "1e999", *_LOGPROB),)),
    "null_logprob": Fault((_put(None, *_LOGPROB),)),
    "bool_logprob": Fault((_put(True, *_LOGPROB),)),
    "positive_logprob": Fault((_put(3.5, *_LOGPROB),)),
    "minus_9999_logprob": Fault((_put(-9999.0, *_LOGPROB),)),
    "bool_id": Fault((_put(True, *_ID),)),
    "negative_id": Fault((_put(-1, *_ID),)),
    "huge_id": Fault((_put(_BARE + str(2**70), *_ID),)),
    "float_id": Fault((_put(1.5, *_ID),)),
    "missing_meta_info": Fault((_drop("sglext", "choices/0/meta_info", "choices/0/token_ids"),)),
    "missing_logprobs": Fault((_put(None, "choices/0/logprobs"), _drop(_TRIPLES))),
    "short_logprobs": Fault(
        (_drop("choices/0/logprobs/content/-1", "choices/0/logprobs/token_logprobs/-1", f"{_TRIPLES}/-1"),)
    ),
    "no_usage": Fault((_drop("usage"),)),
    "no_choices": Fault((_put([], "choices"),)),
    "two_choices": Fault((_two_choices,)),
    "message_null": Fault((_put(None, "choices/0/text", "choices/0/delta", "choices/0/message"),)),
    "other_response_ids": Fault((_other_ids,)),
    "two_prompts": Fault((_two_prompts,)),
    "usage_prompt_tokens": Fault((_change(lambda count: count + 1, "usage/prompt_tokens"),)),
    "meta_prompt_tokens": Fault((_miscount,)),
    "duplicate_choices": Fault(bytes_of=_repeat(b'"choices":[', b'],"choices":[')),
    "duplicate_prompt_ids": Fault(bytes_of=_repeat(b'"prompt_token_ids":[', b'],"prompt_token_ids":[')),
    "duplicate_meta_key": Fault(bytes_of=_repeat_meta_key),
    "deep_nesting": Fault((lambda value: value.update(nested=_BARE + "[" * 5000 + "]" * 5000),)),
    "completion_tokens_bool": Fault((_put(True, "usage/completion_tokens", "choices/0/meta_info/completion_tokens"),)),
    "missing_prompt_ids": Fault((_drop(*_PROMPT),)),
    "other_prompt": Fault((_change(_middle_changed, *_PROMPT),)),
    "bad_experts_base64": Fault((_put("not*base64!", *_EXPERTS),)),
    # One byte and an id too many: neither whole rows nor whole ids. Then one id short of whole rows.
    "misaligned_experts": Fault((_recut(lambda raw: raw + b"\0" * 5),)),
    "wrong_experts_rows": Fault((_recut(lambda raw: raw[:-4]),)),
    "error_200": Fault((_fail,)),
    "finish_error": Fault((_end_with_error,)),
    "content_parts": Fault((_change(_in_parts, *_CONTENT),)),
    "drip": Fault(delivery="drip"),
    "reset": Fault(delivery="reset"),
    "abort": Fault(finish="abort"),
}

_OF_WHOLE_STREAM = frozenset({"drip", "reset", "truncated_json", "abort"})


def spoil_stream(reply: Reply, order: FaultOrder) -> Reply:
    """A stream with the fault in each of its events, or the whole of it cut or delivered in another way."""
    fault = FAULTS[order.fault]
    if order.fault in _OF_WHOLE_STREAM:
        return fault.spoil(reply, order)
    return replace(reply, parts=tuple(_spoiled_event(part, fault, order) for part in reply.parts))


def _spoiled_event(event: bytes, fault: Fault, order: FaultOrder) -> bytes:
    """The event as it is if it has nothing that the fault is about."""
    data = event.removeprefix(b"data: ").rstrip()
    try:
        return b"data: " + fault.spoil(Reply((data,)), order).body + b"\n\n"
    except (msgspec.DecodeError, LookupError):
        return event


class FaultQueue:
    """Faults queued for the next requests. A fault that a request asks for comes first."""

    def __init__(self) -> None:
        self._waiting: deque[FaultOrder] = deque()

    def add(self, order: FaultOrder) -> None:
        """Queue ``order`` for the next ``count`` requests. Raises BadRequest."""
        self._waiting.extend([_known(order)] * order.count)

    def take(self, sim: Sim | None) -> FaultOrder | None:
        """The fault for a request, or None. Raises BadRequest."""
        asked = sim.fault if sim else None
        if asked is not None:
            return _known(FaultOrder(asked) if isinstance(asked, str) else asked)
        return self._waiting.popleft() if self._waiting else None

    def names(self) -> list[str]:
        """The names of the queued faults, in order."""
        return [order.fault for order in self._waiting]

    def clear(self) -> None:
        self._waiting.clear()


def _known(order: FaultOrder) -> FaultOrder:
    if order.fault not in FAULTS:
        known = ", ".join(sorted(FAULTS))
        raise BadRequest(f"unknown fault {order.fault[:40]!r}; known: {known}", kind="Bad Request")
    return order
