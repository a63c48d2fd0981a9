"""Every route: what it is for, who may, what comes back, what can go wrong.

A test holds this against the application's own routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel

from app.api.engines import PutEngine, RemoveEngine
from app.api.fleet import PauseAdapter, PauseFleet, ResumeAdapter, ResumeFleet
from app.api.groups import Acknowledgement
from app.api.openapi.schemas import ANYTHING, BINARY, BYTES, EVENTS, JSON, NDJSON, TEXT, Schema, lines, ref
from app.api.sessions import CreateSession, Reward, SamplesQuery
from app.api.signin import SignIn
from app.api.skyrl import Lora, LoraWait
from app.errors import (
    AppError,
    EnginesFailed,
    Forbidden,
    InvalidRequest,
    NotFound,
    NoUpstream,
    Overloaded,
    PayloadTombstoned,
    RequestTimeout,
    RequestTooLarge,
    SessionClosed,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    SessionUnreadable,
    StoreFull,
    StoreUnavailable,
    Unauthorized,
    Unsupported,
    UpstreamInvalid,
    UpstreamTimeout,
    UpstreamUnreachable,
)

Errors = tuple[type[AppError], ...]
Who = Literal["anyone", "session", "admin", "page"]
"""Whose token is needed, where tokens are on; `page`: the admin's, or the cookie that the page has for it."""

BODY: Errors = (InvalidRequest, RequestTimeout, RequestTooLarge, Overloaded)
READ: Errors = (StoreUnavailable,)
WRITE: Errors = (Overloaded, StoreUnavailable, StoreFull)
SESSION: Errors = (SessionNotFound, SessionClosed, SessionUnreadable)
ENGINE: Errors = (UpstreamInvalid, UpstreamUnreachable, NoUpstream, UpstreamTimeout)


class Reply(NamedTuple):
    """A success, by its media types."""

    description: str
    content: Mapping[str, Schema]
    headers: tuple[str, ...] = ()
    status: int = 200


class Operation(NamedTuple):
    """`optional_body`: none at all is the same as `{}`. `example` is a body that works."""

    summary: str
    tag: str
    who: Who
    replies: tuple[Reply, ...]
    errors: Errors = ()
    body: type[BaseModel] | None = None
    optional_body: bool = False
    example: Mapping[str, Any] | None = None
    passes_engines_errors: bool = False


def object_(name: str, description: str = "Done.") -> tuple[Reply, ...]:
    return (Reply(description, {JSON: ref(name)}),)


NOTHING = (Reply("Done.", {}, status=204),)

ROWS = Reply(
    "Rows, in the media type of the format.",
    {
        NDJSON: lines("Row"),
        "application/vnd.apache.parquet": BINARY,
        BYTES: BINARY,
        "application/vnd.msgpack": BINARY,
    },
    ("x-turnlog-cursor", "x-turnlog-next-cursor", "content-disposition"),
)

SESSIONS: Mapping[str, Operation] = {
    "POST /sessions": Operation(
        "Create a session",
        "Sessions",
        "admin",
        object_("CreatedSession", "The session, new or of an earlier request with the same body."),
        (*BODY, Unsupported, SessionClosed, SessionExists, SessionEnded, SessionUnreadable, *WRITE),
        CreateSession,
        optional_body=True,
        example={"group_id": "task-17", "attempt": 0},
    ),
    "GET /sessions": Operation(
        "List sessions, newest first", "Sessions", "page", object_("SessionPage", "A page."), (InvalidRequest, *READ)
    ),
    "GET /sessions/{session_id}": Operation(
        "The live turns, as they were sent and answered",
        "Sessions",
        "session",
        object_("SessionRecords", "The session."),
        (*SESSION, *READ),
    ),
    "DELETE /sessions/{session_id}": Operation(
        "Close the session, or erase it",
        "Sessions",
        "session",
        NOTHING,
        (InvalidRequest, *SESSION, *WRITE),
    ),
    "PUT /sessions/{session_id}/reward": Operation(
        "Assign the reward of the session, or of one of its turns",
        "Sessions",
        "session",
        object_("Rewarded"),
        (*BODY, *SESSION, *WRITE),
        Reward,
        example={"reward": 1.0, "components": {"tests": 1.0}},
    ),
    "POST /sessions/{session_id}/samples": Operation(
        "The session's samples as safetensors",
        "Sessions",
        "session",
        (Reply("A safetensors file; docs/api.md says what is in it.", {BYTES: BINARY}),),
        (*BODY, *SESSION, *READ),
        SamplesQuery,
        optional_body=True,
        example={"max_seq_len": 32768},
    ),
    "GET /sessions/{session_id}/events": Operation(
        "The session's log",
        "Sessions",
        "session",
        (Reply("Events.", {NDJSON: lines("Event")}),),
        (InvalidRequest, SessionNotFound, SessionUnreadable, *READ),
    ),
    "GET /sessions/{session_id}/turns/{turn}/{kind}": Operation(
        "A turn's replay payload",
        "Sessions",
        "session",
        (
            Reply(
                "Its rows as raw little-endian ids.",
                {BYTES: BINARY},
                ("x-turnlog-dtype", "x-turnlog-shape", "x-turnlog-row-start"),
            ),
        ),
        (InvalidRequest, *SESSION, NotFound, PayloadTombstoned, *READ),
    ),
    "GET /sessions/{session_id}/rejected/{fence}": Operation(
        "The beginning of an engine's reply that was refused",
        "Sessions",
        "session",
        (Reply("Its first 256 KiB.", {BYTES: BINARY}, ("x-turnlog-reply-bytes",)),),
        (InvalidRequest, SessionNotFound, NotFound, SessionUnreadable, *READ),
    ),
    "GET /sessions/{session_id}/v1/models": Operation(
        "What the session's engine serves",
        "Turns",
        "session",
        (Reply("The engine's reply.", {JSON: ANYTHING}),),
        (*SESSION, *READ, *ENGINE),
        passes_engines_errors=True,
    ),
    "GET /v1/models": Operation(
        "What an engine serves",
        "Turns",
        "session",
        (Reply("The engine's reply.", {JSON: ANYTHING}),),
        ENGINE,
        passes_engines_errors=True,
    ),
}

EXPORTS: Mapping[str, Operation] = {
    "GET /export": Operation("Training rows", "Export", "page", (ROWS,), (InvalidRequest, Unsupported, *READ)),
    "GET /export/groups": Operation(
        "Hand out complete groups, leased to a consumer",
        "Export",
        "admin",
        (Reply("A group a line, none where there is none.", {NDJSON: lines("HandedOut")}),),
        (InvalidRequest, *WRITE),
    ),
    "POST /export/groups/ack": Operation(
        "Mark groups as consumed, for good",
        "Export",
        "admin",
        object_("Acknowledged", "What became of each."),
        (*BODY, *WRITE),
        Acknowledgement,
        example={"consumer": "trainer-0", "groups": ["task-17"]},
    ),
    "GET /groups/{group_id}": Operation(
        "A group's sessions, and the statistics of their rewards",
        "Export",
        "page",
        object_("Group", "The group."),
        (InvalidRequest, NotFound, *READ),
    ),
}

FLEET: Mapping[str, Operation] = {
    "GET /engines": Operation("The engines", "Fleet", "page", object_("EngineList", "All of them.")),
    "POST /engines": Operation(
        "Add an engine, bring one back, or drain one",
        "Fleet",
        "admin",
        object_("Engine", "The engine as it is listed."),
        (*BODY, *WRITE),
        PutEngine,
        example={"url": "http://127.0.0.1:30000"},
    ),
    "DELETE /engines": Operation(
        "Take an engine out of the pool",
        "Fleet",
        "admin",
        NOTHING,
        (*BODY, NotFound, *WRITE),
        RemoveEngine,
        optional_body=True,
    ),
    "GET /adapters": Operation("The adapters", "Fleet", "page", object_("AdapterList", "All of them."), READ),
    "GET /adapters/{name}": Operation(
        "An adapter's gate", "Fleet", "page", object_("AdapterState", "How it is."), (InvalidRequest, NotFound, *READ)
    ),
    "POST /adapters/{name}/pause": Operation(
        "Hold an adapter's turns back and abort its generations",
        "Fleet",
        "admin",
        object_("AdapterPaused", "The gate is shut, and every engine took the order."),
        (*BODY, EnginesFailed, *WRITE),
        PauseAdapter,
        optional_body=True,
        example={"lease_s": 600},
    ),
    "POST /adapters/{name}/resume": Operation(
        "Let an adapter's turns go on",
        "Fleet",
        "admin",
        object_("AdapterState", "How its gate is now."),
        (*BODY, *WRITE),
        ResumeAdapter,
        optional_body=True,
        example={"version": "43"},
    ),
    "GET /fleet": Operation("The gate of all turns", "Fleet", "page", object_("FleetGate", "How it is."), READ),
    "POST /fleet/pause": Operation(
        "Hold all turns back and have every engine pause",
        "Fleet",
        "admin",
        object_("FleetTold", "The gate is shut, and every engine took the order."),
        (*BODY, EnginesFailed, *WRITE),
        PauseFleet,
        optional_body=True,
        example={"mode": "abort", "lease_s": 600},
    ),
    "POST /fleet/resume": Operation(
        "Have every engine go on, and let turns pass",
        "Fleet",
        "admin",
        object_("FleetTold", "The gate is open, and every engine took the order."),
        (*BODY, EnginesFailed, *WRITE),
        ResumeFleet,
        optional_body=True,
    ),
    "POST /skyrl/v1/abort_lora_requests": Operation(
        "As pausing the adapter",
        "SkyRL",
        "admin",
        object_("LoraAborted"),
        (*BODY, EnginesFailed, *WRITE),
        Lora,
        example={"lora_name": "adapter-a"},
    ),
    "POST /skyrl/v1/resume_lora_requests": Operation(
        "As resuming the adapter",
        "SkyRL",
        "admin",
        object_("LoraResumed"),
        (*BODY, *WRITE),
        Lora,
        example={"lora_name": "adapter-a"},
    ),
    "POST /skyrl/v1/wait_lora_unpaused": Operation(
        "Wait until the adapter is not paused",
        "SkyRL",
        "admin",
        object_("LoraWaited", "It is not paused, or the time was up, or the server stops."),
        BODY,
        LoraWait,
        example={"lora_name": "adapter-a", "timeout_s": 5},
    ),
}

SERVICE: Mapping[str, Operation] = {
    "GET /health": Operation(
        "Does the process answer? Waits for nothing", "Service", "anyone", object_("Health", "It does.")
    ),
    "GET /ready": Operation(
        "Can a turn be taken?",
        "Service",
        "anyone",
        (
            Reply("It can.", {JSON: ref("Readiness")}),
            Reply("It cannot; `checks` says why.", {JSON: ref("Readiness")}, status=503),
        ),
    ),
    "GET /metrics": Operation("Metrics for Prometheus", "Service", "page", (Reply("Metrics.", {"text/plain": TEXT}),)),
    "GET /openapi.json": Operation("This document", "Service", "page", (Reply("OpenAPI 3.1.", {JSON: ANYTHING}),)),
}

_HTML: Mapping[str, Schema] = {"text/html": TEXT}

PAGE: Mapping[str, Operation] = {
    "GET /ui": Operation("The web page", "Page", "anyone", (Reply("It.", _HTML),), (Forbidden, NotFound)),
    "GET /ui/static/{name}": Operation(
        "The web page's files",
        "Page",
        "anyone",
        (Reply("A file.", {"text/html": TEXT, "text/css": TEXT, "text/javascript": TEXT, "image/svg+xml": TEXT}),),
        (Forbidden, NotFound),
    ),
    "POST /ui/sign-in": Operation(
        "A cookie for the admin token",
        "Page",
        "anyone",
        object_("SignedIn", "`set-cookie`, where a token is needed."),
        (*BODY, Unauthorized, Forbidden),
        SignIn,
        example={"token": "…"},
    ),
    "POST /ui/sign-out": Operation("Forget the cookie", "Page", "anyone", object_("SignedIn"), (Forbidden,)),
    "GET /ui/api/live": Operation(
        "Changes as they come", "Page", "page", (Reply("Server-sent events.", {EVENTS: {}}),), READ
    ),
}

OPERATIONS: Mapping[str, Operation] = {**SESSIONS, **EXPORTS, **FLEET, **SERVICE, **PAGE}
"""By method and path."""

PAGES_OWN = Operation(
    "For the page",
    "Page",
    "page",
    (Reply("What the page shows.", {JSON: ANYTHING}),),
    (InvalidRequest, NotFound, *SESSION, *READ),
)
"""What lies under `/ui/api/`: it goes with the page's files and may change with them."""
