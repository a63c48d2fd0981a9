"""An engine's reply, judged and made ready to be stored; plain work on bytes, on whatever thread."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from app.domain import decide
from app.domain.events import Matcher, VersionSpan
from app.domain.history import canonical_hash, decode_message
from app.service.claims import Opening
from app.store import codec
from app.store.codec import TOKEN_BYTES
from app.upstream.client import EngineReply
from workers.parse import Parsed


class Judged(msgspec.Struct, frozen=True):
    """An engine's sound reply, ready to be committed."""

    reply: decide.Reply
    message: bytes
    facts: bytes
    wire: bytes


def judged(
    opening: Opening,
    matcher: Matcher,
    new: Sequence[bytes],
    engine: str,
    reply: EngineReply,
    parsed: Parsed,
    requested_at: float,
    rid: str | None,
) -> Judged:
    message = decode_message(parsed.message, "the reply's message")
    facts = codec.Facts(
        suffix_ids=parsed.suffix_ids,
        output_ids=parsed.output_ids,
        logprobs=parsed.logprobs,
    )
    suffix_tokens, output_tokens = len(parsed.suffix_ids) // TOKEN_BYTES, len(parsed.output_ids) // TOKEN_BYTES
    count = parsed.base + suffix_tokens
    skeleton, at, separator = codec.cut_prompt_ids(reply.body, parsed.prompt_text, count)
    wire = codec.Wire(
        messages=list(new),
        message=parsed.message,
        reply=skeleton,
        headers=reply.headers,
        status=reply.status,
        prompt_ids_at=at,
        separator=separator,
        rid=rid or "",
    )
    kept = decide.Reply(
        dialect=parsed.dialect,
        engine=engine,
        base=parsed.base,
        suffix_tokens=suffix_tokens,
        output_tokens=output_tokens,
        tokens_hash=parsed.sequence.hash,
        tokens_text_bytes=parsed.sequence.text_bytes,
        finish_reason=parsed.finish_reason,
        weight_versions=tuple(VersionSpan(span.version, span.start, span.end) for span in parsed.weight_versions),
        message_hash=canonical_hash(message, matcher),
        requested_at=requested_at,
    )
    return Judged(kept, parsed.message, codec.pack(facts), codec.pack(wire))
