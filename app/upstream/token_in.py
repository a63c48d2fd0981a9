"""Which field of a chat's body an engine takes the prompt's ids from.

    SGLang   input_ids
    vLLM     kv_transfer_params.prompt_token_ids, which 0.32 has for decoding elsewhere than the prefill

An engine ignores the other's field, and an older build ignores its own. So it is asked once: a chat of one token has
different ids in each field, and the reply says which of them were its prompt.
"""

from __future__ import annotations

import msgspec

from app.domain.request import KV_FIELD, KV_MEMBER, IdsField
from app.errors import UpstreamInvalid
from app.upstream.client import EngineClient, EngineReply
from app.upstream.headers import Headers
from app.upstream.streams import UNREADABLE

_IDS: dict[IdsField, list[int]] = {"input_ids": [1, 2, 3], "kv_transfer_params": [1, 2, 3, 2]}
"""Ids that every vocabulary has, in numbers that no template renders the probe's message to."""

_MESSAGE = {"role": "user", "content": "This message asks an engine whether it takes its prompt from token ids."}


class ProbeRefused(Exception):
    """The engine answered the probe with an error, which says nothing about its fields."""

    def __init__(self, reply: EngineReply) -> None:
        super().__init__(f"status {reply.status}")
        self.reply = reply


class _Choice(msgspec.Struct):
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Reply(msgspec.Struct):
    """Part of either engine's reply: vLLM has the prompt's ids at its top level, SGLang on the choice."""

    choices: list[_Choice]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


_REPLY = msgspec.json.Decoder(_Reply)


async def probe(client: EngineClient, url: str, headers: Headers, model: bytes | None) -> IdsField | None:
    """Ask the engine that generates at `url`; None if it takes ids from no field. `model` is the turn's, as raw JSON.

    Raises EngineError, ProbeRefused, and UpstreamInvalid for a malformed reply.
    """
    body: dict[str, object] = {
        "messages": [_MESSAGE],
        "max_tokens": 1,
        "return_token_ids": True,
        "return_prompt_token_ids": True,
    }
    if model is not None:
        body["model"] = msgspec.Raw(model)
    with_ids = {**body, "input_ids": _IDS["input_ids"], KV_FIELD: {KV_MEMBER: _IDS[KV_FIELD]}}
    reply = await client.post(url, msgspec.json.encode(with_ids), headers)
    if reply.status in (400, 422):
        # Is it the fields that it refuses, or is there something else wrong?
        plain = await client.post(url, msgspec.json.encode(body), headers)
        if plain.status == 200:
            return None
    if reply.status >= 400:
        raise ProbeRefused(reply)
    return _field_of(reply, url)


def _field_of(reply: EngineReply, url: str) -> IdsField | None:
    """The field whose ids were the prompt. Raises UpstreamInvalid."""
    try:
        read = _REPLY.decode(reply.body.joined())
    except UNREADABLE as error:
        raise UpstreamInvalid(
            f"{url} returned a malformed reply when it was asked whether it accepts token ids"
        ) from error
    ids = read.prompt_token_ids or next((choice.prompt_token_ids for choice in read.choices), None)
    count = len(ids) if ids else None if read.usage is None else read.usage.prompt_tokens
    return next((name for name, sent in _IDS.items() if (sent == ids if ids else len(sent) == count)), None)
