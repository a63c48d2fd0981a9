"""Describes the routes that generate, which are not FastAPI routes: OpenAI's bodies, with the fields that Turnlog
reads."""

from __future__ import annotations

from collections.abc import Mapping

from app.api.describe import (
    ANYTHING,
    BODY,
    BOOLEAN,
    ENGINE,
    EVENTS,
    JSON,
    SESSION,
    TEXT,
    WRITE,
    Errors,
    Schema,
    listed,
    nullable,
    record,
    ref,
)
from app.api.header_sessions import AGENT, FINAL, HARNESSES, PARENT
from app.api.openapi.schemas import error_replies, header
from app.api.replies import ROLLED_BACK
from app.domain.patterns import ID
from app.errors import (
    ClaimLost,
    GenerationAborted,
    HistoryMismatch,
    IdempotencyMismatch,
    RollbackTooDeep,
    SessionBusy,
    SessionOpenFailed,
    TokenPrefixMismatch,
    TooManySessions,
    Unsupported,
    WorkerCrash,
)
from app.fleet.engines import PATHS

ERRORS: Errors = (
    *BODY,
    Unsupported,
    RollbackTooDeep,
    HistoryMismatch,
    *SESSION,
    TooManySessions,
    SessionBusy,
    ClaimLost,
    IdempotencyMismatch,
    *ENGINE,
    WorkerCrash,
    SessionOpenFailed,
    GenerationAborted,
    *WRITE,
    TokenPrefixMismatch,
)

_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_IDS: Schema = {"type": "array", "items": _TOKEN_ID, "minItems": 1}
_ONE: Schema = {"const": 1}
_SINGLE: Schema = {"minItems": 1, "maxItems": 1}

_COMMON: Mapping[str, Schema] = {
    "model": {"description": "For the engine; a known adapter's name makes it the turn's adapter."},
    "stream": {**nullable(BOOLEAN), "description": "The committed reply as chunks, sent together; comments meanwhile."},
    "n": nullable(_ONE),
    "lora_path": {"maxLength": 512, "description": "The turn's adapter; beside another of the session's: 400."},
    "nvext": {"description": "`session_control` is Turnlog's, docs/fleet.md; the rest goes to the engine."},
}
"""Fields that are not listed are passed to the engine unchanged."""

SCHEMAS: Mapping[str, Schema] = {
    "Message": {
        "type": "object",
        "properties": {"role": TEXT, "content": {}, "tool_calls": {}, "tool_call_id": {}, "name": {}},
        "required": ["role"],
    },
    "ChatRequest": {
        "type": "object",
        "description": "An OpenAI chat request. Fields that Turnlog does not know go to the engine as they are.",
        "properties": {
            **_COMMON,
            "messages": {**listed(ref("Message")), "minItems": 1, "description": "The whole history, and what is new."},
            "tools": {"description": "For the engine; stored once a session."},
            "input_ids": {**nullable(_IDS), "description": "The client's own prompt ids."},
        },
        "required": ["messages"],
        "additionalProperties": True,
    },
    "CompletionRequest": {
        "type": "object",
        "description": "An OpenAI completions request. Fields that Turnlog does not know go to the engine as they are.",
        "properties": {
            **_COMMON,
            "prompt": {
                "anyOf": [TEXT, _IDS, {**listed(TEXT), **_SINGLE}, {**listed(_IDS), **_SINGLE}],
                "description": "Text or ids; a list of one such prompt is that one.",
            },
            "best_of": nullable(_ONE),
            "echo": nullable({"const": False}),
        },
        "required": ["prompt"],
        "additionalProperties": True,
    },
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

_BODIES = {"chat": "ChatRequest", "completions": "CompletionRequest"}
TOLD = ("x-turnlog-turn", "x-turnlog-replayed", ROLLED_BACK)
"""The headers of a turn's reply."""

_EXAMPLES: Mapping[str, Schema] = {
    "chat": {"model": "simulator", "messages": [{"role": "user", "content": "What is 6 times 7?"}]},
    "completions": {"model": "simulator", "prompt": "6 times 7 is", "max_tokens": 8},
}


def paths(common: Errors, security: list[dict[str, list[str]]], responses: dict[str, Schema]) -> dict[str, Schema]:
    """Each route that generates, with the session in the path or in a header; `common` are the errors of all routes.

    The error replies are added to `responses`.
    """
    errors = error_replies((*ERRORS, *common), responses, engines_too=True)
    found: dict[str, Schema] = {}
    for protocol, route in PATHS.items():
        in_path = "/sessions/{session_id}" + route
        names = f"One turn, {protocol}", f"One turn, {protocol}, of the session that a header names"
        for path, summary, parameters in ((in_path, names[0], [_SESSION_ID]), (route, names[1], _session_headers())):
            turn = {"summary": summary, **_turn(protocol, parameters, errors), "security": security}
            found[path] = {"post": turn}
    return found


def _turn(protocol: str, parameters: list[Schema], errors: Schema) -> Schema:
    body = {"schema": ref(_BODIES[protocol]), "example": _EXAMPLES[protocol]}
    return {
        "tags": ["Turns"],
        "parameters": [*parameters, *(_header(name, text) for name, text in TURN_HEADERS.items())],
        "requestBody": {"required": True, "content": {JSON: body}},
        "responses": {
            "200": {
                "description": "The turn is on disk, and this is the engine's reply.",
                "headers": {name: header(name) for name in TOLD},
                "content": {JSON: {"schema": ref("TurnReply")}, EVENTS: {"schema": {}}},
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
        (AGENT, "An agent of the session, which has a session of its own."),
        (PARENT, "The session whose agent made this one's."),
        (FINAL, "`true`: close the session after this turn."),
    ]
    return [_header(name, text) for name, text in (*named, *others)]
