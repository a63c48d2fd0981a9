"""Checks admin tokens, and makes and checks tokens of sessions and of runs, and cookies.

    admin token      in TURNLOG_ADMIN_TOKEN
    session token    tls.<session id>.<MAC over the id>
    run's token      tlr.<run>.<number>.<MAC over both>; valid is the number that the store has (`of_run.admit`)
    cookie           <expiry>.<MAC over it>, for the page; of a run: <run>.<number>.<expiry>.<MAC over all>

Nothing is stored, since a MAC can be computed again. Each use has a key of its own, derived from the secret, so that
its MACs are useless for another use. Every comparison goes through all secrets, so its time reveals nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple

PREFIX, RUN_PREFIX = b"tls.", b"tlr."

COOKIE_S = 12 * 3600
"""How long a browser stays signed in."""

_SESSION, _RUN, _COOKIE = b"turnlog session v1\0", b"turnlog run v1\0", b"turnlog cookie v1\0"
_RUN_COOKIE = b"turnlog cookie of a run v1\0"


class RunToken(NamedTuple):
    """What a token of a run says. A later token of the run has a higher number."""

    run: str
    number: int


class Tokens:
    """`admin` tokens, and `secrets` from which tokens of sessions and runs are derived: the first is current, all are
    accepted.

    Without secrets these are derived from the admin tokens. Without admin tokens no token is needed.
    """

    def __init__(self, admin: Sequence[str], secrets: Sequence[str] = ()) -> None:
        self._admin = [hashlib.sha256(token.encode()).digest() for token in admin]
        self._session_keys = [_key(secret, _SESSION) for secret in (secrets or admin)]
        self._run_keys = [_key(secret, _RUN) for secret in (secrets or admin)]
        self._cookie_keys = [_key(token, _COOKIE) for token in admin]
        self._run_cookie_keys = [_key(secret, _RUN_COOKIE) for secret in (secrets or admin)]

    @property
    def are_needed(self) -> bool:
        return bool(self._admin)

    def is_admin(self, token: bytes) -> bool:
        return self._index(token) is not None

    def _index(self, token: bytes) -> int | None:
        """Index of the matching admin token, or None."""
        given = hashlib.sha256(token).digest()
        matching = None
        for index, known in enumerate(self._admin):
            if hmac.compare_digest(given, known):
                matching = index
        return matching

    def for_session(self, session_id: str) -> str | None:
        """The session's token, always the same; None if no token is needed."""
        if not self.are_needed:
            return None
        name = session_id.encode()
        return (PREFIX + name + b"." + _mac(self._session_keys[0], _SESSION, name)).decode()

    def session_of(self, token: bytes) -> str | None:
        """The session of a session token; None if the token is invalid."""
        if not token.startswith(PREFIX) or not token.isascii():
            return None
        name, _, given = token[len(PREFIX) :].rpartition(b".")
        return name.decode() if _is_valid(self._session_keys, _SESSION, name, given) else None

    def for_run(self, run: str, number: int) -> str:
        """The run's token with this number. Tokens are needed."""
        text = b"%s.%d" % (run.encode(), number)
        return (RUN_PREFIX + text + b"." + _mac(self._run_keys[0], _RUN, text)).decode()

    def run_of(self, token: bytes) -> RunToken | None:
        """What a token of a run says; None if it is no such token. Whether its number is valid, the store knows."""
        if not token.startswith(RUN_PREFIX) or not token.isascii():
            return None
        text, _, given = token[len(RUN_PREFIX) :].rpartition(b".")
        if not _is_valid(self._run_keys, _RUN, text, given):
            return None
        run, _, number = text.decode().rpartition(".")
        return RunToken(run, int(number))

    def cookie_for(self, token: bytes, now: float) -> str | None:
        """The page's cookie for a valid admin token, else None. `now`: seconds since the epoch.

        Its key is derived from that token, so removing the token invalidates the cookie.
        """
        index = self._index(token)
        if index is None:
            return None
        expiry = b"%d" % (now + COOKIE_S)
        return (expiry + b"." + _mac(self._cookie_keys[index], _COOKIE, expiry)).decode()

    def is_signed_in(self, cookie: bytes, now: float) -> bool:
        expiry, _, given = cookie.partition(b".")
        is_valid = _is_valid(self._cookie_keys, _COOKIE, expiry, given)
        return is_valid and now < int(expiry)

    def cookie_of_run(self, token: RunToken, now: float) -> str:
        """The page's cookie for the token of a run, which is valid as long as the token is."""
        text = b"%s.%d.%d" % (token.run.encode(), token.number, now + COOKIE_S)
        return (text + b"." + _mac(self._run_cookie_keys[0], _RUN_COOKIE, text)).decode()

    def run_signed_in(self, cookie: bytes, now: float) -> RunToken | None:
        """Whose run's token has signed in with this cookie; None if it is no such cookie, or has expired."""
        text, _, given = cookie.rpartition(b".")
        if not _is_valid(self._run_cookie_keys, _RUN_COOKIE, text, given):
            return None
        run, number, expiry = text.decode().rsplit(".", 2)
        return RunToken(run, int(number)) if now < int(expiry) else None


def _key(secret: str, use: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"key of " + use, "sha256")


def _mac(key: bytes, use: bytes, text: bytes) -> bytes:
    """A MAC of 43 URL-safe characters."""
    return base64.urlsafe_b64encode(hmac.digest(key, use + text, "sha256")).rstrip(b"=")


def _is_valid(keys: Sequence[bytes], use: bytes, text: bytes, given: bytes) -> bool:
    is_valid = False
    for key in keys:
        is_valid |= hmac.compare_digest(_mac(key, use, text), given)
    return is_valid
