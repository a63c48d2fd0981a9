"""What a request's parser keeps for its reply, as JSON that a session stores once however many turns repeat it.

Tools are kept by type and name: 24 tools of a coding agent are 78 KB, which would be stored again whenever
`previous_response_id` or `metadata` changes, and sent three times with each stream.
"""

from __future__ import annotations

from typing import Any

import msgspec

from app.protocols.responses.tools import Named


class Echo(msgspec.Struct, frozen=True, tag="responses", tag_field="protocol", omit_defaults=True):
    """`shown` are the request's fields that its response repeats. `named` are the tools whose calls are spelled
    otherwise than a function's, by the name that the engine knows."""

    shown: dict[str, Any]
    named: dict[str, Named] = {}
    encrypted: bool = False

    @property
    def instructions(self) -> str:
        return self.shown.get("instructions") or ""

    @property
    def is_stored(self) -> bool:
        """Does `GET` find the response? False for `store: false`."""
        return self.shown.get("store") is not False


NOTHING = Echo({})

_ECHO = msgspec.json.Decoder(Echo)


def read_echo(raw: bytes | None) -> Echo:
    """A turn's echo; empty for a turn of another protocol."""
    try:
        return NOTHING if raw is None else _ECHO.decode(raw)
    except msgspec.DecodeError:
        return NOTHING
