"""The server's address, the token and the run: arguments first, then the environment."""

from __future__ import annotations

import os
import re
from urllib.parse import quote, urlsplit

DEFAULT = "http://127.0.0.1:8000"
"""The default address of `turnlog serve` and uvicorn."""

TOKENS = ("TURNLOG_TOKEN", "TURNLOG_ADMIN_TOKEN")
"""Variables that hold a token of the client's: no program that it starts for somebody else inherits them."""

SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def default_address() -> str:
    return os.environ.get("TURNLOG_URL") or DEFAULT


def default_token() -> str | None:
    """`TURNLOG_TOKEN`, else the first of `TURNLOG_ADMIN_TOKEN`, which is the current one."""
    given = os.environ.get("TURNLOG_TOKEN") or os.environ.get("TURNLOG_ADMIN_TOKEN", "").split(",")[0].strip()
    return given or None


def default_run(token: str | None = None) -> str | None:
    """`TURNLOG_RUN`: the run of new sessions; else that of a run's token, by default of the environment's."""
    return os.environ.get("TURNLOG_RUN") or run_of(token or default_token())


def run_of(token: str | None) -> str | None:
    """The run whose token this is, None of another token."""
    found = re.fullmatch(r"tlr\.(.+)\.\d+\.[^.]+", token or "")
    return found and found[1]


def below_run(run: str | None, path: str) -> str:
    """The path of the same route for one run; None: for all."""
    return path if run is None else f"/runs/{segment(run)}{path}"


def authorization(token: str | None) -> dict[str, str]:
    """Raises ValueError for a token that no header can hold; httpx's own error would quote it."""
    if token is None:
        return {}
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise ValueError("the token has characters that a header cannot contain, perhaps a trailing line feed")
    return {"authorization": f"Bearer {token}"}


def address(base_url: str) -> str:
    """The address without a trailing slash. Raises ValueError if it is not an http address, or contains a password."""
    try:
        url = urlsplit(base_url)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError as error:
        raise ValueError("the server's address cannot be parsed") from error
    if "@" in url.netloc:
        raise ValueError("the server's address has a user name or a password: use a token instead")
    if url.scheme not in ("http", "https") or not has_host or url.query or url.fragment:
        raise ValueError(f"{base_url} is not an address like {DEFAULT}")
    return base_url.rstrip("/")


def session_path(session_id: str) -> str:
    """Raises ValueError for an invalid session id."""
    if not SESSION_ID.fullmatch(session_id) or not session_id.strip("."):
        raise ValueError("a session's id is 1 to 128 letters, digits, dots, underscores, colons or hyphens")
    return f"/sessions/{quote(session_id, safe=':')}"


def segment(name: str) -> str:
    """A name as a part of a URL's path, quoted."""
    return quote(name, safe="")
