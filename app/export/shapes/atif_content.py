"""A chat message's content in ATIF's spelling: a text, or parts that are texts or name images and audio."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

import msgspec

from app.domain.images import REFERENCE
from app.export.row import Value
from workers.codec import describe

IMAGES = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
}
"""Media types that ATIF takes, by a URL's ending."""

AUDIO = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "mp4": "audio/mp4",
    "aac": "audio/aac",
    "ogg": "audio/ogg",
    "flac": "audio/flac",
    "webm": "audio/webm",
    "aiff": "audio/aiff",
}
"""Media types that ATIF takes, by the name that an OpenAI request has for the format."""


class _Url(msgspec.Struct, frozen=True):
    url: str = ""


class _Audio(msgspec.Struct, frozen=True):
    data: str
    format: str


class _Part(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    image_url: _Url | None = None
    sha256: str | None = None
    media_type: str | None = None
    input_audio: _Audio | None = None


describe(_Part)


def content(given: str | Sequence[msgspec.Raw] | None) -> tuple[Value, list[msgspec.Raw]]:
    """A message's text or parts, and raw what ATIF has no part for: other kinds, images of an unknown type."""
    if given is None or isinstance(given, str):
        return given or "", []
    parts: list[dict[str, Value]] = []
    others: list[msgspec.Raw] = []
    for raw in given:
        part = _part(raw)
        if part is None:
            others.append(raw)
        else:
            parts.append(part)
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"], others
    return parts or "", others


def _part(raw: msgspec.Raw) -> dict[str, Value] | None:
    try:
        part = msgspec.json.decode(raw, type=_Part)
    except msgspec.DecodeError:
        return None
    if part.type == "text" and part.text is not None:
        return {"type": "text", "text": part.text}
    if part.type == REFERENCE and part.media_type in IMAGES.values():
        return _media("image", part.media_type, f"sha256:{part.sha256}")
    if part.type == "image_url" and part.image_url is not None:
        url = part.image_url.url
        return _media("image", _image_type(url), url)
    if part.type == "input_audio" and part.input_audio is not None:
        kind = AUDIO.get(part.input_audio.format)
        return _media("audio", kind, f"data:{kind};base64,{part.input_audio.data}")
    return None


def _media(kind: str, media_type: str | None, path: str) -> dict[str, Value] | None:
    return None if media_type is None else {"type": kind, "source": {"media_type": media_type, "path": path}}


def _image_type(url: str) -> str | None:
    if url.startswith("data:"):
        named = url[len("data:") :].split(",", 1)[0].split(";", 1)[0].lower()
        return named if named in IMAGES.values() else None
    try:
        path = urlsplit(url).path
    except ValueError:
        return None
    return IMAGES.get(path.rpartition(".")[2].lower())
