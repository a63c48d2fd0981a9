"""Routes of the training feed: ask for complete groups, acknowledge them."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, FailFast, Field

from app.api.path_names import ANY
from app.api.sessions import MAX_INTEGER, NO_NUL, read_model
from app.api.state import begun, services, whole_body
from app.domain.samples import Truncate
from app.errors import InvalidRequest
from app.export.feed import FeedQuery

router = APIRouter()

CONSUMER = r"^[A-Za-z0-9._:-]{1,128}$"
MAX_SIZE = 1000
MAX_LEASE_S = 86_400


class Acknowledgement(BaseModel):
    """The body of `POST /export/groups/ack`."""

    model_config = ConfigDict(extra="forbid")

    consumer: str = Field(pattern=CONSUMER, strict=True)
    groups: Annotated[list[Annotated[str, Field(pattern=NO_NUL, strict=True)]], FailFast()]


@router.get("/export/groups")
async def hand_out(
    request: Request,
    consumer: Annotated[str, Query(pattern=CONSUMER)],
    size: Annotated[int, Query(ge=1, le=MAX_SIZE)] = 1,
    lease_s: Annotated[float, Query(ge=1, le=MAX_LEASE_S)] = 600,
    attempts: Annotated[int, Query(ge=1, le=2**31 - 1)] = 1,
    max_staleness: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    weight_version: Annotated[int | None, Query(ge=0, le=MAX_INTEGER)] = None,
    new_only: bool = False,
    explain: bool = False,
    shape: str = "turnlog",
    max_seq_len: Annotated[int | None, Query(ge=1, le=MAX_INTEGER)] = None,
    truncate: Truncate = "turn",
) -> StreamingResponse:
    """Up to `size` complete groups as NDJSON, a line each, leased to the consumer before the first byte leaves."""
    for name in request.query_params:
        if name not in FeedQuery.__struct_fields__:
            accepted = ", ".join(sorted(FeedQuery.__struct_fields__))
            raise InvalidRequest(f"{name} is not a parameter of /export/groups; there are {accepted}")
    ask = FeedQuery(
        consumer=consumer,
        size=size,
        lease_s=lease_s,
        attempts=attempts,
        max_staleness=max_staleness,
        weight_version=weight_version,
        new_only=new_only,
        explain=explain,
        shape=shape,
        max_seq_len=max_seq_len,
        truncate=truncate,
    )
    lines, _ = await begun(await services(request).feed.hand_out(ask))
    return StreamingResponse(lines, media_type="application/x-ndjson")


@router.get(f"/groups/{{group_id:{ANY}}}")
async def get_group(request: Request, group_id: Annotated[str, Path(pattern=NO_NUL)]) -> dict[str, Any]:
    """A group's sessions, and the statistics of their rewards."""
    found: dict[str, Any] = msgspec.to_builtins(await services(request).feed.group(group_id))
    return found


@router.post("/export/groups/ack")
async def acknowledge(request: Request) -> dict[str, Any]:
    """Mark groups as consumed, for good; says of each what became of it."""
    body = read_model(await whole_body(request), Acknowledgement)
    outcome = await services(request).feed.acknowledge(body.consumer, body.groups)
    found: dict[str, Any] = msgspec.to_builtins(outcome)
    return found
