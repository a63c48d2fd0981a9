"""Describes the routes that generate, which are not FastAPI routes: OpenAI's bodies, with the fields that Turnlog
reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from app.api.describe import (
    ANYTHING,
    BODY,
    ENGINE,
    EVENTS,
    JSON,
    PAYLOADS,
    SESSION,
    TEXT,
    WRITE,
    Errors,
    Schema,
    listed,
    record,
    ref,
)
from app.api.header_sessions import AGENT, FINAL, HARNESSES, PARENT
from app.api.openapi.schemas import error_replies, header
from app.api.replies import LEFT_OUT, ROLLED_BACK
from app.domain.patterns import ID
from app.errors import (
    ClaimLost,
    GenerationAborted,
    HistoryMismatch,
    IdempotencyMismatch,
    PreviousResponseNotFound,
    RollbackTooDeep,
    SessionBusy,
    SessionOpenFailed,
    TokenPrefixMismatch,
    TooManySessions,
    TooManyTurns,
    Unsupported,
    WorkerCrash,
)
from app.protocols.base import WireProtocol
from app.protocols.registry import PROTOCOLS

ERRORS: Errors = (
    *BODY,
    Unsupported,
    RollbackTooDeep,
    HistoryMismatch,
    PreviousResponseNotFound,
    *SESSION,
    TooManySessions,
    TooManyTurns,
    SessionBusy,
    ClaimLost,
    IdempotencyMismatch,
    *ENGINE,
    WorkerCrash,
    SessionOpenFailed,
    GenerationAborted,
    *WRITE,
    *PAYLOADS,
    TokenPrefixMismatch,
)

SCHEMAS: Mapping[str, Schema] = {
    **{protocol.schema["title"]: dict(protocol.schema) for protocol in PROTOCOLS.values()},
    "TurnReply": {
        **record("The engine's reply as it came: one choice.", choices=listed(ANYTHING)),
        "additionalProperties": True,
    },
}

_SESSION_ID: Schema = {
    "name": "session_id",
    "in": "path",
    "required": True,
    "description": "A session's id.",
    "schema": {"type": "string", "pattern": ID},
}

TURN_HEADERS: Mapping[str, str] = {
    "idempotency-key": "With the key of a committed turn: that turn's reply again; of the turn in flight: joins it.",
    "x-stainless-retry-count": "Sent by the OpenAI SDKs: 1 or more marks a retry of the same body.",
    "x-request-id": "The client's own name for the request; the reply repeats it.",
}

TOLD = ("x-turnlog-turn", "x-turnlog-replayed", ROLLED_BACK, LEFT_OUT)
"""The headers of a turn's reply."""


def paths(common: Errors, security: list[dict[str, list[str]]], responses: dict[str, Schema]) -> dict[str, Schema]:
    """Each route that generates, with the session in the path or in a header; `common` are the errors of all routes.

    The error replies are added to `responses`.
    """
    errors = error_replies((*ERRORS, *common), responses, engines_too=True)
    found: dict[str, Schema] = {}
    for protocol in PROTOCOLS.values():
        in_path = "/sessions/{session_id}" + protocol.route
        names = (
            f"One turn, {protocol.name}",
            f"One turn, {protocol.name}, of the session that a header, its token or the body names",
        )
        for path, summary, parameters, told in (
            (in_path, names[0], [_SESSION_ID], TOLD),
            (protocol.route, names[1], _session_headers(), (*TOLD, HARNESSES[0].session)),
        ):
            turn = {"summary": summary, **_turn(protocol, parameters, told, errors), "security": security}
            found[path] = {"post": turn}
    return found


def _turn(protocol: WireProtocol, parameters: list[Schema], told: Sequence[str], errors: Schema) -> Schema:
    body = {"schema": ref(protocol.schema["title"]), "example": protocol.example}
    reply = ref("TurnReply") if protocol.is_native else ANYTHING
    return {
        "tags": ["Turns"],
        "parameters": [*parameters, *(_header(name, text) for name, text in TURN_HEADERS.items())],
        "requestBody": {"required": True, "content": {JSON: body}},
        "responses": {
            "200": {
                "description": "The turn is on disk, and this is the engine's reply, as the protocol spells it.",
                "headers": {name: header(name) for name in told},
                "content": {JSON: {"schema": reply}, EVENTS: {"schema": {}}},
            },
            **errors,
        },
    }


def _header(name: str, description: str) -> Schema:
    return {"name": name, "in": "header", "required": False, "description": description, "schema": TEXT}


def _session_headers() -> list[Schema]:
    """The first header that is present names the session."""
    named = [(harness.session, "Names the session, which is created on first use.") for harness in HARNESSES]
    others = [
        (AGENT, "An agent of the session: a branch of it, or a session of its own."),
        (PARENT, "The session whose agent made this one's."),
        (FINAL, "`true`: close the session after this turn."),
    ]
    return [_header(name, text) for name, text in (*named, *others)]
