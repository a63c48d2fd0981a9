"""Routes of the engine pool, for operators."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict, Field

from app.api.requests import Request, read_model
from app.api.routes import BODY, NO_CONTENT, WRITE, Routes, json_reply
from app.domain import patterns
from app.errors import Forbidden, IdUnavailable, InvalidRequest, NotFound, RunMismatch
from app.fleet.engine_pool import ListedEngine, require_base_url
from app.services import Services
from app.sessions.as_reply import as_reply
from turnlog import replies as reply_types

route = Routes("Fleet")


class PutEngine(BaseModel):
    """The body of `POST /engines`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: str
    state: Literal["serving", "draining"] = "serving"
    run: str | None = Field(default=None, pattern=patterns.ID)


class RemoveEngine(BaseModel):
    """The body of `DELETE /engines` if the URL is not in the query."""

    model_config = ConfigDict(extra="forbid", strict=True)

    url: str


@route(
    "GET /engines",
    "List the engines",
    "page",
    json_reply(reply_types.EngineList, "All engines, or those that serve a run."),
    errors=(InvalidRequest,),
    of_run="query",
)
async def get_engines(
    request: Request,
    run: Annotated[str | None, Query(pattern=patterns.ID, description="Only the engines that serve this run.")] = None,
) -> dict[str, Any]:
    """All engines: their configuration, which all processes share, and their health as this process sees it."""
    app = request.services
    return {
        "engines": [engine_fields(app, listed) for listed in app.engine_pool.listed(run)],
        "version": app.fleet.fleet.version,
    }


@route(
    "POST /engines",
    "Add, restore or drain an engine",
    "admin",
    json_reply(reply_types.Engine, "The engine as listed."),
    errors=(*BODY, Forbidden, IdUnavailable, RunMismatch, *WRITE),
    body=PutEngine,
    example={"url": "http://127.0.0.1:30000", "run": "exp-1"},
    of_run="body",
)
async def post_engine(request: Request) -> object:
    """Add, restore or drain an engine. Repeating the request changes nothing. With `run` it serves that run alone;
    where that is left out, it stays as it is. An engine in the pool is removed before it serves another run."""
    app = request.services
    body = await request.body_of(PutEngine)
    if (own := request.head.token_run) is not None:
        await _require_own(app, require_base_url(body.url), own)
    run = body.run if "run" in body.model_fields_set else msgspec.UNSET
    try:
        return engine_fields(app, await app.engine_pool.put(body.url, body.state, run))
    except RunMismatch as error:
        if own is None:
            raise
        raise _unavailable(body.url, own) from error  # Another run has added it meanwhile.


async def _require_own(app: Services, url: str, run: str) -> None:
    """Raises Forbidden, IdUnavailable where the token of a run may not put this engine into the pool."""
    settings = app.settings
    known = (await app.fleet.refresh()).engines.get(url)
    if (known is not None or url in settings.upstreams) and (known is None or known.run != run):
        raise _unavailable(url, run)
    has_key = settings.upstream_api_key is not None
    if known is None and has_key and not any(pattern.matches(url) for pattern in settings.router_workers):
        raise Forbidden(
            f"{url}: a run may not add this address, because the engine would get TURNLOG_UPSTREAM_API_KEY; let "
            "TURNLOG_ROUTER_WORKERS match it"
        )


def _unavailable(url: str, run: str) -> IdUnavailable:
    return IdUnavailable(f"the engine {url} is not available to run {run}")


@route(
    "DELETE /engines",
    "Remove an engine from the pool",
    "admin",
    NO_CONTENT,
    errors=(*BODY, NotFound, *WRITE),
    body=RemoveEngine,
    optional_body=True,
    of_run="query",
)
async def delete_engine(
    request: Request,
    url: Annotated[str | None, Query(description="An engine's base URL, if it is not in the body.")] = None,
    run: Annotated[
        str | None, Query(pattern=patterns.ID, description="Remove the engine only if it serves this run alone.")
    ] = None,
) -> None:
    """Remove an engine from the pool, also one that the settings list."""
    app = request.services
    raw = await request.whole_body()
    if url is not None and raw.strip():
        raise InvalidRequest("url is given twice: name the engine in the query or in the body")
    if url is None and not raw.strip():
        raise InvalidRequest("url is missing: name the engine in the query or in the body")
    await app.engine_pool.remove(read_model(raw, RemoveEngine).url if url is None else url, run)


def engine_fields(app: Services, listed: ListedEngine) -> reply_types.Engine:
    """An engine as the routes return it."""
    member = listed.member
    configured = app.settings.upstream_dialect
    return as_reply(
        reply_types.Engine,
        member,
        state="draining" if member.is_draining else "serving",
        source=listed.source,
        dialect=member.dialect or (None if configured == "auto" else configured),
        weight_version_regressed=msgspec.to_builtins(listed.regressed),
        logprobs_of=app.engines.logprobs_of(member),
    )
