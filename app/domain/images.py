"""Images that a client sends inline: stored once a session under their SHA-256, with a reference in the message.

A stored message has in an image's place `{"type": "turnlog_image", "sha256", "media_type", "size", "image_url"}`, whose
`image_url` are the part's other fields (`detail`). No client can write one: a content part of that type is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
import pybase64

from app.errors import InvalidRequest

REFERENCE = "turnlog_image"

# A JSON text can hold these only as a whole string: within a text its quotation marks are escaped.
REFERENCE_MARK = b'"turnlog_image"'
IMAGE_MARK = b'"image_url"'
ESCAPED_LETTER = b"\\u00"
"""A message without any of these three has no inline image and no reference. A client may spell the marks with escapes;
what is stored spells a reference without."""

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Image(msgspec.Struct, frozen=True):
    """An inline image's decoded bytes; `media_type` as its data URL names it, in lower case."""

    media_type: str
    data: bytes
    sha256: str


class ShownImage(msgspec.Struct, frozen=True):
    """An image of a stored message: inline with `sha256`, `media_type` and `size` in bytes, or elsewhere at `url`."""

    sha256: str | None = None
    media_type: str | None = None
    size: int | None = None
    url: str | None = None


def image_of(part: Any) -> Image | None:
    """The image that a decoded content part holds inline; None for another part, a URL and what is no valid data."""
    url = _url_of(part)
    if url is None or url[:5].lower() != "data:":
        return None
    head, comma, text = url[5:].partition(",")
    media_type, _, encoding = head.lower().rpartition(";")
    try:
        data = pybase64.b64decode(text, validate=True) if encoding == "base64" else unquote_to_bytes(text)
    except ValueError:
        return None
    if not comma or not data:
        return None
    named = media_type if encoding == "base64" else head.lower()
    return Image(named, data, hashlib.sha256(data).hexdigest())


def data_url(media_type: str, data: bytes) -> str:
    """An image inline, as base64."""
    return f"data:{media_type};base64,{pybase64.b64encode(data).decode()}"


def _url_of(part: Any) -> str | None:
    """The URL of an image part, which is a text or the field of an object."""
    if not isinstance(part, Mapping) or part.get("type") != "image_url":
        return None
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) else None


def take_out(message: bytes) -> tuple[bytes, list[Image]]:
    """A raw message with references in the places of its inline images, and these in their order.

    Raises InvalidRequest for a content part of the reference's type.
    """
    if not (IMAGE_MARK in message or REFERENCE_MARK in message or ESCAPED_LETTER in message):
        return message, []
    images: list[Image] = []

    def replaced(raw: msgspec.Raw) -> msgspec.Raw:
        part = msgspec.json.decode(raw)
        if isinstance(part, dict) and part.get("type") == REFERENCE:
            raise InvalidRequest(f"content parts of type {REFERENCE} are reserved for the server")
        image = image_of(part)
        if image is None:
            return raw
        images.append(image)
        fields = _FIELDS.decode(raw)
        given = fields["image_url"]
        others = {} if isinstance(part["image_url"], str) else {**_FIELDS.decode(given)}
        others.pop("url", None)
        return _encoded(
            {
                **fields,
                "type": REFERENCE,
                "sha256": image.sha256,
                "media_type": image.media_type,
                "size": len(image.data),
                "image_url": None if isinstance(part["image_url"], str) else others,
            }
        )

    return _with_parts(message, replaced), images


def put_back(message: bytes, data: Mapping[str, bytes]) -> bytes:
    """A stored message with its images inline, as base64. `data` are the images' bytes by SHA-256."""
    if REFERENCE_MARK not in message:
        return message

    def replaced(raw: msgspec.Raw) -> msgspec.Raw:
        part = msgspec.json.decode(raw)
        if not _is_reference(part):
            return raw
        url = data_url(part["media_type"], data[part["sha256"]])
        fields: dict[str, Any] = {**_FIELDS.decode(raw), "type": "image_url"}
        for name in ("sha256", "media_type", "size"):
            del fields[name]
        others = part["image_url"]
        fields["image_url"] = url if others is None else {"url": url, **_FIELDS.decode(fields["image_url"])}
        return _encoded(fields)

    return _with_parts(message, replaced)


def shown(message: bytes) -> Iterator[ShownImage]:
    """The images of a stored message, in their order."""
    if REFERENCE_MARK not in message and IMAGE_MARK not in message:
        return
    for raw in _parts_of(_FIELDS.decode(message)):
        part = msgspec.json.decode(raw)
        if _is_reference(part):
            yield ShownImage(part["sha256"], part["media_type"], part["size"])
        elif (url := _url_of(part)) is not None:
            yield ShownImage(url=url)


def hashes(messages: Sequence[bytes]) -> set[str]:
    """The SHA-256 of each image that the stored messages refer to."""
    references = (image.sha256 for message in messages if REFERENCE_MARK in message for image in shown(message))
    return {sha256 for sha256 in references if sha256 is not None}


def holds_images(messages: Sequence[msgspec.Raw]) -> bool:
    """Does a request's message have an image, inline or elsewhere?"""
    return any(IMAGE_MARK in message and any(shown(message)) for message in map(bytes, messages))


def _is_reference(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == REFERENCE


def _parts_of(fields: Mapping[str, msgspec.Raw]) -> list[msgspec.Raw]:
    content = fields.get("content")
    if content is None or bytes(memoryview(content)[:1]) != b"[":
        return []
    return msgspec.json.decode(content, type=list[msgspec.Raw])


def _with_parts(message: bytes, replaced: Callable[[msgspec.Raw], msgspec.Raw]) -> bytes:
    """The message with each content part replaced; what is left as it is keeps its spelling."""
    fields = _FIELDS.decode(message)
    parts = _parts_of(fields)
    made = [replaced(part) for part in parts]
    if all(new is old for new, old in zip(made, parts, strict=True)):
        return message
    return msgspec.json.encode({**fields, "content": made})


def _encoded(fields: Mapping[str, Any]) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(fields))
