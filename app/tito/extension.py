"""The result of continuing a prompt; separate, so that importing it loads no template engine."""

from __future__ import annotations

from array import array

import msgspec


class NotAnExtension(Exception):
    """The template's rendering of the conversation does not begin with the stored tokens."""


class Extension(msgspec.Struct, frozen=True):
    """The next prompt: the stored ids without the last `trim`, then `ids`."""

    trim: int
    ids: array[int]
