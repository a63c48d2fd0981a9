"""Content parts of Responses messages and tool results as chat content."""

from __future__ import annotations

from typing import Any

from app.domain.left_out import IMAGE_DETAIL, left_out_at
from app.errors import InvalidRequest
from app.protocols.responses.values import fields, items, text, text_or_none, unsupported

_TEXT = {"input_text": "text", "output_text": "text", "refusal": "refusal", "text": "text"}
"""A part's type and the field that holds its text."""


def text_of(value: Any, path: str, separator: str) -> str:
    """A content without images as one text."""
    content = content_of(value, path, separator, [])
    if not isinstance(content, str):
        raise unsupported(f"{path}: an image here")
    return content


def content_of(value: Any, path: str, separator: str, left_out: list[str]) -> str | list[dict[str, Any]]:
    """A content as chat content: texts become one text, since many chat templates take no list; with images, a list.

    What an engine is not sent of it is added to `left_out` (`app.domain.left_out`).
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} must be a string or a list")
    parts = [_part(part, f"{path}[{index}]", left_out) for index, part in enumerate(value)]
    if any(part["type"] != "text" for part in parts):
        return parts
    return separator.join(part["text"] for part in parts)


def reasoning_text(item: dict[str, Any], path: str) -> str:
    """A reasoning item's text: its content's, else its summary's."""
    found = _texts(item.get("content"), f"{path}.content", ("reasoning_text", "text"))
    summary = _texts(item.get("summary"), f"{path}.summary", ("summary_text",))
    return found or summary


def _texts(value: Any, path: str, types: tuple[str, ...]) -> str:
    texts = []
    for index, part in enumerate([] if value is None else items(value, path)):
        at = f"{path}[{index}]"
        if fields(part, at).get("type") not in types:
            raise InvalidRequest(f"{at}.type must be {types[0]}")
        texts.append(text(part.get("text"), f"{at}.text"))
    return "".join(texts)


def _part(value: Any, path: str, left_out: list[str]) -> dict[str, Any]:
    part = fields(value, path)
    kind = text(part.get("type"), f"{path}.type")
    if kind in _TEXT:
        return {"type": "text", "text": text(part.get(_TEXT[kind]), f"{path}.{_TEXT[kind]}")}
    if kind == "input_image":
        return _image(part, path, left_out)
    raise unsupported(f"{path}.type", kind)


def _image(part: dict[str, Any], path: str, left_out: list[str]) -> dict[str, Any]:
    if part.get("file_id") is not None:
        raise unsupported(f"{path}.file_id")
    image = {"url": text(part.get("image_url"), f"{path}.image_url")}
    detail = text_or_none(part.get("detail"), f"{path}.detail")
    if detail == "original":  # Engines know low, high and auto.
        detail = "auto"
        left_out.append(left_out_at(IMAGE_DETAIL, path))
    return {"type": "image_url", "image_url": image if detail is None else {**image, "detail": detail}}
