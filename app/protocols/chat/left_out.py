"""What engines refuse of a chat and its client means well: a server's tools, and an image's `detail: "original"`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from app.domain.left_out import IMAGE_DETAIL, SERVER_TOOL, left_out_at
from app.domain.request import value_of
from app.errors import Unsupported

_KNOWN, _KNOWN_BYTES = 32, 256 << 10
"""How many lists of tools up to which size are remembered: agents send the same ones with every turn."""

_CARRIED = (None, "function", "custom")

ORIGINAL = b'"original"'
"""In every body that has such a detail."""


class _Tool(msgspec.Struct):
    type: Any = None


_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_TOOL = msgspec.json.Decoder(_Tool)

Tools = msgspec.Raw | None
Places = tuple[str, ...]


def offered_tools(raw: msgspec.Raw, params: dict[str, msgspec.Raw]) -> tuple[Tools, Places]:
    """The tools that an engine can be sent, and what is left out. Where none are left, `params` lose the choice too.

    Raises Unsupported where the choice forces a tool that is left out. Tools that are no list of objects are the
    engine's to refuse.
    """
    text = bytes(raw)
    tools, left_out = _remembered(text) if len(text) <= _KNOWN_BYTES else _carried(text)
    if not left_out:
        return raw, ()
    choice = value_of(params.get("tool_choice"), "tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else None
    forces = kind not in (*_CARRIED, "allowed_tools") if tools else choice not in (None, "auto", "none")
    if forces:
        raise Unsupported("tool_choice forces a tool that cannot be carried to an engine")
    if not tools:
        params.pop("tool_choice", None)
        params.pop("parallel_tool_calls", None)
        return None, left_out
    return msgspec.Raw(tools), left_out


def _carried(text: bytes) -> tuple[bytes, Places]:
    """The list without a server's tools, empty if none is left."""
    try:
        items = _ITEMS.decode(text)
        places = [place for place, item in enumerate(items) if _TOOL.decode(item).type not in _CARRIED]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return text, ()
    kept = [bytes(item) for place, item in enumerate(items) if place not in places]
    left_out = tuple(left_out_at(SERVER_TOOL, f"tools[{place}]") for place in places)
    return b"[" + b",".join(kept) + b"]" if kept else b"", left_out


_remembered = functools.lru_cache(_KNOWN)(_carried)


def with_known_details(messages: Sequence[msgspec.Raw], known: int) -> tuple[Sequence[msgspec.Raw], Places]:
    """The messages with `detail: "auto"` for images that have `original`, which no engine knows, and their places.

    The first `known` messages have none. Raises InvalidRequest.
    """
    changed: dict[int, msgspec.Raw] = {}
    left_out: list[str] = []
    for index in range(known, len(messages)):
        raw = messages[index]
        if ORIGINAL in bytes(raw):
            message = value_of(raw, f"messages[{index}]")
            places = [f"messages[{index}].content[{part}]" for part in _replace_details(message)]
            if places:
                changed[index] = msgspec.Raw(msgspec.json.encode(message))
                left_out += [left_out_at(IMAGE_DETAIL, place) for place in places]
    if not changed:
        return messages, ()
    return [changed.get(index, raw) for index, raw in enumerate(messages)], tuple(left_out)


def _replace_details(message: Any) -> list[int]:
    """Replace the details in place. Returns the numbers of the content's parts that had them."""
    content = message.get("content") if isinstance(message, dict) else None
    replaced = []
    for number, part in enumerate(content if isinstance(content, list) else ()):
        image = part.get("image_url") if isinstance(part, dict) else None
        if isinstance(image, dict) and image.get("detail") == "original":
            image["detail"] = "auto"
            replaced.append(number)
    return replaced
