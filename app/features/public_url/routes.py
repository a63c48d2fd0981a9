"""Routes that set the server's public address, and take it back."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from app.api.requests import Request
from app.api.routes import BODY, NO_CONTENT, WRITE, Routes, json_reply
from app.domain import patterns
from app.domain.fleet import Fleet, PublicUrlSet
from app.errors import InvalidRequest
from turnlog import replies as reply_types

route = Routes("Fleet")

LEASE_S, MAX_LEASE_S = 120.0, 86_400
MAX_URL = 2048


def _address(url: str) -> str:
    if (fault := patterns.base_url_fault(url)) is not None:
        raise ValueError(f"the public address must be a base URL {fault}")
    return url.rstrip("/")


class PutPublicUrl(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    url: Annotated[str, Field(max_length=MAX_URL), AfterValidator(_address)]
    lease_s: Annotated[float, Field(gt=0, le=MAX_LEASE_S, allow_inf_nan=False)] = LEASE_S


@route(
    "PUT /public-url",
    "Set the server's public address",
    "admin",
    json_reply(reply_types.PublicUrl, "The address, and when its lease ends."),
    errors=(*BODY, *WRITE),
    body=PutPublicUrl,
    example={"url": "https://example.org", "lease_s": 120},
)
async def put_public_url(request: Request) -> reply_types.PublicUrl:
    """New sessions have a `url` below it, until its lease ends; put it again to renew that. It takes precedence over
    `TURNLOG_PUBLIC_URL`."""
    body = await request.body_of(PutPublicUrl)
    await request.services.fleet.append(lambda fleet: PublicUrlSet(body.url), lease_s=body.lease_s)
    return await get_public_url(request)


@route(
    "GET /public-url",
    "The server's public address",
    "admin",
    json_reply(reply_types.PublicUrl, "The address, and when its lease ends."),
)
async def get_public_url(request: Request) -> reply_types.PublicUrl:
    app = request.services
    given = app.fleet.fleet.public_url
    left_s = 0.0 if given is None else app.fleet.left(given)
    return {
        "url": app.public_url(),
        "lease_left_s": round(left_s, 3) if left_s > 0 else None,
        "needs_token": app.tokens.are_needed,
    }


@route(
    "DELETE /public-url", "Withdraw the server's public address", "admin", NO_CONTENT, errors=(InvalidRequest, *WRITE)
)
async def delete_public_url(
    request: Request,
    url: Annotated[str | None, Query(description="Withdraw the address only if it is this one.")] = None,
) -> None:
    """New sessions get a `url` below `TURNLOG_PUBLIC_URL` again, or below the request's own address."""

    def taken_back(fleet: Fleet) -> PublicUrlSet | None:
        given = fleet.public_url
        if given is None or given.url is None or url not in (None, given.url):
            return None
        return PublicUrlSet(None)

    await request.services.fleet.append(taken_back)
