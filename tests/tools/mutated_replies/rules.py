"""The one error of the strict reader."""

from __future__ import annotations


class Malformed(Exception):
    """The reply breaks a rule; the message names it."""
