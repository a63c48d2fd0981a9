"""The outcome of continuing a prompt; apart, because who asks for one need not load a template engine."""

from __future__ import annotations

from array import array

import msgspec


class NotAnExtension(Exception):
    """The template renders the conversation in another way than the stored tokens and what is new behind them."""


class Extension(msgspec.Struct, frozen=True):
    """A next prompt: the stored ids without the last `trim` of them, then `ids`."""

    trim: int
    ids: array[int]
