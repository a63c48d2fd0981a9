"""Faults on request: a table of names and the changes they make to a reply."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pybase64

from ops.simulator.wire import Delivery, FaultOrder, Reply, Sim, json_reply

Spoil = Callable[[Reply, FaultOrder], Reply]
Edit = Callable[[dict[str, Any]], None]

# A value that JSON cannot represent is encoded as a string with this prefix, then unquoted.
_BARE = "\x07bare:"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault; ``spoil`` turns the good reply into the bad one.

    If ``generates`` is False, nothing is generated, counted or remembered, and ``spoil`` gets an empty 200. ``finish``
    is the generation's finish reason.
    """

    spoil: Spoil
    generates: bool = True
    finish: str | None = None


def _bare(text: str) -> str:
    return _BARE + text


def _written(value: object) -> bytes:
    """``value`` as JSON, with the bare values unquoted."""
    parts = msgspec.json.encode(value).split(b'"\\u0007bare:')
    fixed = [parts[0]]
    for part in parts[1:]:
        text, _, rest = part.partition(b'"')
        fixed.append(text + rest)
    return b"".join(fixed)


def _edited(edit: Edit) -> Spoil:
    """A fault that changes the decoded reply."""

    def spoil(reply: Reply, order: FaultOrder) -> Reply:
        value = msgspec.json.decode(reply.body)
        edit(value)
        return reply.with_body(_written(value))

    return spoil


def _status(code: int, message: str) -> Spoil:
    def spoil(reply: Reply, order: FaultOrder) -> Reply:
        text = order.message or message
        body = {"object": "error", "message": text, "type": "SimulatedError", "param": None, "code": code}
        headers = ((b"retry-after", order.retry_after.encode()),) if code == 429 else ()
        return replace(json_reply(body, code), headers=headers)

    return spoil


def _redirect(reply: Reply, order: FaultOrder) -> Reply:
    return Reply((b"",), 307, ((b"location", order.location.encode()),))


def _bad_utf8(reply: Reply, order: FaultOrder) -> Reply:
    def edit(value: dict[str, Any]) -> None:
        choice = _choice(value)
        choice.get("message", choice)["content" if "message" in choice else "text"] = "@@broken@@"

    return reply.with_body(_edited(edit)(reply, order).body.replace(b"@@broken@@", b"\xff\xfe\x80"))


def _delivered(delivery: Delivery) -> Spoil:
    return lambda reply, order: replace(reply, delivery=delivery, order=order)


def _choice(value: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = value["choices"][0]
    return choice


def _set_logprob(logprob: object) -> Edit:
    """Set the first logprob to ``logprob`` everywhere in the reply."""

    def edit(value: dict[str, Any]) -> None:
        choice = _choice(value)
        for entry in (choice.get("logprobs") or {}).get("content", [])[:1]:
            entry["logprob"] = logprob
        for entry in choice.get("meta_info", {}).get("output_token_logprobs", [])[:1]:
            entry[0] = logprob
        (choice.get("logprobs") or {}).get("token_logprobs", [])[:1] = [logprob]

    return edit


def _set_id(token: object) -> Edit:
    """Replace the first sampled id by ``token``."""

    def edit(value: dict[str, Any]) -> None:
        choice = _choice(value)
        for entry in choice.get("meta_info", {}).get("output_token_logprobs", [])[:1]:
            entry[1] = token
        for name in ("response_token_ids", "token_ids"):
            if choice.get(name):
                choice[name][0] = token

    return edit


def _drop_meta(value: dict[str, Any]) -> None:
    """Also what a stream has in its place."""
    if value.pop("sglext", None) is not None:
        return
    choice = _choice(value)
    choice.pop("meta_info", None)
    choice.pop("token_ids", None)


def _drop_logprobs(value: dict[str, Any]) -> None:
    choice = _choice(value)
    choice["logprobs"] = None
    choice.get("meta_info", {}).pop("output_token_logprobs", None)


def _drop_usage(value: dict[str, Any]) -> None:
    value.pop("usage", None)


def _shorten_logprobs(value: dict[str, Any]) -> None:
    choice = _choice(value)
    for entries in (
        (choice.get("logprobs") or {}).get("content", []),
        (choice.get("logprobs") or {}).get("token_logprobs", []),
        choice.get("meta_info", {}).get("output_token_logprobs", []),
    ):
        del entries[-1:]


def _no_choices(value: dict[str, Any]) -> None:
    value["choices"] = []


def _two_choices(value: dict[str, Any]) -> None:
    value["choices"].append({**_choice(value), "index": 1})


def _null_message(value: dict[str, Any]) -> None:
    choice = _choice(value)
    choice[next(name for name in ("text", "delta", "message") if name in choice)] = None


def _bool_completion_tokens(value: dict[str, Any]) -> None:
    value["usage"]["completion_tokens"] = True
    if "meta_info" in _choice(value):
        _choice(value)["meta_info"]["completion_tokens"] = True


def _drop_prompt_ids(value: dict[str, Any]) -> None:
    value.pop("prompt_token_ids", None)
    _choice(value).pop("prompt_token_ids", None)


def _change_prompt_id(value: dict[str, Any]) -> None:
    """Change one id in the middle of the reported prompt."""
    for holder in (value, _choice(value)):
        ids = holder.get("prompt_token_ids")
        if ids:
            ids[len(ids) // 2] ^= 1


def _change_output_copy(value: dict[str, Any]) -> None:
    """Send ``response_token_ids`` that differ from the ids of the logprobs."""
    choice = _choice(value)
    entries = choice.get("meta_info", {}).get("output_token_logprobs", [])
    ids = [entry[1] for entry in entries] or choice.get("token_ids") or [0]
    choice["response_token_ids"] = [ids[0] ^ 1, *ids[1:]]


def _change_prompt_copy(value: dict[str, Any]) -> None:
    """Send the prompt's ids in two places, the reply and the choice; one copy lacks the last token."""
    choice = _choice(value)
    ids = value.get("prompt_token_ids") or choice.get("prompt_token_ids") or [0]
    here, there = (value, choice) if value.get("prompt_token_ids") is None else (choice, value)
    here["prompt_token_ids"], there["prompt_token_ids"] = ids[:-1], ids


def _miscount_prompt(where: str) -> Edit:
    """Add one to ``prompt_tokens``, in ``usage`` or in SGLang's ``meta_info``."""

    def edit(value: dict[str, Any]) -> None:
        home = _choice(value).get("meta_info", value["usage"]) if where == "meta_info" else value["usage"]
        home["prompt_tokens"] += 1

    return edit


def _repeat_key(key: str) -> Spoil:
    """Repeat a key of the reply or its choice; the first value is an empty list."""

    def spoil(reply: Reply, order: FaultOrder) -> Reply:
        found = b'"' + key.encode() + b'":['
        return reply.with_body(reply.body.replace(found, found + b"]," + found, 1))

    return spoil


def _nest_deeply(value: dict[str, Any]) -> None:
    value["nested"] = _bare("[" * 5000 + "]" * 5000)


def _duplicate_meta_key(reply: Reply, order: FaultOrder) -> Reply:
    """Repeat a key in ``meta_info``; in a completion, which has none, in ``logprobs``."""
    body = reply.body
    if b'"object":"text_completion"' in body:
        return reply.with_body(body.replace(b'"logprobs":{', b'"logprobs":{"token_logprobs":[-1.0],', 1))
    first = b'"meta_info":{'
    return reply.with_body(body.replace(first, first + b'"completion_tokens":1,', 1))


def _experts_holder(value: dict[str, Any]) -> dict[str, Any]:
    """The object where ``routed_experts`` belongs."""
    if "sglext" in value:
        holder: dict[str, Any] = value["sglext"]
        return holder
    choice = _choice(value)
    found: dict[str, Any] = choice.get("meta_info", choice)
    return found


def _break_experts(value: dict[str, Any]) -> None:
    _experts_holder(value)["routed_experts"] = "not*base64!"


def _recut_experts(recut: Callable[[bytes], bytes]) -> Edit:
    """The payload's bytes as ``recut`` makes them; a list loses its last."""

    def edit(value: dict[str, Any]) -> None:
        holder = _experts_holder(value)
        payload = holder.get("routed_experts")
        if isinstance(payload, list):
            del payload[-1:]
            return
        raw = pybase64.b64decode(payload) if payload else b"\0" * 8
        holder["routed_experts"] = pybase64.b64encode(recut(raw)).decode()

    return edit


def _fail(value: dict[str, Any]) -> None:
    """An error in place of a reply or, in a stream, of all chunks but the first."""
    if value.get("object") == "chat.completion.chunk" and "prompt_token_ids" in value:
        raise LookupError
    value.clear()
    value["error"] = {"message": "simulated failure", "type": "InternalServerError", "param": None, "code": 500}


def _end_with_error(value: dict[str, Any]) -> None:
    """A generation that failed, as OpenRouter and proxies tell it: with what had come of it."""
    choice = _choice(value)
    if choice.get("finish_reason") is None:
        raise LookupError
    choice["finish_reason"] = "error"
    choice["error"] = {"code": 502, "message": "simulated idle timeout"}


def _split_content(value: dict[str, Any]) -> None:
    """A content in parts of text."""
    choice = _choice(value)
    message = choice.get("message", choice.get("delta", choice))
    text = message["text" if message is choice else "content"]
    parts = [{"type": "text", "text": piece} for piece in (text[:1], text[1:])]
    message["text" if message is choice else "content"] = parts


FAULTS: dict[str, Fault] = {
    "status_500": Fault(_status(500, "simulated failure"), generates=False),
    "status_503": Fault(_status(503, "simulated overload"), generates=False),
    "status_529": Fault(_status(529, "simulated overload"), generates=False),
    "status_429": Fault(_status(429, "simulated rate limit"), generates=False),
    "status_403": Fault(_status(403, "simulated ban"), generates=False),
    "status_400": Fault(_status(400, "simulated refusal"), generates=False),
    "context_400": Fault(_status(400, "This model's maximum context length is 8192 tokens"), generates=False),
    "redirect": Fault(_redirect, generates=False),
    "empty_200": Fault(lambda reply, order: Reply((b"",)), generates=False),
    "never": Fault(_delivered(Delivery.NEVER), generates=False),
    "not_json": Fault(lambda reply, order: reply.with_body(b"<html>Bad gateway</html>")),
    "truncated_json": Fault(lambda reply, order: reply.with_body(reply.body[: len(reply.body) * 2 // 3])),
    "bad_utf8": Fault(_bad_utf8),
    "not_object": Fault(lambda reply, order: reply.with_body(b"[]")),
    "nan_logprob": Fault(_edited(_set_logprob(_bare("NaN")))),
    "inf_logprob": Fault(_edited(_set_logprob(_bare("1e999")))),
    "null_logprob": Fault(_edited(_set_logprob(None))),
    "bool_logprob": Fault(_edited(_set_logprob(True))),
    "positive_logprob": Fault(_edited(_set_logprob(3.5))),
    "minus_9999_logprob": Fault(_edited(_set_logprob(-9999.0))),
    "bool_id": Fault(_edited(_set_id(True))),
    "negative_id": Fault(_edited(_set_id(-1))),
    "huge_id": Fault(_edited(_set_id(_bare(str(2**70))))),
    "float_id": Fault(_edited(_set_id(1.5))),
    "missing_meta_info": Fault(_edited(_drop_meta)),
    "missing_logprobs": Fault(_edited(_drop_logprobs)),
    "short_logprobs": Fault(_edited(_shorten_logprobs)),
    "no_usage": Fault(_edited(_drop_usage)),
    "no_choices": Fault(_edited(_no_choices)),
    "two_choices": Fault(_edited(_two_choices)),
    "message_null": Fault(_edited(_null_message)),
    "other_response_ids": Fault(_edited(_change_output_copy)),
    "two_prompts": Fault(_edited(_change_prompt_copy)),
    "usage_prompt_tokens": Fault(_edited(_miscount_prompt("usage"))),
    "meta_prompt_tokens": Fault(_edited(_miscount_prompt("meta_info"))),
    "duplicate_choices": Fault(_repeat_key("choices")),
    "duplicate_prompt_ids": Fault(_repeat_key("prompt_token_ids")),
    "duplicate_meta_key": Fault(_duplicate_meta_key),
    "deep_nesting": Fault(_edited(_nest_deeply)),
    "completion_tokens_bool": Fault(_edited(_bool_completion_tokens)),
    "missing_prompt_ids": Fault(_edited(_drop_prompt_ids)),
    "other_prompt": Fault(_edited(_change_prompt_id)),
    "bad_experts_base64": Fault(_edited(_break_experts)),
    # One byte and an id too many: neither whole rows nor whole ids. Then one id short of whole rows.
    "misaligned_experts": Fault(_edited(_recut_experts(lambda raw: raw + b"\0" * 5))),
    "wrong_experts_rows": Fault(_edited(_recut_experts(lambda raw: raw[:-4]))),
    "error_200": Fault(_edited(_fail)),
    "finish_error": Fault(_edited(_end_with_error)),
    "content_parts": Fault(_edited(_split_content)),
    "drip": Fault(_delivered(Delivery.DRIP)),
    "reset": Fault(_delivered(Delivery.RESET)),
    "abort": Fault(lambda reply, order: reply, finish="abort"),
}


_OF_WHOLE_STREAM = frozenset({"drip", "reset", "truncated_json"})


def spoil_stream(reply: Reply, order: FaultOrder) -> Reply:
    """A stream with the fault in each of its events, or the whole of it cut or delivered in another way."""
    fault = FAULTS[order.fault]
    if order.fault in _OF_WHOLE_STREAM or fault.finish:
        return fault.spoil(reply, order)
    return replace(reply, parts=tuple(_spoiled_event(part, fault, order) for part in reply.parts))


def _spoiled_event(event: bytes, fault: Fault, order: FaultOrder) -> bytes:
    """The event as it is if it has nothing that the fault is about."""
    data = event.removeprefix(b"data: ").rstrip()
    try:
        return b"data: " + fault.spoil(Reply((data,)), order).body + b"\n\n"
    except (msgspec.DecodeError, LookupError):
        return event


class UnknownFault(Exception):
    """There is no fault with that name; the message lists the known ones."""

    def __init__(self, name: str) -> None:
        super().__init__(f"unknown fault {name[:40]!r}; known: {', '.join(sorted(FAULTS))}")


class FaultQueue:
    """Faults queued for the next requests. A fault that a request asks for comes first."""

    def __init__(self) -> None:
        self._waiting: deque[FaultOrder] = deque()

    def add(self, order: FaultOrder) -> None:
        """Queue ``order`` for the next ``count`` requests. Raises :class:`UnknownFault`."""
        if order.fault not in FAULTS:
            raise UnknownFault(order.fault)
        self._waiting.extend(replace_count(order) for _ in range(order.count))

    def take(self, sim: Sim | None) -> FaultOrder | None:
        """The fault for a request, or None. Raises :class:`UnknownFault`."""
        requested = sim.fault if sim else None
        if requested is not None:
            order = FaultOrder(requested) if isinstance(requested, str) else requested
            if order.fault not in FAULTS:
                raise UnknownFault(order.fault)
            return order
        return self._waiting.popleft() if self._waiting else None

    def names(self) -> list[str]:
        """The names of the queued faults, in order."""
        return [order.fault for order in self._waiting]

    def clear(self) -> None:
        self._waiting.clear()


def replace_count(order: FaultOrder) -> FaultOrder:
    """A copy of ``order`` for a single request."""
    return msgspec.structs.replace(order, count=1)
