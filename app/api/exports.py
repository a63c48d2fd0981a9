"""`GET /export`: training rows."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from app.api.closed_stream import ClosedStream
from app.api.describe import ANYTHING, BINARY, BYTES, NDJSON, PAYLOADS, READ, Reply, describe
from app.api.disconnect import while_connected
from app.api.parameters import PageCursor, require_known
from app.api.state import services
from app.errors import InvalidRequest, Unsupported
from app.export.query import ExportQuery

router = APIRouter(tags=["Export"])

ROWS = Reply(
    "Rows, in the media type of the format.",
    {
        NDJSON: ANYTHING,
        "application/vnd.apache.parquet": BINARY,
        BYTES: BINARY,
        "application/vnd.msgpack": BINARY,
    },
    ("x-turnlog-cursor", "x-turnlog-next-cursor", "x-turnlog-empty", "content-disposition"),
)


class ExportParameters(ExportQuery):
    """The parameters of an export, with the cursor at which it continues."""

    cursor: PageCursor = None


@router.get("/export")
@describe("Export training rows", "page", ROWS, errors=(InvalidRequest, Unsupported, *READ, *PAYLOADS))
async def export(request: Request, query: Annotated[ExportParameters, Query()]) -> StreamingResponse:
    """Training rows in the order of commit, in any format and shape.

    `x-turnlog-cursor` repeats this export. Each row's `cursor` continues after that row, and `x-turnlog-next-cursor`
    after the last row; with a `limit` that header is only sent when no rows are left. `x-turnlog-empty` says that there
    is no row.
    """
    require_known(request, ExportParameters)
    started = await while_connected(request.receive, services(request).exporter.start(query, query.cursor))
    headers = {
        "x-turnlog-cursor": started.cursor,
        "content-disposition": f'attachment; filename="turnlog{started.suffix}"',
    }
    if started.is_empty:
        headers["x-turnlog-empty"] = "true"
    if query.limit is None or started.is_empty:
        headers["x-turnlog-next-cursor"] = started.next_cursor
    return ClosedStream(started.pieces, started.media_type, headers)
