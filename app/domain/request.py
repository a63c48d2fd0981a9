"""A request for a turn, of any protocol: the fields that Turnlog reads, and the rest as raw JSON for the engine."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from app.domain.control import SessionControl
from app.domain.events import EngineShape, StreamMode
from app.domain.known_body import HistoryPrefix, KnownBody
from app.domain.patterns import is_in_row
from app.errors import Forbidden, InvalidRequest


class TokenIds(msgspec.Struct, frozen=True):
    """A prompt's ids from a client: their number, and their decimal text separated by commas."""

    count: int
    text: bytes


class ChatRequest(msgspec.Struct, frozen=True):
    """`params` are all other top-level fields, raw and in the client's order; `messages[i]` is raw JSON.

    `ids` are the prompt's ids if the client sends `input_ids`. `control` is the session control, removed from `params`.
    `protocol` is the one that the client spoke. `echo` is what its reply repeats of the request, as JSON. `proofs` are
    the turns that the messages claim to hold (`app.domain.proofs`); `continues` is the turn whose whole history stands
    before the messages, `needs` those whose replies complete them.
    `refusal` says why the request cannot begin a turn of its own; it may still repeat one. `has_object_arguments`: tool
    arguments came as objects, which clients normalise. `stream_mode` is the request's own, removed from `params`.
    `layout` is that of a long body, `prefix` what was known of its history by its bytes. `left_out` is what of the
    request no engine is sent (`app.domain.left_out`).
    """

    shape: ClassVar[EngineShape] = "chat"

    messages: Sequence[msgspec.Raw]
    tools: msgspec.Raw | None
    params: dict[str, msgspec.Raw]
    stream: bool
    ids: TokenIds | None = None
    control: SessionControl | None = None
    protocol: str = "chat"
    echo: bytes | None = None
    proofs: tuple[str, ...] = ()
    continues: str | None = None
    needs: tuple[str, ...] = ()
    refusal: str | None = None
    has_object_arguments: bool = False
    stream_mode: StreamMode | None = None
    layout: KnownBody | None = None
    prefix: HistoryPrefix | None = None
    left_out: Sequence[str] = ()


class CompletionRequest(msgspec.Struct, frozen=True):
    """As `ChatRequest`, with a prompt instead of messages: as `text` or as `ids`."""

    shape: ClassVar[EngineShape] = "completions"
    protocol: ClassVar[str] = "completions"
    echo: ClassVar[bytes | None] = None
    refusal: ClassVar[str | None] = None
    left_out: ClassVar[Sequence[str]] = ()

    text: str | None
    ids: TokenIds | None
    params: dict[str, msgspec.Raw]
    stream: bool
    control: SessionControl | None = None


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"null")


_CONTENT = msgspec.json.Decoder(_Message)


def has_more_than_text(messages: Sequence[msgspec.Raw]) -> bool:
    """Do these messages contain images or anything else that is not text?"""
    contents = (value_of(_CONTENT.decode(raw).content, "content") for raw in messages)
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") not in ("text", "refusal") for part in parts)


def value_of(raw: bytes | msgspec.Raw | None, name: str) -> Any:
    """Field `name` of a request, decoded. Raises InvalidRequest: raw JSON may hold a number that Python cannot
    represent."""
    try:
        return None if raw is None else msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not a value that can be read") from error


def number_of(raw: bytes | msgspec.Raw) -> int | float | None:
    """The number that the JSON is; None where it is none, or one that no row holds: 1e999, an integer past 64 bits."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and is_in_row(value) else None


def join_object(fields: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in fields.items()) + b"}"


_TOOLS_KNOWN, _TOOLS_BYTES = 64, 128 << 10
"""How many lists of tools up to which size have their canonical hash remembered: agents send the same ones with every
turn."""


def canonical_hash(request: ChatRequest | CompletionRequest, history: str) -> str:
    """The hash that identifies a retry, whatever the order of fields: 128 bits as hex.

    `history` identifies the messages or the prompt. Whether the reply is streamed does not matter.
    """
    params: list[bytes] = []
    for name, raw in sorted(request.params.items()):
        text = bytes(raw)
        params.append(name.encode() + b":" + (text if text[:1] not in b"[{" else _canonical_json(text)))
    tools = getattr(request, "tools", None)
    tools_hash = b"" if tools is None else _tools_hash(bytes(tools))
    ids = b"" if request.ids is None else request.ids.text
    parts = request.protocol.encode(), history.encode(), b",".join(params), tools_hash, ids
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _canonical_json(raw: bytes) -> bytes:
    """The value with sorted keys, if it has any; one that cannot be decoded as it is."""
    if raw[:1] not in b"[{":
        return raw
    try:
        return msgspec.json.encode(msgspec.json.decode(raw), order="sorted")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw


def _tools_hash(tools: bytes) -> bytes:
    return _remembered_hash(tools) if len(tools) <= _TOOLS_BYTES else _hash_of(tools)


def _hash_of(tools: bytes) -> bytes:
    return hashlib.sha256(_canonical_json(tools)).digest()


_remembered_hash = functools.lru_cache(_TOOLS_KNOWN)(_hash_of)


SESSION_PARAMS, ENGINE_SESSION = "session_params", "session_id"
"""Fields of SGLang's requests that continue one of the engine's own sessions, whose context the reply would reveal."""

TRUSTED_ALONE = frozenset(
    {SESSION_PARAMS, "bootstrap_host", "bootstrap_port", "custom_logit_processor", "kv_transfer_params"}
)
"""Fields that let an engine join another context, connect to a given host, or run given code (SGLang, vLLM)."""

SETTABLE = frozenset({"chat_template", "extra_args", "logits_processors", "priority", "prompt_embeds", "vllm_xargs"})
"""Fields that let an engine run a chosen template or plug-in, load tensors, or change priority. An operator may allow
them (`TURNLOG_SESSION_PARAMS`)."""


def require_own(
    request: ChatRequest | CompletionRequest, session_id: str, token_session: str, allowed: Collection[str] = ()
) -> None:
    """`session_id` is the turn's session, `token_session` the token's: the same or an ancestor. Raises Forbidden."""
    own = (session_id, token_session)
    if request.control is not None and request.control.session_id not in own:
        raise Forbidden("nvext.session_control: a session's token may name that session alone")
    for name in sorted((TRUSTED_ALONE | SETTABLE.difference(allowed)) & request.params.keys()):
        if bytes(request.params[name]) != b"null":
            raise Forbidden(f"{name}: not with a session's token, but with the admin's")
    engine_session = request.params.get(ENGINE_SESSION)
    if engine_session is not None and bytes(engine_session) not in (b"null", *map(msgspec.json.encode, own)):
        raise Forbidden(f"{ENGINE_SESSION}: a session's token may name that session alone")
