"""The schemas of replies and errors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from pydantic import BaseModel

from app.api.describe import (
    ANYTHING,
    BOOLEAN,
    COMPONENTS,
    COUNT,
    NUMBER,
    TEXT,
    Schema,
    listed,
    nullable,
    record,
    ref,
)
from app.api.describe import JSON as JSON
from app.api.session_lists import ListedSession
from app.domain.fleet import Regression
from app.errors import AppError, EnginesFailed
from app.export.feed import Group
from app.fleet.pauses import AdapterState, FleetGate, Told
from app.sessions.group_list import GroupPage
from app.sessions.search import SearchPage
from app.sessions.tree_view import Tree
from app.store.groups import Acknowledged

RESPONSES = "#/components/responses/"

REPLY_HEADERS: Mapping[str, str] = {
    "x-turnlog-turn": "The number of the turn that this reply is.",
    "x-turnlog-replayed": "`true` where nothing was generated: the reply came from the log or from the turn in flight.",
    "x-turnlog-rolled-back": "How many turns this one superseded when it committed; absent where it is none.",
    "x-turnlog-left-out": "What of the request the engine was not sent, as `code:place`; absent where that is nothing.",
    "x-turnlog-session-id": "The session that was made for a request that named none (`TURNLOG_WITHOUT_SESSION`).",
    "x-turnlog-cursor": "Repeats this export.",
    "x-turnlog-next-cursor": "Goes on behind the whole export.",
    "x-turnlog-dtype": "`uint8`, `uint16`, `int16` or `int32`.",
    "x-turnlog-shape": "A JSON list, rows first.",
    "x-turnlog-row-start": "Which token the first row belongs to.",
    "x-turnlog-reply-bytes": "The size of the whole reply.",
    "content-disposition": "A file's name.",
    "x-should-retry": "`false` where the same request can only fail again, `true` where it should be sent again.",
    "retry-after": "Seconds after which to try again.",
    "www-authenticate": "`Bearer`.",
}

_ERROR = record(
    "What the OpenAI SDKs read. `code` is stable; `message` holds ids, lengths and limits, never content.",
    message=TEXT,
    type=TEXT,
    code=TEXT,
    param={"type": "null"},
)

_TOLD = {"type": "object", "additionalProperties": ref("Told"), "description": "How each engine took the order."}

_BY_HAND: Mapping[str, Schema] = {
    "Error": record("An error.", error=_ERROR),
    "EngineError": {**ANYTHING, "description": "The engine's own error, unchanged."},
    "TokenCount": record("Anthropic's; an engine may add fields.", input_tokens=COUNT),
    "Root": record("Paths on this server.", service=TEXT, page=TEXT, routes=TEXT, health=TEXT),
    "CreatedSession": record(
        "A session. `base_url` is a path on this server; `url` is the session's whole address, without `/v1`; `token` "
        "is present if the server requires tokens.",
        optional=["token"],
        session_id=TEXT,
        base_url=TEXT,
        url=TEXT,
        token=TEXT,
    ),
    "ForkedSessions": record("The new sessions.", sessions=listed(ref("CreatedSession"))),
    "PayloadsMoved": record(
        "A step of a move: how many chunks it moved, how many stay because their packs are gone or damaged, the bytes, "
        "and where the next step begins.",
        moved=COUNT,
        lost=COUNT,
        bytes=COUNT,
        after=nullable(record("The last chunk of the step.", session_id=TEXT, fence=COUNT, number=COUNT)),
    ),
    "SessionPage": record(
        "Some sessions. With `count`, `total` is the number of matches up to 100,000, beyond which `total_is_exact` is "
        "false. With a metadata filter both are those of this page, which may be short though more pages follow.",
        optional=["total", "total_is_exact"],
        sessions=listed(ref("ListedSession")),
        next_cursor=nullable(TEXT),
        total=COUNT,
        total_is_exact=BOOLEAN,
    ),
    "SessionState": {
        **record(
            "The session after event `seq` of `last_seq`. Turns carry the times of their stages; `state` is what the "
            "session is doing; `tree` is null where there is at most one branch.",
            session_id=TEXT,
            seq=COUNT,
            last_seq=COUNT,
            status=TEXT,
            state=TEXT,
            erased=BOOLEAN,
            config=ANYTHING,
            fork=nullable(ANYTHING),
            metadata=nullable(ANYTHING),
            created_at=NUMBER,
            closed_at=nullable(NUMBER),
            reward=nullable(ANYTHING),
            turn_rewards=ANYTHING,
            affinity=nullable(ANYTHING),
            open_turns=listed(ANYTHING),
            tree=nullable(ref("Tree")),
            turns=listed(ANYTHING),
            failed=listed(ANYTHING),
            rollbacks=listed(ANYTHING),
            problems=listed(ANYTHING),
        ),
    },
    "Record": record(
        "A live turn. `left_out` is what of the client's request the engine was not sent, where that is something.",
        optional=["left_out"],
        left_out=listed(TEXT),
        timestamp=NUMBER,
        request_timestamp=NUMBER,
        method=TEXT,
        path=TEXT,
        status_code={"type": "integer"},
        request=ANYTHING,
        response=ANYTHING,
    ),
    "SessionRecords": record(
        "A session's live turns, its current state, and the arguments of its creation.",
        session_id=TEXT,
        records=listed(ref("Record")),
        metadata=ref("SessionMetadata"),
        session=ref("SessionGiven"),
    ),
    "SessionGiven": record(
        "The fields of `POST /sessions`, with their defaults, and the session's note and tags; only a fork has "
        "`forked_from`.",
        optional=["forked_from"],
        session_id=TEXT,
        group_id=nullable(TEXT),
        attempt=nullable(COUNT),
        metadata=ANYTHING,
        rollback_window=COUNT,
        retain=TEXT,
        history=nullable(TEXT),
        on_divergence=TEXT,
        on_drift=TEXT,
        matcher=TEXT,
        adapter=nullable(TEXT),
        on_abort=nullable(TEXT),
        stream_mode=TEXT,
        params=nullable(ANYTHING),
        model=nullable(TEXT),
        params_mode=TEXT,
        evaluation=BOOLEAN,
        parent_session_id=nullable(TEXT),
        note=nullable(TEXT),
        tags=listed(TEXT),
        forked_from=record(
            "The source session and the turn after which the fork begins.",
            session_id=TEXT,
            turn=COUNT,
            parent_loss=BOOLEAN,
        ),
    ),
    "SessionMetadata": record(
        "`accumulated_token_ids` are those of the newest turn, prompt and output. `tito_session_mismatch` is present "
        "if the server has a tokenizer, `tree` if the session's history is one.",
        optional=["tito_session_mismatch", "tree"],
        accumulated_token_ids=listed({"type": "integer"}),
        max_trim_tokens=COUNT,
        status=TEXT,
        version=COUNT,
        group_id=nullable(TEXT),
        attempt=nullable(COUNT),
        reward=nullable(NUMBER),
        tito_session_mismatch=nullable(listed(ANYTHING)),
        tree=record(
            "The turns in the order of their commits, and those whose tokens no other continues.",
            nodes=listed(ANYTHING),
            leaves=listed(ANYTHING),
        ),
    ),
    "Event": {
        **record("An event of a session's log, and its own fields.", seq=COUNT, type=TEXT, at=NUMBER),
        "additionalProperties": True,
    },
    "LogLine": {
        **record(
            "An event with its session and its own fields. `error`: the event cannot be read, and what is not known is "
            "null. A line of `position` alone: up to there no other event matches.",
            optional=["session_id", "seq", "type", "at", "error"],
            position=TEXT,
            session_id=nullable(TEXT),
            seq=nullable(COUNT),
            type=nullable(TEXT),
            at=nullable(NUMBER),
            error=TEXT,
        ),
        "additionalProperties": True,
    },
    "Noted": record("The event that holds the note or tags.", session_id=TEXT, seq=COUNT),
    "Rewarded": record("The event that assigned the reward.", session_id=TEXT, seq=COUNT),
    "Engine": record(
        "An engine: its state in the pool, and its health as seen by the answering process.",
        url=TEXT,
        state={"enum": ["serving", "draining"]},
        source={"enum": ["settings", "admin"]},
        health={"enum": ["unknown", "healthy", "busy", "paused", "dead"]},
        since=nullable(NUMBER),
        last_error=nullable(TEXT),
        in_flight=COUNT,
        dialect=nullable({"enum": ["sglang", "vllm"]}),
        weight_version=nullable(TEXT),
        weight_version_regressed=nullable(ref("Regression")),
        sessions=nullable(TEXT),
        token_ids=nullable({"enum": ["input_ids", "kv_transfer_params", "none"]}),
        logprobs_of=nullable({"enum": ["raw", "scaled", "processed", "logits"]}),
    ),
    "EngineList": record(
        "`version` counts the events of the fleet's log.", engines=listed(ref("Engine")), version=COUNT
    ),
    "Checkpoint": record(
        "A named cut over all sessions and groups. `sessions` and `groups` count what is in it, `erased` the sessions "
        "whose content has been erased since. A checkpoint with `restores` keeps what the store was before it was "
        "taken back to that one; `state` is `restoring` until that is done.",
        name=TEXT,
        state={"enum": ["made", "restoring"]},
        cut={"enum": ["now", "drain", "restore"]},
        created_at=NUMBER,
        sessions=COUNT,
        groups=COUNT,
        restores=nullable(TEXT),
        erased=COUNT,
    ),
    "CheckpointList": record("All checkpoints.", checkpoints=listed(ref("Checkpoint"))),
    "RestoredStore": record(
        "The store is what it was at checkpoint `name`; `before` is the checkpoint of what it was instead. `sessions` "
        "were changed, of which `set_aside` had been created later. `erased` are sessions of the checkpoint whose "
        "content is gone, `unreadable` damaged ones, left as they are. `epoch` is the store's new one.",
        name=TEXT,
        before=TEXT,
        epoch=TEXT,
        sessions=COUNT,
        set_aside=COUNT,
        erased=listed(TEXT),
        unreadable=listed(TEXT),
    ),
    "AdapterList": record("The adapters that a trainer has named.", adapters=listed(ref("AdapterState"))),
    "AdapterPaused": {
        "allOf": [
            ref("AdapterState"),
            record(
                "`aborted` are the rids of the aborted generations.", aborted=listed(TEXT), count=COUNT, engines=_TOLD
            ),
        ]
    },
    "FleetTold": {"allOf": [ref("FleetGate"), record("", engines=_TOLD)]},
    "EnginesFailed": {"allOf": [ref("Error"), record("The gate's state beside the error.", engines=_TOLD)]},
    "LoraAborted": record("", status=TEXT, aborted=listed(TEXT), count=COUNT),
    "LoraResumed": record("", status=TEXT),
    "LoraWaited": record("", paused=BOOLEAN),
    "Health": record(
        "Turns in flight, and counters of the writer and the worker pool. `session_server_instance_id` names the "
        "process, until it ends.",
        status={"const": "ok"},
        session_server_instance_id=TEXT,
        in_flight=COUNT,
        writer={"type": "object", "additionalProperties": COUNT},
        pool={"type": "object", "additionalProperties": COUNT},
    ),
    "Readiness": record(
        "`checks` says what is missing. `read_only` is why a process that has just started cannot write. "
        "`warnings` are those about the settings.",
        status={"enum": ["ready", "not_ready"]},
        checks=record("", database=BOOLEAN, writable=BOOLEAN, pool=BOOLEAN, engine=BOOLEAN),
        read_only=nullable(TEXT),
        warnings=listed(TEXT),
    ),
    "Row": {
        **ANYTHING,
        "description": "A training row in the requested shape: docs/export.md.",
    },
    "HandedOut": record(
        "A group with its rows; with `explain`, also objects of `group_id` and `excluded` for waiting groups.",
        group_id=TEXT,
        attempts=listed(ANYTHING),
        lease_until=NUMBER,
        handed_out=COUNT,
        statistics=nullable(ref("Statistics")),
        staleness=nullable({"type": "integer"}),
        staleness_unknown=nullable(TEXT),
        rows=listed(ref("Row")),
        excluded=listed(ANYTHING),
    ),
    "SignedIn": record("", signed_in=BOOLEAN),
}


def _generated() -> dict[str, Schema]:
    """The schemas of the types that replies are made of."""
    kinds = (ListedSession, AdapterState, FleetGate, Told, Group, GroupPage, SearchPage, Acknowledged, Regression, Tree)
    found: dict[str, Schema] = msgspec.json.schema_components(kinds, ref_template=COMPONENTS + "{name}")[1]
    return found


def of_model(model: type[BaseModel], into: dict[str, Schema]) -> Schema:
    """The schema of a request body, added to the components."""
    schema = model.model_json_schema(ref_template=COMPONENTS + "{model}")
    into.update(schema.pop("$defs", {}))
    into[model.__name__] = schema
    return ref(model.__name__)


def components() -> dict[str, Schema]:
    return {**_generated(), **_BY_HAND}


def error_replies(
    errors: Iterable[type[AppError]], into: dict[str, Schema], *, engines_too: bool = False
) -> dict[str, Schema]:
    """The error replies by status, added to the components.

    `engines_too`: an engine's own error may have the same status, or any other.
    """
    by_status: dict[int, dict[str, type[AppError]]] = {}
    for error in errors:
        by_status.setdefault(error.status, {})[error.code] = error
    replies = {}
    for status, by_code in sorted(by_status.items()):
        name = "_or_".join([*sorted(by_code), *(["engine_error"] if engines_too else [])])
        into[name] = _error_reply(by_code, engines_too)
        replies[str(status)] = {"$ref": RESPONSES + name}
    if engines_too:
        into["engine_error"] = _ENGINES_OWN
        replies["default"] = {"$ref": RESPONSES + "engine_error"}
    return replies


_ENGINES_OWN: Schema = {
    "description": "The engine's own error, with its status and body.",
    "content": {"*/*": {"schema": {}}},
}


def _error_reply(by_code: Mapping[str, type[AppError]], engines_too: bool) -> Schema:
    narrowed: Schema = {"properties": {"error": {"properties": {"code": {"enum": sorted(by_code)}}}}}
    named = "EnginesFailed" if EnginesFailed.code in by_code else "Error"
    schema: Schema = {"allOf": [ref(named), narrowed]}
    headers = {name: header(name) for kind in by_code.values() for name in kind("").headers() if name in REPLY_HEADERS}
    return {
        "description": "; ".join(f"`{code}`: {by_code[code].meaning}" for code in sorted(by_code)),
        **({"headers": headers} if headers else {}),
        "content": {JSON: {"schema": {"anyOf": [schema, ref("EngineError")]} if engines_too else schema}},
    }


def header(name: str) -> Schema:
    return {"description": REPLY_HEADERS[name], "schema": TEXT}
