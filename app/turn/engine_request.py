"""What a turn sends to an engine: parameters and tools (stored once per session), and messages or prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from app.domain.decide import TurnBlobs
from app.domain.events import BlobRef, EngineShape
from app.domain.fleet import Fleet
from app.domain.images import Image
from app.domain.request import ChatRequest, join_object, value_of
from app.domain.rids import engine_session_of
from app.domain.session import Session
from app.errors import InvalidRequest
from app.sessions import transcript
from app.settings import Settings
from app.store.log import StoredBlob
from app.turn.context import ClaimedTurn, Request
from app.upstream.dialects import (
    DialectChoice,
    asked_for,
    clients_first_row,
    complete,
    for_adapter,
    from_row,
    takes_rid,
)
from app.upstream.token_in import IdsField
from workers import codec
from workers.parse import KnownTokens


class PromptIds(msgspec.Struct, frozen=True):
    """A prompt's ids as decimal text, joined by commas. It begins with `known` if it continues the parent's tokens.

    `trimmed`: how many of the parent's last tokens are left out. `extends`: the prompt was built on the stored tokens
    and must begin with them.
    """

    text: bytes
    known: KnownTokens | None
    trimmed: int = 0
    extends: bool = False


class EngineRequestOptions(msgspec.Struct, frozen=True):
    """What a turn's request asks of the engine besides its parameters.

    `own` are raw JSON members that Turnlog adds to this request only, `first_row` the first row of `routed_experts`
    asked for, `clients` the payload kinds that the client wants. `ids_field` is the field of a chat that the prompt's
    ids are sent in, if they are. `is_part`: it continues a generation.
    """

    rid: str
    own: bytes
    first_row: int
    clients: frozenset[str]
    ids_field: IdsField | None = None
    is_part: bool = False


class SharedBlob(msgspec.Struct, frozen=True):
    """Parameters, tools, an echo or an image, which a session stores once however many turns repeat them.

    `frame` is the compressed content; None where the session was seen to have it already.
    """

    kind: Literal["params", "tools", "echo", "image"]
    raw: bytes
    hash: str
    frame: bytes | None


class EngineRequest(msgspec.Struct, frozen=True):
    """A turn's request without its messages: `params` is a JSON object, `tools` raw JSON; `shared` are both for the
    store, with the request's echo and images."""

    shape: EngineShape
    params: bytes
    tools: bytes | None
    shared: tuple[SharedBlob, ...]

    def blobs(self, session: Session) -> tuple[TurnBlobs, list[StoredBlob]]:
        """Their numbers in the session, and the rows that it does not have yet."""
        numbers: dict[str, int] = {}
        images: list[int] = []
        refs: list[BlobRef] = []
        rows: list[StoredBlob] = []
        known = {(ref.kind, ref.hash): ref.number for ref in session.blobs}
        for one in self.shared:
            number = session.images.get(one.hash) if one.kind == "image" else known.get((one.kind, one.hash))
            if number is None:
                number = session.blob_count + len(refs)
                refs.append(BlobRef(number, one.kind, len(one.raw), one.hash))
                frame = codec.compress(one.raw) if one.frame is None else one.frame
                rows.append(StoredBlob(number, one.kind, len(one.raw), one.hash, frame))
            if one.kind == "image":
                images.append(number)
            else:
                numbers[one.kind] = number
        shared = numbers["params"], numbers.get("tools"), tuple(refs), numbers.get("echo"), tuple(images)
        return TurnBlobs(*shared), rows

    def with_images(self, session: Session, images: Sequence[Image]) -> EngineRequest:
        """The request with the images of its new messages, each once."""
        distinct = {image.sha256: image.data for image in images}
        shared = (
            SharedBlob("image", data, sha256, None if sha256 in session.images else codec.compress(data))
            for sha256, data in distinct.items()
        )
        return msgspec.structs.replace(self, shared=(*self.shared, *shared))

    def body(
        self,
        options: EngineRequestOptions,
        messages: Sequence[bytes | memoryview],
        text: str | None,
        prompt: PromptIds | None,
    ) -> Sequence[bytes | memoryview]:
        """The request as raw JSON, in parts: `messages` of a chat, `text` of a completion, or the ids of either."""
        ids = None if prompt is None else prompt.text
        if self.shape == "chat":
            field = options.ids_field or "input_ids"
            return transcript.chat_body(self.params, self.tools, messages, options.rid, options.own, ids, field)
        return transcript.completion_body(self.params, text, ids, options.rid, options.own)


def engine_request(
    session: Session, request: Request, settings: Settings, adapter: str | None, engines: DialectChoice
) -> EngineRequest:
    """The request. `adapter` is the turn's. `engines` is `Engines.dialect`."""
    dialect = settings.upstream_dialect
    fields = complete(request.params, dialect, settings.replay, request.shape)
    if adapter is not None:
        fields = for_adapter(fields, adapter, engines)
    if settings.engine_session_ids and request.shape == "chat" and engines != "vllm":
        fields["session_id"] = msgspec.json.encode(engine_session_of(session.session_id))
    params = join_object(fields)
    raw_tools = request.tools if isinstance(request, ChatRequest) else None
    tools = None if raw_tools is None else bytes(raw_tools)
    known = {ref.hash for ref in session.blobs}
    shared = [_shared("params", params, known)]
    if tools is not None:
        shared.append(_shared("tools", tools, known))
    if request.echo is not None:
        shared.append(_shared("echo", request.echo, known))
    return EngineRequest(request.shape, params, tools, tuple(shared))


def _shared(kind: Literal["params", "tools", "echo"], raw: bytes, known: Collection[str]) -> SharedBlob:
    digest = hashlib.sha256(raw).hexdigest()
    return SharedBlob(kind, raw, digest, None if digest in known else codec.compress(raw))


def options_for(
    claimed: ClaimedTurn, request: Request, prompt: PromptIds | None, settings: Settings
) -> EngineRequestOptions:
    """The request's options. Rows that the parent has are not asked for again, if the operator says that engines keep
    them."""
    plan = claimed.plan
    rid = claimed.rid if takes_rid(settings.upstream_dialect) else ""
    clients = asked_for(request.params)
    if "routed_experts" not in settings.replay:
        return EngineRequestOptions(rid, b"", clients_first_row(request.params), clients)
    before = claimed.session.payload(plan.parent, "routed_experts")
    starts_new = not plan.base_messages or (prompt is not None and prompt.known is None)
    if not settings.replay_incremental:
        return EngineRequestOptions(rid, b"", 0, clients)
    if before is None or starts_new:
        return EngineRequestOptions(rid, from_row(0, settings.upstream_dialect), 0, clients)
    return EngineRequestOptions(rid, from_row(before.stop, settings.upstream_dialect), before.stop, clients)


def adapter_of(session: Session, request: Request, fleet: Fleet) -> str | None:
    """The turn's adapter: the session's, else the request's `lora_path`, else a `model` that names one.

    Raises InvalidRequest if the request names another adapter than the session's.
    """
    own = session.config.adapter or None
    model = bytes(request.params.get("model", b""))
    is_plain = not model or (model[:1] == b'"' and b"\\" not in model)
    if own is None and is_plain and not fleet.adapters and "lora_path" not in request.params:
        return None
    path = value_of(request.params.get("lora_path"), "lora_path")
    named = _adapter_in_model(value_of(request.params.get("model"), "model"), fleet)
    if own is None:
        return path if isinstance(path, str) and path else named
    for name, requested in (("lora_path", path), ("model", named)):
        if requested and requested != own:
            raise InvalidRequest(f"{name} names another adapter than the session's, which its turns are for")
    return own


def _adapter_in_model(model: Any, fleet: Fleet) -> str | None:
    """The known adapter that a `model` names, also as SGLang's `base:adapter`."""
    if not isinstance(model, str):
        return None
    return next((name for name in (model, model.partition(":")[2].strip()) if name in fleet.adapters), None)


def template_arguments(params: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    """The request's `chat_template_kwargs`. Raises InvalidRequest."""
    value = value_of(params.get("chat_template_kwargs"), "chat_template_kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("chat_template_kwargs must be an object")
    return value
