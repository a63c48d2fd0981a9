"""SkyRL's routes for pausing a LoRA, as its trainer and its forwarding client call them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from app.api.requests import Request, disconnected
from app.api.routes import BODY, WRITE, Routes, json_reply
from app.domain.patterns import NO_NUL
from app.errors import EnginesFailed
from app.features.gates.routes import LEASE_S, MAX_NAME, paused, reply
from turnlog import replies as reply_types

route = Routes("SkyRL")

MAX_WAIT_S = 3600


class Lora(BaseModel):
    """Unknown fields are ignored, since SkyRL may add some."""

    lora_name: str = Field(min_length=1, max_length=MAX_NAME, pattern=NO_NUL, strict=True)


class LoraWait(Lora):
    timeout_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S, allow_inf_nan=False, strict=True)] = 60.0


@route(
    "POST /skyrl/v1/abort_lora_requests",
    "Pause the adapter",
    "admin",
    json_reply(reply_types.LoraAborted),
    errors=(*BODY, EnginesFailed, *WRITE),
    body=Lora,
    example={"lora_name": "adapter-a"},
)
async def abort_lora_requests(request: Request) -> JSONResponse:
    """The same as `POST /adapters/{name}/pause`."""
    order = await request.body_of(Lora)
    result = await paused(request).pauses.pause_adapter(order.lora_name, LEASE_S)
    body = {"status": "ok", "aborted": result.aborted, "count": len(result.aborted)}
    if all(engine["ok"] for engine in result.engines.values()):
        return JSONResponse(body)
    return reply({**body, "status": "failed", "paused": True}, result.engines)


@route(
    "POST /skyrl/v1/resume_lora_requests",
    "Resume the adapter",
    "admin",
    json_reply(reply_types.LoraResumed),
    errors=(*BODY, *WRITE),
    body=Lora,
    example={"lora_name": "adapter-a"},
)
async def resume_lora_requests(request: Request) -> dict[str, Any]:
    """The same as `POST /adapters/{name}/resume`."""
    order = await request.body_of(Lora)
    await paused(request).pauses.resume_adapter(order.lora_name, None)
    return {"status": "ok"}


@route(
    "POST /skyrl/v1/wait_lora_unpaused",
    "Wait until the adapter is not paused",
    "admin",
    json_reply(reply_types.LoraWaited, "The adapter is not paused, or the timeout has passed, or the server stops."),
    errors=BODY,
    body=LoraWait,
    example={"lora_name": "adapter-a", "timeout_s": 5},
)
async def wait_lora_unpaused(request: Request) -> dict[str, Any]:
    """Answers once the adapter is not paused, or after `timeout_s`, or when the server stops."""
    order = await request.body_of(LoraWait)
    opening = asyncio.ensure_future(paused(request).gates.opens(order.lora_name, order.timeout_s))
    disconnect = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait((opening, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return {"paused": not (opening.done() and opening.result())}
    finally:
        opening.cancel()
        disconnect.cancel()
