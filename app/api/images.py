"""The images that clients sent inline."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from app.api.describe import BINARY, BYTES, READ, SESSION, Reply, describe
from app.api.parameters import SessionId
from app.api.state import services
from app.errors import NotFound, SessionClosed, SessionNotFound
from app.sessions import images

router = APIRouter(tags=["Sessions"])

_RASTER = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
"""The first bytes of the types that a browser is told; what a client called an image may be anything."""

_HEADERS = {
    "x-content-type-options": "nosniff",
    "content-security-policy": "sandbox; default-src 'none'",
    "content-disposition": "attachment",
}


@router.get("/sessions/{session_id}/images/{sha256}")
@describe(
    "An image that the session was sent inline",
    "session",
    Reply("The image's bytes.", {BYTES: BINARY, **{kind: BINARY for _, kind in _RASTER}, "image/webp": BINARY}),
    errors=(*SESSION, NotFound, *READ),
)
async def get_image(
    request: Request,
    session_id: SessionId,
    sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The SHA-256 of its bytes.")],
) -> Response:
    """An image of an open or closed session, as an attachment. The type is named by its first bytes."""
    app = services(request)
    entry = await app.cache.current(session_id)
    if entry is None:
        raise SessionNotFound.of(session_id)
    if entry.session.status == "erased":
        raise SessionClosed(f"session {session_id} is erased")
    data = await images.image(app.database, entry.session, sha256)
    return Response(data, media_type=_type_of(data), headers=_HEADERS)


def _type_of(data: bytes) -> str:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for head, kind in _RASTER if data.startswith(head)), BYTES)
