"""What a webhook says, and its signature: https://www.standardwebhooks.com, version 1.0."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Sequence
from typing import Any, Literal
from urllib.parse import quote

import msgspec

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Pauses after a failed attempt: each twice as long as the one before."""

Kind = Literal["session.stuck", "group.complete", "engine.died"]


class Notice(msgspec.Struct, frozen=True):
    """`subject` are what tells it from every other of its kind in a store of this `epoch`. `at`: when it happened, in
    ISO 8601; `page` where to look, below the page's address. `data` are ids, counts, times and reasons: no content."""

    kind: Kind
    epoch: str
    subject: tuple[str | int | float, ...]
    at: str
    data: dict[str, Any]
    page: str = ""

    @property
    def id(self) -> str:
        """The `webhook-id`. It follows from what happened, so a notice that is sent again has it again."""
        text = json.dumps([self.kind, self.epoch, *self.subject])
        return f"msg_{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def body(self, public_url: str | None) -> bytes:
        url = None if public_url is None else f"{public_url}/ui#/{self.page}"
        return msgspec.json.encode({"type": self.kind, "timestamp": self.at, "data": {**self.data, "url": url}})


def page_of(kind: Literal["session", "group"], name: str) -> str:
    """Where the page shows it."""
    return f"{kind}/{quote(name, safe='')}"


def signed(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> list[tuple[str, str]]:
    """The headers of an attempt at `timestamp`, in seconds since the epoch, with a signature by each key."""
    content = f"{message_id}.{timestamp}.".encode() + body
    made = (base64.b64encode(hmac.digest(key, content, "sha256")).decode() for key in keys)
    return [
        ("webhook-id", message_id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", " ".join(f"v1,{signature}" for signature in made)),
    ]


def pause_s(failures: int) -> float:
    """How long to wait after so many failed attempts in a row, at least one."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30), LONGEST_PAUSE_S)
