"""Serves the page's static files from memory, without a token, since they contain no data of sessions."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Mapping
from typing import Annotated, NamedTuple

from fastapi import Path
from starlette.responses import Response

from app.api.requests import Request
from app.api.routes import TEXT, Reply, Route, Routes
from app.errors import Forbidden, NotFound

FOLDER = pathlib.Path(__file__).with_name("static")

INDEX = "index.html"

MEDIA_TYPES: Mapping[str, str] = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
"""Media types of the files that are served, by suffix."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
"""Content-Security-Policy: text of agents and engines cannot run scripts, load anything or embed frames."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
"""`no-cache`: a browser revalidates each file, so that it does not mix two versions after an update of the server."""


class _File(NamedTuple):
    content: bytes
    media_type: str
    etag: str


def entries(folder: pathlib.Path = FOLDER) -> list[Route]:
    """Routes for the files that are now in `folder`. A name is looked up in memory, never joined to a path."""
    route = Routes("Page")
    files: dict[str, _File] = {}
    for path in folder.iterdir():
        if path.is_file() and path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            files[path.name] = _File(content, MEDIA_TYPES[path.suffix], etag)

    page_reply = Reply("The page.", {"text/html": TEXT})

    @route("GET, HEAD /ui", "The web page", "browser", page_reply, errors=(Forbidden, NotFound))
    async def page(request: Request) -> Response:
        return _served(request, files.get(INDEX))

    @route("GET, HEAD /ui/", "", "browser")
    async def page_with_slash(request: Request) -> Response:
        """Redirect to `/ui`: the page's links are relative to it, so that they also work below a proxy's path."""
        return Response(status_code=307, headers={"location": "../ui"})

    @route(
        "GET, HEAD /ui/static/{name}",
        "The web page's files",
        "browser",
        Reply("A file.", dict.fromkeys(("text/html", "text/css", "text/javascript", "image/svg+xml"), TEXT)),
        errors=(Forbidden, NotFound),
    )
    async def static(request: Request, name: Annotated[str, Path(description="A file's name.")]) -> Response:
        return _served(request, files.get(name))

    return route.entries


def _served(request: Request, file: _File | None) -> Response:
    """The file, or 304 if the browser has it. Raises NotFound."""
    if file is None:
        raise NotFound("the page has no file of this name")
    headers = {**HEADERS, "etag": file.etag}
    known = (tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(","))
    if file.etag in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
