"""What a trainer asks an engine's address for, where it has Turnlog's instead.

    answered                 what Turnlog knows: its engines, whether turns are held back
    passed to one engine     what every engine answers alike: its tokenizer, its model
    gated, then all engines  what changes an engine: turns are held back meanwhile
    by id                    the generations of turns that a client has named
    refused                  what is meant for one engine's ranks: sent to several, it would corrupt their group

With `x-turnlog-run` a request is about that run alone: its turns, its engines.

A path that is not listed is 404: nothing reaches an engine by default.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.parse import urlencode

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from app.api.requests import Request
from app.api.routes import ANYTHING, BODY, ENGINE, JSON, WRITE, Reply, Routes, json_reply
from app.domain.events import DEFAULT_RUN
from app.domain.fleet import PauseMode
from app.domain.session import rid_of
from app.errors import EnginesFailed, InvalidRequest, Unsupported
from app.features.gates.routes import LEASE_S, MAX_NAME, pauses_of, reply
from app.store import fleet as store
from app.turn.in_flight import hash_key
from app.upstream import headers as http_headers
from app.upstream.client import CHANGES, PASSED_GETS, PASSED_POSTS, EngineReply
from app.upstream.http import EngineError
from turnlog import replies as reply_types

if TYPE_CHECKING:
    from app.services import Services

route = Routes("As an engine")

WHOLE = sys.maxsize
"""What goes to an engine is as large as a request may be."""

UPDATE_S = 600.0
"""How long an engine may take to change its weights."""

REFUSED_GETS = (
    *("/get_world_size", "/is_sleeping", "/server_info", "/get_server_info", "/get_weights_by_name"),
    *("/weights_checker", "/release_memory_occupation", "/resume_memory_occupation"),
    *("/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info"),
)
REFUSED_POSTS = (
    *("/init_broadcaster", "/init_weights_update_group", "/destroy_weights_update_group"),
    *("/init_weight_transfer_engine", "/shutdown_weight_transfer_engine"),
    *("/start_weight_update", "/start_draft_weight_update", "/update_weights", "/finish_weight_update"),
    *("/begin_weight_update", "/end_weight_update", "/update_weights_from_distributed"),
    *("/update_weights_from_tensor", "/update_weights_from_ipc", "/load_lora_adapter_from_tensors"),
    *("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
    *("/get_weights_by_name", "/weights_checker", "/weight_checker", "/collective_rpc"),
    *("/sleep", "/wake_up", "/release_kv_cache_memory", "/release_memory_occupation", "/resume_memory_occupation"),
)
"""What is meant for one engine's ranks, weights or memory, by the method with which an engine takes it."""

ABORTS_ALL = "/abort_requests"

_QUERIES: Mapping[str, tuple[str, ...]] = {
    "/flush_cache": ("timeout",),
    "/reset_prefix_cache": ("reset_running_requests", "reset_external"),
}
"""What an engine reads in the query of a change."""

_VLLMS_MODES: Mapping[str, PauseMode] = {"abort": "abort", "keep": "in_place"}


class PauseGeneration(BaseModel):
    """The body of SGLang's `/pause_generation`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    mode: PauseMode = "abort"


class AbortRequest(BaseModel):
    """The body of SGLang's `/abort_request`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    rid: str | None = Field(default=None, max_length=MAX_NAME)
    abort_all: bool = False


class AbortRequests(BaseModel):
    """The body of vLLM's `/abort_requests` and `/inference/v1/abort_requests`."""

    model_config = ConfigDict(extra="ignore", strict=True)

    request_ids: list[str] | None = Field(default=None, max_length=4096)


class _Stamp(msgspec.Struct):
    """The version that an update gives the weights, as `/update_weights_from_disk` or `/update_weight_version` names
    it."""

    weight_version: str | None = None
    new_version: str | None = None


# answered


@route("GET, POST /ping", "Is the process alive?", "page", json_reply(ANYTHING))
async def ping(request: Request) -> dict[str, Any]:
    return {}


@route(
    "GET /workers",
    "The engines, as SGLang's router lists them",
    "page",
    json_reply(ANYTHING),
    errors=(InvalidRequest,),
    of_run="header",
)
async def workers(request: Request) -> dict[str, Any]:
    """Their own addresses: a trainer that aborts or updates each engine by itself reaches them without Turnlog."""
    urls = [member.url for member in request.services.engines.serving(request.head.run)]
    return {"workers": [{"id": url, "url": url, "worker_type": "regular"} for url in urls], "total": len(urls)}


@route(
    "GET /list_workers",
    "The engines, as older routers list them",
    "page",
    json_reply(ANYTHING),
    errors=(InvalidRequest,),
    of_run="header",
)
async def list_workers(request: Request) -> dict[str, Any]:
    return {"urls": [member.url for member in request.services.engines.serving(request.head.run)]}


@route(
    "GET /is_paused",
    "Are all turns held back?",
    "page",
    json_reply(ANYTHING),
    errors=(InvalidRequest, *WRITE),
    of_run="header",
)
async def is_paused(request: Request) -> dict[str, Any]:
    return {"is_paused": (await request.services.fleet.refresh()).is_engine_paused(request.head.run)}


# passed to one engine


@route(
    (*(f"GET {path}" for path in PASSED_GETS), *(f"POST {path}" for path in PASSED_POSTS)),
    "Ask one engine",
    "page",
    Reply("The engine's reply.", {JSON: ANYTHING}),
    errors=(*BODY, *ENGINE),
    largest=WHOLE,
    passes_engines_errors=True,
    of_run="header",
)
async def pass_on(request: Request) -> Response:
    """The answer of one engine of the run, without one of the default run, to the same request."""
    app = request.services
    path, headers = request.route.path, http_headers.to_engine((), "", app.settings.upstream_api_key)
    body = await request.whole_body() if request.method == "POST" else b""

    def ask(url: str) -> Awaitable[EngineReply]:
        return app.client.post(url + path, body, headers) if body else app.client.get(url + path, headers)

    answer = await app.engines.first_reached(app.engines.order(request.head.run or DEFAULT_RUN, ""), ask)
    return Response(answer.body.joined(), answer.status, dict(http_headers.to_client(answer.headers)))


# gated, then all engines


@route(
    "POST /pause", "vLLM's pause", "admin", json_reply(ANYTHING), errors=(*BODY, EnginesFailed, *WRITE), of_run="header"
)
async def pause(
    request: Request,
    mode: Annotated[Literal["abort", "wait", "keep"], Query(description="As vLLM has them.")] = "abort",
) -> Response:
    """As `POST /fleet/pause` with a lease of ten minutes. `wait` is 400: a turn may take hours, and the gate holds new
    ones back meanwhile."""
    if mode not in _VLLMS_MODES:
        raise Unsupported("mode must be abort or keep: waiting for the turns in flight could take hours")
    return reply(
        {"status": "paused"}, await pauses_of(request).pause_fleet(request.head.run, _VLLMS_MODES[mode], LEASE_S)
    )


@route(
    "POST /pause_generation",
    "SGLang's pause",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, EnginesFailed, *WRITE),
    body=PauseGeneration,
    optional_body=True,
    of_run="header",
)
async def pause_generation(request: Request) -> Response:
    """As `POST /fleet/pause` with a lease of ten minutes."""
    order = await request.body_of(PauseGeneration)
    return reply({"status": "ok"}, await pauses_of(request).pause_fleet(request.head.run, order.mode, LEASE_S))


@route(
    ("POST /resume", "POST /continue_generation"),
    "Resume",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, EnginesFailed, *WRITE),
    of_run="header",
)
async def resume(request: Request) -> Response:
    """As `POST /fleet/resume`, with the version of the last update through this process, if there was one."""
    pauses, run = pauses_of(request), request.head.run
    return reply({"status": "ok"}, await pauses.resume_fleet(run, pauses.updated.pop(run, None)))


@route(
    (*(f"POST {path}" for path in CHANGES), "GET /flush_cache"),
    "Change every engine",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, EnginesFailed, *WRITE),
    largest=WHOLE,
    of_run="header",
)
async def change(request: Request) -> Response:
    """Hold all turns back, send the request to every engine, and resume, unless the turns were held back before. Of a
    run, its turns and its engines; one that shares its engines has none to change."""
    app, pauses, run = request.services, pauses_of(request), request.head.run
    body = await request.whole_body()
    stamp = _stamp(body)
    members = [member.url for member in app.engines.serving(run)]
    if run is not None and not all(app.engines.members[url].run == run for url in members):
        raise Unsupported(f"run {run} has no engines of its own; those that serve it also serve other runs")
    was_shut = (await app.fleet.refresh()).gates_of(run).fleet.is_shut
    engines = {} if was_shut else await pauses.pause_fleet(run, "in_place", LEASE_S)
    try:
        if all(one["ok"] for one in engines.values()):
            path = request.route.path
            given = [(name, value) for name in _QUERIES.get(path, ()) for value in request.query_params.getlist(name)]
            engines = await _everywhere(app, members, f"{path}?{urlencode(given)}" if given else path, body)
    finally:
        is_done = all(one["ok"] for one in engines.values())
        version = stamp if is_done else None
        if was_shut:
            if version is not None:
                pauses.updated[run] = version
        else:
            await pauses.resume_fleet(run, version)
    return reply({"success": is_done, "message": f"{len(engines)} engines"}, engines)


async def _everywhere(app: Services, members: list[str], path: str, body: bytes) -> dict[str, reply_types.Told]:
    """The request's outcome at these engines."""
    headers = http_headers.to_control(app.settings.upstream_api_key)

    async def order(url: str) -> reply_types.Told:
        try:
            async with asyncio.timeout(UPDATE_S):
                reply = await app.client.post(url + path, body, headers)
        except EngineError as failed:
            return reply_types.Told(ok=False, error=f"{path}: {failed}", aborted=0)
        except TimeoutError:
            return reply_types.Told(ok=False, error=f"{path}: no answer within {UPDATE_S:g} s", aborted=0)
        error = None if reply.status == 200 else f"{path}: it answered {reply.status}"
        return reply_types.Told(ok=error is None, error=error, aborted=0)

    return dict(zip(members, await asyncio.gather(*map(order, members)), strict=True))


def _stamp(body: bytes) -> str | None:
    """Raises InvalidRequest."""
    if not body.strip():
        return None
    try:
        stamp = msgspec.json.decode(body, type=_Stamp)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("the body must be a JSON object; a weight version in it must be text") from error
    return stamp.weight_version or stamp.new_version


# by id


@route(
    "POST /abort_request",
    "Abort one generation, or all",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, *WRITE),
    body=AbortRequest,
    of_run="header",
)
async def abort_request(request: Request) -> dict[str, Any]:
    """The generation of the turn whose request had this `rid`, in any process; with `abort_all` every one."""
    order = await request.body_of(AbortRequest)
    if not order.abort_all and not order.rid:
        raise InvalidRequest("rid is missing: name one, or set abort_all to true")
    keys = None if order.abort_all else [hash_key(f"sglang_generate:{order.rid}")]
    return {"aborted": await _abort(request.services, request.head.run, keys)}


@route(
    (f"POST {ABORTS_ALL}", "POST /inference/v1/abort_requests"),
    "Abort generations by their ids, or all",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, *WRITE),
    body=AbortRequests,
    of_run="header",
)
async def abort_requests(request: Request) -> dict[str, Any]:
    """The generations of the turns whose requests had these `request_id`s, in any process. Without ids every one on
    `/abort_requests`, as in vLLM; the other route requires a list, and aborts nothing for an empty one."""
    ids = (await request.body_of(AbortRequests)).request_ids
    if request.route.path == ABORTS_ALL:
        ids = ids or None
    elif ids is None:
        raise InvalidRequest("request_ids is missing")
    keys = None if ids is None else [hash_key(f"vllm_generate:{one}") for one in ids]
    return {"status": "aborted", "aborted": await _abort(request.services, request.head.run, keys)}


async def _abort(app: Services, run: str | None, keys: list[str] | None) -> int:
    """Have the engines end these generations; what was sampled commits as aborted, if the session returns that."""
    claims = await app.database.read(partial(store.generating, run=run, keys=keys))
    await asyncio.gather(*(app.engines.abort(rid_of(*claim[:3]), claim.run) for claim in claims))
    return len(claims)


# refused


@route(
    (*(f"GET {path}" for path in REFUSED_GETS), *(f"POST {path}" for path in REFUSED_POSTS)),
    "Refused: routes of the engines themselves",
    "admin",
    json_reply(ANYTHING),
    errors=(InvalidRequest, Unsupported),
    of_run="header",
)
async def refuse(request: Request) -> Response:
    """400: the request is meant for one engine's ranks. The message names the engines' own addresses."""
    engines = (
        ", ".join(member.url for member in request.services.engines.serving(request.head.run)) or "no engine is known"
    )
    raise Unsupported(f"{request.route.path} must be sent to the engines themselves ({engines})")
