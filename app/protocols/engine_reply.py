"""What every rendering reads of an engine's committed reply, in either dialect. It was validated before its commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from app.protocols.pieces import tokens_of


class Counts(msgspec.Struct, frozen=True):
    """Numbers of tokens. `cached` are those of the prompt that the engine did not compute again."""

    prompt: int
    cached: int
    sampled: int
    reasoning: int


class ReplyFields(msgspec.Struct, frozen=True):
    """`matched` is the stop string or token that ended the generation."""

    message: dict[str, Any]
    finish_reason: str | None
    matched: Any
    model: str
    created: int
    counts: Counts


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: Any = None
    matched_stop: Any = None
    stop_reason: Any = None
    meta_info: msgspec.Raw = msgspec.Raw(b"null")


class _Reply(msgspec.Struct):
    choices: list[_Choice]
    created: Any = None
    model: Any = None
    usage: Any = None


class _Meta(msgspec.Struct):
    """SGLang's counts."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    cached_tokens: Any = None
    finish_reason: Any = None


_REPLY = msgspec.json.Decoder(_Reply)
_META = msgspec.json.Decoder(_Meta)


def read_reply(body: bytes) -> ReplyFields:
    """A chat's reply. Ids and logprobs, which may be long, are skipped."""
    decoded = _REPLY.decode(body)
    choice = decoded.choices[0]
    meta = _META.decode(choice.meta_info) if bytes(choice.meta_info).lstrip()[:1] == b"{" else _Meta()
    created = decoded.created if isinstance(decoded.created, int | float) else 0
    reason = choice.finish_reason
    if reason is None:
        reason = meta.finish_reason.get("type") if isinstance(meta.finish_reason, dict) else meta.finish_reason
    return ReplyFields(
        choice.message,
        reason if isinstance(reason, str) else None,
        choice.matched_stop if choice.matched_stop is not None else choice.stop_reason,
        decoded.model if isinstance(decoded.model, str) else "",
        int(created),
        _counts(object_of(decoded.usage), meta),
    )


Bytes = bytes


class TokenLogprob(msgspec.Struct):
    """An entry of a chat's `logprobs`, or of its `top_logprobs`."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TokenLogprob] | None = None

    def spelled(self) -> Bytes:
        """The token's bytes; none if the engine gives numbers that are no bytes."""
        try:
            return self.token.encode() if self.bytes is None else Bytes(self.bytes)
        except ValueError:
            return b""


class _Logprobs(msgspec.Struct):
    content: list[TokenLogprob] | None = None


class _LogprobChoice(msgspec.Struct):
    logprobs: _Logprobs | None = None


class _LogprobReply(msgspec.Struct):
    choices: list[_LogprobChoice]


_LOGPROBS = msgspec.json.Decoder(_LogprobReply)


def text_logprobs(body: bytes, text: str) -> list[dict[str, Any]]:
    """The logprobs of the tokens that make up `text`, which ends the reply's own text, as Responses spells them; none
    where it is no run of whole tokens."""
    [choice] = _LOGPROBS.decode(body).choices
    tokens = (None if choice.logprobs is None else choice.logprobs.content) or []
    place = tokens_of(text, [token.spelled() for token in tokens])
    if place is None:
        return []
    return [
        {**_shown(token), "top_logprobs": [_shown(one) for one in token.top_logprobs or ()]}
        for token in tokens[slice(*place)]
    ]


def _shown(one: TokenLogprob) -> dict[str, Any]:
    spelled = one.spelled()
    return {"token": spelled.decode("utf-8", "replace"), "bytes": list(spelled), "logprob": one.logprob}


def reasoning_of(message: Mapping[str, Any]) -> str:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return reasoning if isinstance(reasoning, str) else ""


def _counts(usage: dict[str, Any], meta: _Meta) -> Counts:
    cached = object_of(usage.get("prompt_tokens_details")).get("cached_tokens")
    reasoning = object_of(usage.get("completion_tokens_details")).get("reasoning_tokens")
    prompt = _count(usage.get("prompt_tokens"), meta.prompt_tokens)
    return Counts(
        prompt,
        min(prompt, _count(meta.cached_tokens, cached)),
        _count(usage.get("completion_tokens"), meta.completion_tokens),
        _count(reasoning, usage.get("reasoning_tokens")),
    )


def object_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(*values: Any) -> int:
    """The first value that is a count, else 0."""
    return next((value for value in values if type(value) is int and value >= 0), 0)
