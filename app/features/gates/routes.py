"""Routes that pause and resume one adapter or the whole fleet, in all runs or one, also by SkyRL's names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse

from app.api.requests import Request, disconnected
from app.api.routes import BODY, READ, WRITE, Routes, json_reply
from app.domain.fleet import PauseMode
from app.domain.patterns import ID, NO_NUL
from app.errors import EnginesFailed, InvalidRequest, NotFound, PauseEnded
from app.features.gates.pauses import Pauses, SweepResult
from turnlog import replies as reply_types

route = Routes("Fleet")

ADAPTER = "/adapters/{name:path}"
MAX_NAME = 512
MAX_LEASE_S = 86_400
LEASE_S = 600.0
"""Default lease in seconds: enough to load a checkpoint, and a trainer that dies does not hold the turns all night."""

AdapterName = Annotated[
    str,
    Path(min_length=1, max_length=MAX_NAME, pattern=NO_NUL, description="An adapter's name; slashes need no encoding."),
]
Run = Annotated[str | None, Path(pattern=ID, description="Concerns only this run's turns.")]
Lease = Annotated[float, Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)]


def _places(place: str) -> tuple[str, str]:
    """The route, and the same of one run."""
    method, _, path = place.partition(" ")
    return place, f"{method} /runs/{{run}}{path}"


def _whose(request: Request, run: str | None) -> str | None:
    """The run that the request is about: in its path, else in its header. Raises InvalidRequest."""
    return request.head.run if run is None else run


class _PauseRequest(BaseModel):
    """The body of a pause or resume; it may be empty."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PauseAdapter(_PauseRequest):
    """`renews`: the `closings` of a pause whose lease alone is extended."""

    lease_s: Lease = LEASE_S
    renews: int | None = Field(default=None, ge=1)


class PauseFleet(PauseAdapter):
    mode: PauseMode = "abort"


class ResumeAdapter(_PauseRequest):
    version: str | None = Field(default=None, min_length=1, max_length=MAX_NAME, pattern=NO_NUL)


class ResumeFleet(ResumeAdapter):
    """Also for an open gate, whose weight version it then sets."""


@route(
    _places(f"POST {ADAPTER}/pause"),
    "Pause an adapter: hold its turns and abort its generations",
    "admin",
    json_reply(reply_types.PausedAdapter, "The gate is shut, and every engine has aborted the generations."),
    errors=(*BODY, PauseEnded, EnginesFailed, *WRITE),
    body=PauseAdapter,
    optional_body=True,
    example={"lease_s": 600},
    of_run="path",
)
async def pause_adapter(request: Request, name: AdapterName, run: Run = None) -> JSONResponse:
    """Hold the adapter's turns and abort its generations, in every process and at every engine. Below a run, its turns
    and its engines alone."""
    body = await request.body_of(PauseAdapter)
    pauses = pauses_of(request)
    if body.renews is not None:
        await pauses.renew(_whose(request, run), name, body.renews, body.lease_s)
        result = SweepResult([], {})
    else:
        result = await pauses.pause_adapter(_whose(request, run), name, body.lease_s)
    state = await pauses.adapter(_whose(request, run), name)
    return reply({**state, "aborted": result.aborted, "count": len(result.aborted)}, result.engines)


@route(
    _places(f"POST {ADAPTER}/resume"),
    "Resume an adapter's turns",
    "admin",
    json_reply(reply_types.AdapterState, "The state of its gate."),
    errors=(*BODY, *WRITE),
    body=ResumeAdapter,
    optional_body=True,
    example={"version": "43"},
    of_run="path",
)
async def resume_adapter(request: Request, name: AdapterName, run: Run = None) -> Mapping[str, Any]:
    """Resume the adapter's turns. An unknown name is added to the list of adapters."""
    body = await request.body_of(ResumeAdapter)
    pauses = pauses_of(request)
    await pauses.resume_adapter(_whose(request, run), name, body.version)
    return await pauses.adapter(_whose(request, run), name)


@route(
    _places(f"GET {ADAPTER}"),
    "An adapter's gate",
    "page",
    json_reply(reply_types.AdapterState, "The state of its gate."),
    errors=(InvalidRequest, NotFound, *READ),
    of_run="path",
)
async def get_adapter(request: Request, name: AdapterName, run: Run = None) -> Mapping[str, Any]:
    return await pauses_of(request).adapter(_whose(request, run), name)


@route(
    _places("GET /adapters"),
    "List the adapters",
    "page",
    json_reply(reply_types.AdapterList, "All adapters."),
    errors=(InvalidRequest, *READ),
    of_run="path",
)
async def list_adapters(request: Request, run: Run = None) -> Mapping[str, Any]:
    return {"adapters": await pauses_of(request).adapters(_whose(request, run))}


@route(
    _places("POST /fleet/pause"),
    "Pause the fleet: hold all turns and pause every engine",
    "admin",
    json_reply(reply_types.ToldFleet, "The gate is shut, and every engine is paused."),
    errors=(*BODY, PauseEnded, EnginesFailed, *WRITE),
    body=PauseFleet,
    optional_body=True,
    example={"mode": "abort", "lease_s": 600},
    of_run="path",
)
async def pause_fleet(request: Request, run: Run = None) -> JSONResponse:
    """Hold all turns and pause every engine. Below a run, its turns and its own engines alone; at engines that also
    serve others its generations are aborted."""
    body = await request.body_of(PauseFleet)
    pauses = pauses_of(request)
    engines: dict[str, reply_types.Told] = {}
    if body.renews is not None:
        await pauses.renew(_whose(request, run), None, body.renews, body.lease_s)
    else:
        engines = await pauses.pause_fleet(_whose(request, run), body.mode, body.lease_s)
    return reply(await pauses.fleet(_whose(request, run)), engines)


@route(
    _places("POST /fleet/resume"),
    "Resume every engine and all turns",
    "admin",
    json_reply(reply_types.ToldFleet, "The gate is open, and every engine has resumed."),
    errors=(*BODY, EnginesFailed, *WRITE),
    body=ResumeFleet,
    optional_body=True,
    example={"version": "43"},
    of_run="path",
)
async def resume_fleet(request: Request, run: Run = None) -> JSONResponse:
    """Resume every engine, and all turns except those of paused adapters.

    `version` is the weight version of engines that cannot say theirs.
    """
    body = await request.body_of(ResumeFleet)
    pauses = pauses_of(request)
    engines = await pauses.resume_fleet(_whose(request, run), body.version)
    return reply(await pauses.fleet(_whose(request, run)), engines)


@route(
    _places("GET /fleet"),
    "The fleet's gate",
    "page",
    json_reply(reply_types.FleetGate, "The state of the gate."),
    errors=(InvalidRequest, *READ),
    of_run="path",
)
async def get_fleet(request: Request, run: Run = None) -> Mapping[str, Any]:
    return await pauses_of(request).fleet(_whose(request, run))


def pauses_of(request: Request) -> Pauses:
    pauses: Pauses = request.services.features["gates"]
    return pauses


def reply(state: Mapping[str, Any], engines: Mapping[str, reply_types.Told]) -> JSONResponse:
    """The gate's state and each engine's result; 502 with the same fields beside the error if an engine failed."""
    body = {**state, "engines": engines}
    failed = [url for url, result in engines.items() if not result["ok"]]
    if not failed:
        return JSONResponse(body)
    gate = "" if "paused" not in state else f"the gate is {'shut' if state['paused'] else 'open'}, but "
    why = engines[failed[0]]["error"]
    error = EnginesFailed(f"{gate}{len(failed)} of {len(engines)} engines failed: {failed[0]}: {why}")
    return JSONResponse({**error.body(), **body}, error.status, error.headers())


skyrl = Routes("SkyRL")
"""SkyRL's routes for pausing a LoRA, as its trainer and its forwarding client call them."""

MAX_WAIT_S = 3600


class Lora(BaseModel):
    """Unknown fields are ignored, since SkyRL may add some."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME, pattern=NO_NUL, strict=True)


class LoraWait(Lora):
    timeout_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, strict=True)] = 60.0


@skyrl(
    "POST /skyrl/v1/abort_lora_requests",
    "Pause the adapter",
    "admin",
    json_reply(reply_types.LoraAborted),
    errors=(*BODY, EnginesFailed, *WRITE),
    body=Lora,
    example={"lora_name": "adapter-a"},
    of_run="header",
)
async def abort_lora_requests(request: Request) -> JSONResponse:
    """The same as `POST /adapters/{name}/pause`."""
    order = await request.body_of(Lora)
    result = await pauses_of(request).pause_adapter(request.head.run, order.lora_name, LEASE_S)
    body = {"status": "ok", "aborted": result.aborted, "count": len(result.aborted)}
    if all(engine["ok"] for engine in result.engines.values()):
        return JSONResponse(body)
    return reply({**body, "status": "failed", "paused": True}, result.engines)


@skyrl(
    "POST /skyrl/v1/resume_lora_requests",
    "Resume the adapter",
    "admin",
    json_reply(reply_types.LoraResumed),
    errors=(*BODY, *WRITE),
    body=Lora,
    example={"lora_name": "adapter-a"},
    of_run="header",
)
async def resume_lora_requests(request: Request) -> dict[str, Any]:
    """The same as `POST /adapters/{name}/resume`."""
    order = await request.body_of(Lora)
    await pauses_of(request).resume_adapter(request.head.run, order.lora_name, None)
    return {"status": "ok"}


@skyrl(
    "POST /skyrl/v1/wait_lora_unpaused",
    "Wait until the adapter is not paused",
    "admin",
    json_reply(reply_types.LoraWaited, "The adapter is not paused, or the timeout has passed, or the server stops."),
    errors=BODY,
    body=LoraWait,
    example={"lora_name": "adapter-a", "timeout_s": 5},
    of_run="header",
)
async def wait_lora_unpaused(request: Request) -> dict[str, Any]:
    """Answers once the adapter is not paused, or after `timeout_s`, or when the server stops."""
    order = await request.body_of(LoraWait)
    opening = asyncio.ensure_future(pauses_of(request).gates.opens(request.head.run, order.lora_name, order.timeout_s))
    disconnect = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((opening, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return {"paused": not (opening.done() and opening.result())}
    finally:
        opening.cancel()
        disconnect.cancel()
