"""The page's own files: known when the server starts, held in memory, and served to anybody, for they hold nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request, Response

from app.errors import NotFound

FOLDER = Path(__file__).with_name("static")

INDEX = "index.html"

MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
"""Files of other kinds are not served."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content-Security-Policy: what agents and engines say can run nothing, fetch nothing and frame nothing."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""A browser asks each time whether a file is still the same: after an update of the server it must not mix two."""


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def page_routes(folder: Path = FOLDER) -> APIRouter:
    """Routes for the files that are in `folder` now. A name is looked up, never joined to a path."""
    router = APIRouter()
    files = {path.name: _read(path) for path in folder.iterdir() if path.is_file() and path.suffix in MEDIA_TYPES}

    @router.api_route("/ui", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return _served(request, files.get(INDEX))

    @router.api_route("/ui/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page_with_slash() -> Response:
        """The page's links are relative to `/ui`, so that it works below a proxy's path as well."""
        return Response(status_code=307, headers={"location": "../ui"})

    @router.api_route("/ui/static/{name}", methods=["GET", "HEAD"], include_in_schema=False)
    async def static(request: Request, name: str) -> Response:
        return _served(request, files.get(name))

    return router


def _read(path: Path) -> _File:
    content = path.read_bytes()
    return _File(content, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _served(request: Request, file: _File | None) -> Response:
    """Raises NotFound."""
    if file is None:
        raise NotFound("the page has no such file")
    headers = {**HEADERS, "etag": file.etag}
    known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
