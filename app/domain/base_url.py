"""An engine's base URL, as settings and admin routes take it."""

from __future__ import annotations

from urllib.parse import urlsplit

MAX_LENGTH = 2048


def plain(text: str) -> str:
    """The URL without a trailing slash and the `/v1` that OpenAI's clients need, so that equal URLs compare equal."""
    return text.strip().rstrip("/").removesuffix("/v1").rstrip("/")


def fault(url: str) -> str | None:
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
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        return wanted
    if parts.username or parts.password:
        return "without credentials (use TURNLOG_UPSTREAM_API_KEY)"
    return None
