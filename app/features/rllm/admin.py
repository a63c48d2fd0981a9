"""The gateway's routes for its trainer: workers, weight versions, and what a gateway needs that Turnlog does not."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from fastapi import Path
from pydantic import BaseModel, ConfigDict

from app.api.requests import Request
from app.api.routes import ANYTHING, BODY, WRITE, Routes, json_reply
from app.domain.events import is_number
from app.domain.fleet import Fleet, FleetEvent, FleetPaused, FleetResumed
from app.domain.patterns import plain_base_url
from app.errors import InvalidRequest, NotFound, Unsupported
from app.features.rllm.paths import spoken

if TYPE_CHECKING:
    from app.services import Services

route = Routes("rLLM", spoken)

API_PATH = "/v1"


class AddWorker(BaseModel):
    """An engine. What the gateway keeps beside its address (`weight`, `model_name`) decides nothing there either."""

    model_config = ConfigDict(extra="ignore", strict=True)

    url: str | None = None
    api_path: str | None = None


class SetWeightVersion(BaseModel):
    """The version of the weights that the trainer has just given to all engines."""

    model_config = ConfigDict(extra="ignore")

    weight_version: Any = None


class Worker(msgspec.Struct):
    """An engine, as rLLM's `WorkerInfo`. Its id is made of its address: it holds over restarts and in each process."""

    worker_id: str
    url: str
    api_path: str
    model_name: str | None
    weight: int
    healthy: bool
    active_requests: int


@route("GET /admin/workers", "List the engines", "page", json_reply(list[Worker]))
async def list_workers(request: Request) -> list[dict[str, Any]]:
    return _workers(request.services)


@route("GET /health/workers", "The engines' health", "page", json_reply(ANYTHING))
async def health_workers(request: Request) -> dict[str, Any]:
    workers = _workers(request.services)
    return {"workers": workers, "healthy": sum(worker["healthy"] for worker in workers), "total": len(workers)}


@route(
    "POST /admin/workers",
    "Add an engine",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, Unsupported, *WRITE),
    body=AddWorker,
    optional_body=True,
)
async def add_worker(request: Request) -> dict[str, str]:
    """As `POST /engines`. Engines are asked below `/v1`."""
    body = await request.body_of(AddWorker)
    if not body.url:
        raise InvalidRequest("url is required")
    base = plain_base_url(body.url)
    if (body.api_path or API_PATH).rstrip("/") != API_PATH:
        raise Unsupported(f"api_path must be {API_PATH}")
    listed = await request.services.engine_pool.put(base, "serving")
    return {"worker_id": _id(listed.member.url), "url": listed.member.url, "api_path": API_PATH}


@route(
    "DELETE /admin/workers/{worker_id}", "Remove an engine", "admin", json_reply(ANYTHING), errors=(NotFound, *WRITE)
)
async def remove_worker(
    request: Request, worker_id: Annotated[str, Path(description="A worker's id, as the list has it.")]
) -> dict[str, str]:
    """As `DELETE /engines`."""
    app = request.services
    url = next((url for url in app.engines.members if _id(url) == worker_id), None)
    if url is None:
        raise NotFound(f"Worker {worker_id} not found")
    await app.engine_pool.remove(url)
    return {"removed": worker_id}


@route("POST /admin/flush", "Does nothing: every reply is on disk before it is sent", "admin", json_reply(ANYTHING))
async def flush(request: Request) -> dict[str, str]:
    return {"status": "flushed"}


@route("POST /admin/reload", "Does nothing, as in rLLM's gateway", "admin", json_reply(ANYTHING))
async def reload(request: Request) -> dict[str, str]:
    return {"status": "ok"}


@route("GET /admin/weight_version", "The trainer's weight version", "page", json_reply(ANYTHING), errors=WRITE)
async def get_weight_version(request: Request) -> dict[str, int | None]:
    """Null if none was set, or if it is not a number."""
    version = (await request.services.fleet.refresh()).gates.fleet.version
    return {"weight_version": int(version) if version is not None and is_number(version) else None}


@route(
    "POST /admin/weight_version",
    "Set the weight version",
    "admin",
    json_reply(ANYTHING),
    errors=(*BODY, *WRITE),
    body=SetWeightVersion,
    optional_body=True,
)
async def set_weight_version(request: Request) -> dict[str, int]:
    """Turns that begin from now on are of this version, unless their engine says another. Gates stay as they are: a
    pause that ends without a version forgets it."""
    given = (await request.body_of(SetWeightVersion)).weight_version
    if given is None:
        raise InvalidRequest("weight_version is required")
    try:
        version = str(int(given))
    except (TypeError, ValueError, OverflowError):
        version = ""
    if not is_number(version):
        raise InvalidRequest(f"invalid weight_version: {given!r:.64}")

    def stamped(fleet: Fleet) -> FleetEvent | None:
        gate = fleet.gates.fleet
        if gate.version == version:
            return None
        if gate.is_shut:
            return FleetPaused(gate.closings, gate.until or 0.0, gate.mode or "abort", version)
        return FleetResumed(gate.closings, version=version)

    await request.services.fleet.append(stamped)
    return {"weight_version": int(version)}


def _workers(app: Services) -> list[dict[str, Any]]:
    workers = (
        Worker(_id(member.url), member.url, API_PATH, None, 1, member.health != "dead", member.in_flight)
        for member in app.engines.members.values()
    )
    return [msgspec.to_builtins(worker) for worker in workers]


def _id(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:16]
