"""A request for a turn, of any protocol: how its body is read, which request it repeats, and what an engine is sent.

Turnlog reads some of its fields; the rest stays raw JSON for the engine. The messages of a long body are translated
from where an earlier body had come to (`translated`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, Self, TypeVar

import msgspec

from app.domain import bounds, split
from app.domain.control import SessionControl
from app.domain.events import EngineShape, StreamMode
from app.domain.known_body import LONG_BODY, STATES, ContinuedBody, HistoryPrefix, KnownBody, State, layout_of
from app.domain.patterns import is_in_row
from app.errors import Forbidden, InvalidRequest, Unsupported
from workers import scan
from workers.parse_json import MAX_DEPTH, too_deep
from workers.parse_prompt import MAX_TOKEN_ID, TokenId
from workers.reply import REPLAY
from workers.top_logprobs import MAX_TOP


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
    request no engine is sent (`app.domain.left_out`). `beginning` is the message that begins the reply, which is none
    of `messages` (`app.domain.prefill`). `call_ids` are those of the messages' calls and results, if they are known.
    """

    shape: ClassVar[EngineShape] = "chat"
    key: ClassVar[str | None] = None

    messages: Sequence[msgspec.Raw]
    tools: bytes | None
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
    beginning: bytes | None = None
    call_ids: Sequence[str] | None = None


class CompletionRequest(msgspec.Struct, frozen=True):
    """As `ChatRequest`, with a prompt instead of messages: as `text` or as `ids`. `key` is a retry's, where the body
    has one."""

    shape: ClassVar[EngineShape] = "completions"
    refusal: ClassVar[str | None] = None
    beginning: ClassVar[bytes | None] = None

    text: str | None
    ids: TokenIds | None
    params: dict[str, msgspec.Raw]
    stream: bool
    control: SessionControl | None = None
    left_out: Sequence[str] = ()
    protocol: str = "completions"
    echo: bytes | None = None
    key: str | None = None


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
        raise InvalidRequest(f"{name} cannot be parsed") from error


def number_of(raw: bytes | msgspec.Raw) -> int | float | None:
    """The number that the JSON is; None where it is none, or one that no row holds: 1e999, an integer past 64 bits."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and is_in_row(value) else None


def as_raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def join_object(fields: Mapping[str, bytes]) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + raw for name, raw in fields.items()) + b"}"


_TOOLS_KNOWN, _TOOLS_BYTES = 64, 128 << 10
"""How many lists of tools up to which size have their hashes remembered: agents send the same ones with every turn."""


class ToolsHashes(NamedTuple):
    """Of the canonical form of a list of tools, and of its text (as hex)."""

    canonical: bytes
    text: str


def canonical_hash(request: ChatRequest | CompletionRequest, history: str) -> str:
    """The hash that identifies a retry, whatever the order of fields: 128 bits as hex.

    `history` identifies the messages or the prompt. Whether the reply is streamed does not matter.
    """
    params: list[bytes] = []
    for name, raw in sorted(request.params.items()):
        text = bytes(raw)
        params.append(name.encode() + b":" + (text if text[:1] not in b"[{" else _canonical_json(text)))
    tools = getattr(request, "tools", None)
    tools_hash = b"" if tools is None else hashes_of(tools).canonical
    parts = request.protocol.encode(), history.encode(), b",".join(params), tools_hash, b""
    hasher = hashlib.sha256(b"\0".join(parts))
    if request.ids is not None:
        hasher.update(request.ids.text)
    return hasher.hexdigest()[:32]


def _canonical_json(raw: bytes) -> bytes:
    """The value with sorted keys, if it has any; one that cannot be decoded as it is."""
    if raw[:1] not in b"[{":
        return raw
    try:
        return msgspec.json.encode(msgspec.json.decode(raw), order="sorted")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw


def hashes_of(tools: bytes) -> ToolsHashes:
    return (_remembered_hashes if len(tools) <= _TOOLS_BYTES else _hashes)(tools)


def _hashes(tools: bytes) -> ToolsHashes:
    return ToolsHashes(hashlib.sha256(_canonical_json(tools)).digest(), hashlib.sha256(tools).hexdigest())


_remembered_hashes = functools.lru_cache(_TOOLS_KNOWN)(_hashes)


SESSION_PARAMS, ENGINE_SESSION = "session_params", "session_id"
"""Fields of SGLang's requests that continue one of the engine's own sessions, whose context the reply would reveal."""

TRUSTED_ALONE = frozenset(
    {SESSION_PARAMS, "bootstrap_host", "bootstrap_port", "custom_logit_processor", "kv_transfer_params"}
)
"""Fields that let an engine join another context, connect to a given host, or run given code (SGLang, vLLM)."""

SETTABLE = frozenset({"chat_template", "extra_args", "logits_processors", "priority", "prompt_embeds", "vllm_xargs"})
"""Fields that let an engine run a chosen template or plug-in, load tensors, or change priority. An operator may allow
them (`TURNLOG_SESSION_PARAMS`)."""


def reserved(params: Mapping[str, object], allowed: Collection[str]) -> list[str]:
    """The parameters that only an admin's request may have. The operator allows some to all (`allowed`)."""
    return sorted((TRUSTED_ALONE | SETTABLE.difference(allowed)) & params.keys())


def require_own(
    request: ChatRequest | CompletionRequest, session_id: str, token_session: str, allowed: Collection[str] = ()
) -> None:
    """`session_id` is the turn's session, `token_session` the token's: the same or an ancestor. Raises Forbidden."""
    own = (session_id, token_session)
    if request.control is not None and request.control.session_id not in own:
        raise Forbidden("nvext.session_control: a session token may only name its own session")
    for name in reserved(request.params, allowed):
        if bytes(request.params[name]) != b"null":
            raise Forbidden(f"{name} requires the admin token")
    engine_session = request.params.get(ENGINE_SESSION)
    if engine_session is not None and bytes(engine_session) not in (b"null", *map(msgspec.json.encode, own)):
        raise Forbidden(f"{ENGINE_SESSION}: a session token may only name its own session")


IdsField = Literal["input_ids", "kv_transfer_params"]
"""The field of a chat's body that ids are sent in. vLLM reads the member `prompt_token_ids` of its own."""

KV_FIELD: IdsField = "kv_transfer_params"
KV_MEMBER = "prompt_token_ids"

RETURN: Mapping[str, str] = {kind: f"return_{kind}" for kind in REPLAY}
"""By kind of replay payload, the parameter that asks for it."""

FIRST_ROW_NAMES = ("routed_experts_start_len", "routed_experts_prompt_start")
"""SGLang's and vLLM's parameter to leave out the first rows of `routed_experts`."""


def chat_body(
    params: bytes,
    tools: bytes | None,
    messages: Sequence[bytes | memoryview],
    rid: str,
    own: bytes,
    ids: bytes | None,
    field: str = "input_ids",
) -> list[bytes | memoryview]:
    """A chat request as raw JSON, in parts. `params` is a non-empty JSON object; messages and the rest are spliced in.

    `own` are further members of the object, each after a comma. `ids` is the text of the prompt's ids, if they are
    sent: the engine then takes its prompt from them. `field` is the one that it reads.
    """
    in_kv = ids is not None and field == KV_FIELD
    kv = b"{"
    if in_kv and KV_FIELD.encode() in params:
        params, kv = _without_kv(params)
    parts: list[bytes | memoryview] = [params[:-1], own, b',"rid":"' + rid.encode() + b'"' if rid else b""]
    if tools is not None:
        parts.append(b',"tools":' + tools)
    parts.append(b',"messages":[')
    for place, message in enumerate(messages):
        parts += (b",", message) if place else (message,)
    parts.append(b"]")
    if ids is not None and in_kv:
        parts += [f',"{KV_FIELD}":'.encode(), kv, f'"{KV_MEMBER}":['.encode(), ids, b"]}"]
    elif ids is not None:
        parts += [b',"input_ids":[', ids, b"]"]
    parts.append(b"}")
    return parts


def _without_kv(params: bytes) -> tuple[bytes, bytes]:
    """The parameters without the client's `kv_transfer_params`, and the beginning of an object with its members."""
    fields = {name: bytes(raw) for name, raw in split.FIELDS.decode(params).items()}
    raw = fields.pop(KV_FIELD, b"null")
    kv = {} if raw[:1] != b"{" else {name: bytes(value) for name, value in split.FIELDS.decode(raw).items()}
    kv.pop(KV_MEMBER, None)
    return join_object(fields), join_object(kv)[:-1] + b"," if kv else b"{"


def completion_body(params: bytes, text: str | None, ids: bytes | None, rid: str, own: bytes) -> list[bytes]:
    """As `chat_body`, for a completion: its prompt is `text` or `ids`."""
    prompt = split.quoted(text or "") if ids is None else b"[" + ids + b"]"
    return [params[:-1], own, b',"rid":"' + rid.encode() + b'"' if rid else b"", b',"prompt":', prompt, b"}"]


MAX_ADAPTER = 512
"""Maximum length of a `lora_path`, which is stored with each turn."""

IDS = frozenset({"input_ids", "prompt"})

OURS = frozenset({"stream", "stream_options", "stream_mode", "n", "rid"})
"""Fields that Turnlog handles itself."""


_CONVERSATIONS = frozenset({"messages", "input"})

_NUMBER = tuple(b"%c" % first for first in b"-0123456789")
"""How a number begins."""

_PLAIN = 18
"""So many digits are a number that 64 bits hold."""

_TOKEN_IDS = msgspec.json.Decoder(list[TokenId])


def fields_of(
    body: bytes, has_few_values: bool = False, continued: ContinuedBody | None = None
) -> tuple[dict[str, msgspec.Raw], bool]:
    """The body's fields, and whether it may have more values than `bounds.FEW`: then they are checked before they are
    decoded. If it is continued, its conversation is none of them. Raises InvalidRequest."""
    if continued is not None:
        return dict(continued.fields), False
    many_values = len(body) > bounds.FEW and not has_few_values and scan.may_exceed(body, bounds.FEW)
    if many_values:
        bounds.require_fields(body)
    try:
        if not body.isascii():
            body.decode()
        fields = split.fields(body, _require_within_bounds) if many_values else split.FIELDS.decode(body)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not UTF-8 at byte {error.start}") from error
    except msgspec.ValidationError as error:
        raise InvalidRequest("the body must be a JSON object") from error
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(f"the body nests deeper than {MAX_DEPTH} levels") from error
    if len(fields) > bounds.MAX_FIELDS:
        raise bounds.too_many_fields()
    return fields, many_values


def _require_within_bounds(name: str, raw: bytes) -> None:
    """Raises InvalidRequest for a long field that must not be decoded; lists of ids may be long."""
    if name in _CONVERSATIONS:
        bounds.require_messages(raw)
    elif name not in IDS:
        bounds.require_field(name, raw)


def items_of(
    body: bytes, name: str, raw: msgspec.Raw | None, many_values: bool, continued: ContinuedBody | None
) -> tuple[Sequence[msgspec.Raw], KnownBody | None]:
    """The items of a conversation's list, and the layout of a long body. Raises InvalidRequest."""
    if continued is not None:
        return continued.messages, continued.layout
    if raw is None:
        raise InvalidRequest(f"{name} is missing")
    if many_values:
        bounds.require_messages(bytes(raw))
    try:
        items = split.items(bytes(raw)) if many_values else split.ITEMS.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{name} must be a list") from error
    if not items:
        raise InvalidRequest(f"{name} must not be empty")
    return items, layout_of(body, name, raw, items) if len(body) >= LONG_BODY else None


def engine_params(fields: dict[str, msgspec.Raw], many_values: bool) -> dict[str, msgspec.Raw]:
    """The fields that are passed to the engine. Raises InvalidRequest for a field that nests too deep, a number that no
    row can hold, or an invalid adapter."""
    params: dict[str, msgspec.Raw] = {}
    for name, raw in fields.items():
        if name in OURS:
            continue
        text = bytes(raw)
        if many_values:
            bounds.require_field(name, text)
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH and too_deep(text):
            raise InvalidRequest(f"{name} nests deeper than {MAX_DEPTH} levels")
        if text.startswith(_NUMBER) and (len(text) > _PLAIN or not text.isdigit()) and number_of(text) is None:
            raise InvalidRequest(f"{name} is a number that 64 bits cannot hold")
        params[name] = raw
    if "lora_path" in params:
        adapter = value_of(params["lora_path"], "lora_path")
        if isinstance(adapter, str) and (len(adapter) > MAX_ADAPTER or "\0" in adapter):
            raise InvalidRequest(f"lora_path must have at most {MAX_ADAPTER} characters, and no NUL")
    if "top_logprobs" in params or "prompt_logprobs" in params or "logprob_start_len" in params:
        for name in ("top_logprobs", "prompt_logprobs"):
            require_top(params.get(name), name)
        require_top(params.get("logprob_start_len"), "logprob_start_len", least=-1, most=MAX_TOKEN_ID)
    return params


def require_top(raw: msgspec.Raw | None, name: str, least: int = 0, most: int = MAX_TOP) -> None:
    """Raises InvalidRequest for a number that is there and not between these."""
    value = value_of(raw, name)
    if value is not None and not (type(value) is int and least <= value <= most):
        raise InvalidRequest(f"{name} must be an integer from {least} to {most}")


def token_ids(raw: msgspec.Raw | None, name: str) -> TokenIds | None:
    """Token ids. Raises InvalidRequest for an empty list or anything else."""
    text = b"null" if raw is None else bytes(raw)
    if text == b"null":
        return None
    if text[:1] != b"[" or text[-1:] != b"]" or b"-" in text:
        raise _no_ids(name)
    text = text[1:-1]
    count = 0
    for part in split.parts(text):
        try:
            size = len(_TOKEN_IDS.decode(b"[%b]" % part))
        except (msgspec.DecodeError, RecursionError) as error:
            raise _no_ids(name) from error
        if not size:
            raise _no_ids(name)
        count += size
    is_bare = not any(white in text for white in split.WHITES)
    return TokenIds(count, text if is_bare else text.translate(None, split.WHITE))


def _no_ids(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name} must be a list of token ids from 0 to {MAX_TOKEN_ID}, at least one")


def flag(raw: msgspec.Raw | None, name: str) -> bool:
    value = value_of(raw, name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise InvalidRequest(f"{name} must be true or false")


def stream_mode(fields: Mapping[str, msgspec.Raw]) -> StreamMode | None:
    """Raises InvalidRequest."""
    match value_of(fields.get("stream_mode"), "stream_mode"):
        case None | "whole" | "live" as mode:
            return mode
    raise InvalidRequest("stream_mode must be whole or live")


def require_one(raw: msgspec.Raw | None, name: str = "n") -> None:
    value = value_of(raw, name)
    if value is None or (value == 1 and isinstance(value, int) and not isinstance(value, bool)):
        return
    if isinstance(value, int) and not isinstance(value, bool) and value > 1:
        raise Unsupported(f"{name} must be 1: a session has one continuation")
    raise InvalidRequest(f"{name} must be 1")


class Translator(Protocol):
    """Reads messages one by one. What it makes of the first ones must not depend on those that follow."""

    def read(self, index: int, raw: msgspec.Raw) -> None:
        """Read the body's message `index`. Raises InvalidRequest, and Unsupported."""

    def copy(self) -> Self:
        """One that goes on from here by itself."""


T = TypeVar("T", bound=Translator)


def translated(
    translator: T, raws: Sequence[msgspec.Raw], continued: ContinuedBody | None, *, keeps_states: bool
) -> tuple[T, Sequence[State]]:
    """The translator after all of these messages, and with `keeps_states` its states after the newest ones.

    It reads only what follows a state that is known of the messages' beginning. Raises as `Translator.read`.
    """
    translation = None if continued is None else continued.known.translation
    known = () if translation is None else translation.states
    begun = None if continued is None else continued.state(known)
    read = 0
    if begun is not None:
        translator, read = begun.reader.copy(), begun.messages
    states = [state for state in known if state.messages <= read]
    for index in range(read, len(raws)):
        translator.read(index, raws[index])
        if keeps_states and index + STATES >= len(raws):
            states.append(State(index + 1, translator.copy()))
    return translator, states[-STATES:]
