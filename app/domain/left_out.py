"""What a client offered or wished for and no engine was sent, as a header and a turn tell it.

Each entry is `code:place`, such as `server_tool:tools[3]`; a place is made of the protocol's own names and of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

SERVER_TOOL = "server_tool"
"""A tool that only a provider's server could run, or whose schema only the provider's models know."""

DEFER_LOADING = "defer_loading"
"""A tool that was to be found by a search is offered from the beginning."""

IMAGE_DETAIL = "image_detail"
"""An image's `detail: "original"`; the engine was sent `auto`."""

INCLUDE = "include"
"""A part of a server's tool's result that the response was to include."""

SURROGATE = "surrogate"
"""Half of a surrogate pair, read as U+FFFD."""

REMOVED_TOOL = "removed_tool"
"""A tool that the client has withdrawn."""

UNKNOWN_TOOL = "unknown_tool"
"""A tool that the client adds by a name that it has not defined."""

SILENT_MESSAGE = "silent_message"
"""A message of system or developer that the chat template renders as nothing."""

MOST = 16
"""Entries that are told one by one."""


def left_out_at(code: str, place: str) -> str:
    return f"{code}:{place}"


def bounded(left_out: Sequence[str]) -> tuple[str, ...]:
    """The first MOST entries; a last one such as `more:7` counts the others."""
    if len(left_out) <= MOST:
        return tuple(left_out)
    return (*left_out[:MOST], left_out_at("more", str(len(left_out) - MOST)))
