"""Routes of pausing: one adapter, or the whole fleet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from app.api.path_names import ANY
from app.api.sessions import NO_NUL, read_model
from app.api.state import services, whole_body
from app.domain.fleet import PauseMode
from app.errors import EnginesFailed
from app.fleet.pauses import Told

router = APIRouter()

ADAPTER = f"/adapters/{{name:{ANY}}}"
MAX_NAME = 512
MAX_LEASE_S = 86_400
LEASE_S = 600.0
"""Longer than a checkpoint takes to load, short enough that a night is not lost to a trainer that died."""

AdapterName = Annotated[str, Path(min_length=1, max_length=MAX_NAME, pattern=NO_NUL)]
Lease = Annotated[float, Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)]


class _PauseRequest(BaseModel):
    """The body of an order, which may be left out."""

    model_config = ConfigDict(extra="forbid", strict=True)


Wish = TypeVar("Wish", bound=_PauseRequest)


class PauseAdapter(_PauseRequest):
    lease_s: Lease = LEASE_S


class PauseFleet(_PauseRequest):
    lease_s: Lease = LEASE_S
    mode: PauseMode = "abort"


class ResumeAdapter(_PauseRequest):
    version: str | None = Field(default=None, min_length=1, max_length=MAX_NAME, pattern=NO_NUL)


class ResumeFleet(_PauseRequest):
    pass


async def _read(request: Request, kind: type[Wish]) -> Wish:
    raw = await whole_body(request)
    return read_model(raw, kind) if raw.strip() else kind()


@router.post(ADAPTER + "/pause")
async def pause_adapter(request: Request, name: AdapterName) -> JSONResponse:
    """Hold the adapter's turns back and abort its generations, in every process and at every engine."""
    wish = await _read(request, PauseAdapter)
    pauses = services(request).pauses
    swept = await pauses.pause_adapter(name, wish.lease_s)
    state = msgspec.to_builtins(await pauses.adapter(name))
    return reported({**state, "aborted": swept.aborted, "count": len(swept.aborted)}, swept.engines)


@router.post(ADAPTER + "/resume")
async def resume_adapter(request: Request, name: AdapterName) -> dict[str, Any]:
    """Let the adapter's turns go on; a name that is new is known from now on."""
    wish = await _read(request, ResumeAdapter)
    pauses = services(request).pauses
    await pauses.resume_adapter(name, wish.version)
    found: dict[str, Any] = msgspec.to_builtins(await pauses.adapter(name))
    return found


@router.get(ADAPTER)
async def get_adapter(request: Request, name: AdapterName) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(await services(request).pauses.adapter(name))
    return found


@router.get("/adapters")
async def list_adapters(request: Request) -> dict[str, Any]:
    return {"adapters": msgspec.to_builtins(await services(request).pauses.adapters())}


@router.post("/fleet/pause")
async def pause_fleet(request: Request) -> JSONResponse:
    """Hold all turns back and have every engine pause."""
    wish = await _read(request, PauseFleet)
    pauses = services(request).pauses
    engines = await pauses.pause_fleet(wish.mode, wish.lease_s)
    return reported(msgspec.to_builtins(await pauses.fleet()), engines)


@router.post("/fleet/resume")
async def resume_fleet(request: Request) -> JSONResponse:
    """Have every engine go on, and let all turns pass but those of paused adapters."""
    await _read(request, ResumeFleet)
    pauses = services(request).pauses
    engines = await pauses.resume_fleet()
    return reported(msgspec.to_builtins(await pauses.fleet()), engines)


@router.get("/fleet")
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
