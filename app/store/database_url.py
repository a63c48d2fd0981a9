"""What a PostgreSQL URL may say behind its `?`: parameters of libpq, as consoles of clouds give them, and the driver's.

libpq's list: https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PARAMKEYWORDS
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from sqlalchemy.engine import URL

SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
SESSION_KINDS = ("any", "primary", "standby", "read-write", "read-only", "prefer-standby")

ADDRESS = frozenset({"host", "port", "user", "password", "prepared_statement_cache_size"})
"""Parameters that SQLAlchemy hands on as they are."""

LIBPQ = frozenset(
    {
        *("sslmode", "sslrootcert", "sslcert", "sslkey", "sslpassword", "sslcrl"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs", "passfile"),
    }
)
"""Those that asyncpg reads from a URL of its own."""

SERVER = frozenset({"application_name", "options"})
"""Those that the server gets when a connection begins."""

WISHES = {"channel_binding": ("prefer", "disable"), "gssencmode": ("prefer", "disable")}
"""Those that the driver does not have, with the values that ask it for nothing."""

KNOWN = ADDRESS | LIBPQ | SERVER | {"ssl", "connect_timeout"}


def driver_arguments(url: URL, timeout_s: float) -> tuple[URL, dict[str, Any]]:
    """The URL with the parameters that SQLAlchemy understands, and the arguments of `asyncpg.connect` for the others.

    `timeout_s` is for a URL that names none. Raises ValueError, which says what is accepted.
    """
    given: dict[str, str] = {}
    for name, value in url.query.items():
        if value in WISHES.get(name, ()):
            continue
        if name not in KNOWN:
            raise ValueError(
                f"one without {name}, which the driver does not support; it supports {', '.join(sorted(KNOWN))}"
            )
        if name not in ADDRESS:
            if not isinstance(value, str):
                raise ValueError(f"one with {name} only once")
            given["sslmode" if name == "ssl" else name] = value
    _require("sslmode", given, SSL_MODES)
    _require("target_session_attrs", given, SESSION_KINDS)
    wait = given.get("connect_timeout", str(timeout_s))
    if "connect_timeout" in given and not (wait.isascii() and wait.isdecimal()):
        raise ValueError("one with connect_timeout in whole seconds, 0 for no limit")
    arguments: dict[str, Any] = {
        "timeout": float(wait) or None,
        "server_settings": {"application_name": "turnlog"} | {name: given[name] for name in SERVER & given.keys()},
    }
    if libpq := {name: value for name, value in given.items() if name in LIBPQ}:
        arguments["dsn"] = f"postgresql://?{urlencode(libpq)}"
    return url.set(query={name: value for name, value in url.query.items() if name in ADDRESS}), arguments


def _require(name: str, given: dict[str, str], accepted: tuple[str, ...]) -> None:
    if given.get(name, accepted[0]) not in accepted:
        raise ValueError(f"one with {name} of {', '.join(accepted)}")
