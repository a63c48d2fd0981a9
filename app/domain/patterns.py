"""What texts and numbers of a request may be: regular expressions as a schema has them, and bounds."""

from __future__ import annotations

import base64
import math
from urllib.parse import urlsplit

ID = r"^[A-Za-z0-9._:-]{1,128}$"
"""Of a session, of an affinity, of a consumer. For `re.fullmatch`: `$` alone lets a line feed follow."""

NO_NUL = r"^[^\x00]*$"
"""PostgreSQL's text holds no NUL."""

ANNOTATION = r"^[A-Za-z0-9_-]{1,64}$"
"""Of an annotation's name: it is part of a Parquet column's and a tensor's."""

TAG = r"^[^\x00-\x1f\x7f]{1,128}$"
"""Of a session's tag: no control characters. For `re.fullmatch`, as `ID`."""

MAX_INTEGER = 2**63 - 1
"""What a database's integer holds."""

MAX_FLOAT32 = 3.4028234663852886e38
"""Trainers keep rewards in 32 bits."""


def is_in_row(value: object) -> bool:
    """Can every container of an export hold the number: an integer of 64 bits, or a finite double?"""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    return not isinstance(value, float) or math.isfinite(value)


MAX_LENGTH = 2048


def plain_base_url(text: str) -> str:
    """The URL without a trailing slash and the `/v1` that OpenAI's clients need, so that equal URLs compare equal."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def base_url_fault(url: str, *, may_have_query: bool = False) -> str | None:
    """What is accepted instead, as text that follows "base URLs"; None for a valid URL."""
    wanted = "such as http://127.0.0.1:30000"
    if not url.isprintable() or " " in url or "\\" in url or len(url) > MAX_LENGTH:
        return wanted
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises for one that is out of range
        (parts.hostname or "").encode("idna")
    except ValueError:
        return wanted
    # An empty query or fragment too: a path that is added behind it would become part of it.
    if parts.scheme not in ("http", "https") or not parts.hostname or "#" in url:
        return wanted
    if "?" in url and not may_have_query:
        return wanted
    if "@" in parts.netloc:
        return "without credentials (use TURNLOG_UPSTREAM_API_KEY)"
    return None


def webhook_key(secret: str) -> bytes:
    """The key of a webhooks' secret, `whsec_` and 24 to 64 bytes in base64. Raises ValueError."""
    key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise ValueError("another prefix, or too few or too many bytes")
    return key
