"""Routes of pausing: one adapter, or the whole fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.bodies import body_of
from app.api.describe import BODY, READ, WRITE, describe, json_reply
from app.api.path_names import ANY
from app.api.state import services
from app.domain.fleet import PauseMode
from app.domain.patterns import NO_NUL
from app.errors import EnginesFailed, InvalidRequest, NotFound
from app.fleet.pauses import Told

router = APIRouter(tags=["Fleet"])

ADAPTER = f"/adapters/{{name:{ANY}}}"
MAX_NAME = 512
MAX_LEASE_S = 86_400
LEASE_S = 600.0
"""Longer than a checkpoint takes to load, short enough that a night is not lost to a trainer that died."""

AdapterName = Annotated[
    str,
    Path(
        min_length=1,
        max_length=MAX_NAME,
        pattern=NO_NUL,
        description="An adapter's name; slashes may stand in it as they are.",
    ),
]
Lease = Annotated[float, Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)]


class _PauseRequest(BaseModel):
    """The body of an order, which may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PauseAdapter(_PauseRequest):
    lease_s: Lease = LEASE_S


class PauseFleet(_PauseRequest):
    lease_s: Lease = LEASE_S
    mode: PauseMode = "abort"


class ResumeAdapter(_PauseRequest):
    version: str | None = Field(default=None, min_length=1, max_length=MAX_NAME, pattern=NO_NUL)


class ResumeFleet(_PauseRequest):
    pass


@router.post(ADAPTER + "/pause")
@describe(
    "Hold an adapter's turns back and abort its generations",
    "admin",
    json_reply("AdapterPaused", "The gate is shut, and every engine took the order."),
    errors=(*BODY, EnginesFailed, *WRITE),
    body=PauseAdapter,
    optional_body=True,
    example={"lease_s": 600},
)
async def pause_adapter(request: Request, name: AdapterName) -> JSONResponse:
    """Hold the adapter's turns back and abort its generations, in every process and at every engine."""
    order = await body_of(request, PauseAdapter, is_optional=True)
    pauses = services(request).pauses
    swept = await pauses.pause_adapter(name, order.lease_s)
    state = msgspec.to_builtins(await pauses.adapter(name))
    return reported({**state, "aborted": swept.aborted, "count": len(swept.aborted)}, swept.engines)


@router.post(ADAPTER + "/resume")
@describe(
    "Let an adapter's turns go on",
    "admin",
    json_reply("AdapterState", "How its gate is now."),
    errors=(*BODY, *WRITE),
    body=ResumeAdapter,
    optional_body=True,
    example={"version": "43"},
)
async def resume_adapter(request: Request, name: AdapterName) -> dict[str, Any]:
    """Let the adapter's turns go on; a name that is new is known from now on."""
    order = await body_of(request, ResumeAdapter, is_optional=True)
    pauses = services(request).pauses
    await pauses.resume_adapter(name, order.version)
    found: dict[str, Any] = msgspec.to_builtins(await pauses.adapter(name))
    return found


@router.get(ADAPTER)
@describe(
    "An adapter's gate", "page", json_reply("AdapterState", "How it is."), errors=(InvalidRequest, NotFound, *READ)
)
async def get_adapter(request: Request, name: AdapterName) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(await services(request).pauses.adapter(name))
    return found


@router.get("/adapters")
@describe("The adapters", "page", json_reply("AdapterList", "All of them."), errors=READ)
async def list_adapters(request: Request) -> dict[str, Any]:
    return {"adapters": msgspec.to_builtins(await services(request).pauses.adapters())}


@router.post("/fleet/pause")
@describe(
    "Hold all turns back and have every engine pause",
    "admin",
    json_reply("FleetTold", "The gate is shut, and every engine took the order."),
    errors=(*BODY, EnginesFailed, *WRITE),
    body=PauseFleet,
    optional_body=True,
    example={"mode": "abort", "lease_s": 600},
)
async def pause_fleet(request: Request) -> JSONResponse:
    """Hold all turns back and have every engine pause."""
    order = await body_of(request, PauseFleet, is_optional=True)
    pauses = services(request).pauses
    engines = await pauses.pause_fleet(order.mode, order.lease_s)
    return reported(msgspec.to_builtins(await pauses.fleet()), engines)


@router.post("/fleet/resume")
@describe(
    "Have every engine go on, and let turns pass",
    "admin",
    json_reply("FleetTold", "The gate is open, and every engine took the order."),
    errors=(*BODY, EnginesFailed, *WRITE),
    body=ResumeFleet,
    optional_body=True,
)
async def resume_fleet(request: Request) -> JSONResponse:
    """Have every engine go on, and let all turns pass but those of paused adapters."""
    await body_of(request, ResumeFleet, is_optional=True)
    pauses = services(request).pauses
    engines = await pauses.resume_fleet()
    return reported(msgspec.to_builtins(await pauses.fleet()), engines)


@router.get("/fleet")
@describe("The gate of all turns", "page", json_reply("FleetGate", "How it is."), errors=READ)
async def get_fleet(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(await services(request).pauses.fleet())
    return found


def reported(state: dict[str, Any], engines: Mapping[str, Told]) -> JSONResponse:
    """How the gate is now, and how each engine took the order; 502 with the same beside the error where one did not."""
    body = {**state, "engines": msgspec.to_builtins(engines)}
    failed = [url for url, told in engines.items() if not told.ok]
    if not failed:
        return JSONResponse(body)
    gate = "shut" if state.get("paused") else "open"
    error = EnginesFailed(f"the gate is {gate}, but {len(failed)} of {len(engines)} engines did not take the order")
    return JSONResponse({**error.body(), **body}, error.status, error.headers())
