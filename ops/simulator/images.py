"""An image in a prompt: as many placeholders as Qwen2-VL's processor makes of it."""

from __future__ import annotations

import base64
from typing import Any

from ops.simulator.tokenizer import IMAGE_PAD, VISION_END, VISION_START

_SIDE = 28
"""Pixels, of the square that a placeholder stands for."""

_MOST = 1280
_HEADER_BYTES = 24
"""A PNG begins with its signature, a chunk's length and name, and its width and height."""


def is_image(part: dict[str, Any]) -> bool:
    return part.get("type") in ("image", "image_url")


def placeholders(part: dict[str, Any]) -> str:
    """Of an inline PNG of at least 56 x 56 pixels, the processor's; one for any other image."""
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    return VISION_START + IMAGE_PAD * _count(url if isinstance(url, str) else "") + VISION_END


def _count(url: str) -> int:
    head, _, text = url.partition(",")
    if not head.endswith(";base64") or len(text) < 4 * _HEADER_BYTES // 3:
        return 1
    try:
        data = base64.b64decode(text[: 4 * _HEADER_BYTES // 3])
    except ValueError:
        return 1
    if data[12:16] != b"IHDR":
        return 1
    width, height = (int.from_bytes(data[start : start + 4]) for start in (16, 20))
    return max(1, min(round(width / _SIDE) * round(height / _SIDE), _MOST))
