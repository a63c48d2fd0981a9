"""Tokens: what is accepted, and what is derived from it.

    admin token      in TURNLOG_ADMIN_TOKEN
    session token    tls.<session id>.<MAC over the id>
    cookie           <expiry>.<MAC over it>, for the page

Nothing of it is stored: a MAC can be made again. A key is derived from each secret, so that a MAC says nothing about
another use of the secret. Every comparison goes over all secrets, and takes as long whichever fits.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence

PREFIX = b"tls."

COOKIE_S = 12 * 3600
"""How long a browser stays signed in."""

_SESSION, _COOKIE = b"turnlog session v1\0", b"turnlog cookie v1\0"


class Tokens:
    """`admin` tokens, and `secrets` that session tokens are made of: of each the first is current, all are accepted.

    Without secrets of their own, session tokens are made of the admin tokens. Without those nobody needs a token.
    """

    def __init__(self, admin: Sequence[str], secrets: Sequence[str] = ()) -> None:
        self._admin = [hashlib.sha256(token.encode()).digest() for token in admin]
        self._session_keys = [_key(secret, _SESSION) for secret in (secrets or admin)]
        self._cookie_keys = [_key(token, _COOKIE) for token in admin]

    @property
    def are_needed(self) -> bool:
        return bool(self._admin)

    def is_admin(self, token: bytes) -> bool:
        return self._place(token) is not None

    def _place(self, token: bytes) -> int | None:
        """Which of the admin tokens it is."""
        given = hashlib.sha256(token).digest()
        found = None
        for place, known in enumerate(self._admin):
            if hmac.compare_digest(given, known):
                found = place
        return found

    def for_session(self, session_id: str) -> str | None:
        """The session's own token, the same each time; None where nobody needs one."""
        if not self.are_needed:
            return None
        name = session_id.encode()
        return (PREFIX + name + b"." + _mac(self._session_keys[0], _SESSION, name)).decode()

    def session_of(self, token: bytes) -> str | None:
        """The session that the token is for; None for what is no session's token."""
        if not token.startswith(PREFIX) or not token.isascii():
            return None
        name, _, given = token[len(PREFIX) :].rpartition(b".")
        return name.decode() if _fits(self._session_keys, _SESSION, name, given) else None

    def cookie_for(self, token: bytes, now: float) -> str | None:
        """What a browser keeps that has shown this admin token; None for any other. `now`: seconds since the epoch.

        It is made of that token: a cookie ends with the token that it was given for.
        """
        place = self._place(token)
        if place is None:
            return None
        expiry = b"%d" % (now + COOKIE_S)
        return (expiry + b"." + _mac(self._cookie_keys[place], _COOKIE, expiry)).decode()

    def is_signed_in(self, cookie: bytes, now: float) -> bool:
        expiry, _, given = cookie.partition(b".")
        fits = _fits(self._cookie_keys, _COOKIE, expiry, given)
        return fits and now < int(expiry)


def _key(secret: str, use: bytes) -> bytes:
    return hmac.digest(secret.encode(), b"key of " + use, "sha256")


def _mac(key: bytes, use: bytes, text: bytes) -> bytes:
    """43 characters that a URL may hold."""
    return base64.urlsafe_b64encode(hmac.digest(key, use + text, "sha256")).rstrip(b"=")


def _fits(keys: Sequence[bytes], use: bytes, text: bytes, given: bytes) -> bool:
    fits = False
    for key in keys:
        fits |= hmac.compare_digest(_mac(key, use, text), given)
    return fits
