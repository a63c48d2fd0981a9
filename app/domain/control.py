"""`nvext.session_control` of a request: what the client asks of its session's engine (Dynamo's contract)."""

from __future__ import annotations

from typing import Literal

import msgspec

from app.domain import bounds, patterns
from app.domain.surrogates import decoded
from app.errors import InvalidRequest

Action = Literal["open", "bind", "close"]

DEFAULT_TIMEOUT_S = 300.0
MAX_TIMEOUT_S = 7 * 86400.0

EXTENSIONS = "nvext"
CONTROL = "session_control"
_FIELDS = ("session_id", "action", "timeout")

_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class _Extended(msgspec.Struct):
    """The only field of a body that is read here."""

    nvext: msgspec.Raw = msgspec.Raw()


_EXTENDED = msgspec.json.Decoder(_Extended)


class SessionControl(msgspec.Struct, frozen=True):
    """`session_id` names an affinity, which several sessions may share; without an action it is only used.

    It ends after `timeout_s` seconds without use; None: unchanged, or DEFAULT_TIMEOUT_S.
    """

    session_id: str
    action: Action | None = None
    timeout_s: float | None = None


def remove_control(params: dict[str, msgspec.Raw]) -> SessionControl | None:
    """Remove and return the control from a request's fields; other extensions stay for the engine.

    Raises InvalidRequest, which names the field.
    """
    raw = params.get(EXTENSIONS)
    members = None if raw is None else _members(raw)
    if members is None or CONTROL not in members:
        return None
    control = _control(members.pop(CONTROL))
    if members:
        params[EXTENSIONS] = msgspec.Raw(msgspec.json.encode(members))
    else:
        del params[EXTENSIONS]
    return control


def session_named(body: bytes) -> str | None:
    """The session that a request's control names. Raises InvalidRequest for an invalid control."""
    try:
        raw = decoded(_EXTENDED, body).nvext
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    if not bytes(raw):
        return None
    bounds.require_field(EXTENSIONS, bytes(raw))
    control = remove_control({EXTENSIONS: raw})
    return None if control is None else control.session_id


def _members(raw: msgspec.Raw) -> dict[str, msgspec.Raw] | None:
    """None if it is not an object; the engine or the request's parser rejects it."""
    try:
        return _MEMBERS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _control(raw: msgspec.Raw) -> SessionControl | None:
    if bytes(raw).strip() == b"null":
        return None
    members = _members(raw)
    if members is None:
        raise _bad("", "must be an object")
    unknown = next((name for name in members if name not in _FIELDS), None)
    if unknown is not None:
        raise InvalidRequest(f"{EXTENSIONS}.{CONTROL} may have {', '.join(_FIELDS)}, and no other field")
    values = {name: _value(name, member) for name, member in members.items()}
    return SessionControl(
        _session_id(values.get("session_id")), _action(values.get("action")), _timeout(values.get("timeout"))
    )


def _value(name: str, raw: msgspec.Raw) -> object:
    try:
        value: object = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _bad(name, "cannot be parsed") from error
    return value


def _session_id(value: object) -> str:
    if not isinstance(value, str) or not patterns.is_id(value):
        raise _bad("session_id", "must be 1 to 128 letters, digits, dots, underscores, colons or hyphens")
    return value


def _action(value: object) -> Action | None:
    match value:
        case None | "open" | "bind" | "close":
            return value
        case _:
            raise _bad("action", "must be open, bind, close or absent")


def _timeout(value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= MAX_TIMEOUT_S:
        raise _bad("timeout", f"must be a number of seconds from 1 to {MAX_TIMEOUT_S:.0f}")
    return float(value)


def _bad(name: str, fault: str) -> InvalidRequest:
    place = f"{EXTENSIONS}.{CONTROL}" + (f".{name}" if name else "")
    return InvalidRequest(f"{place} {fault}")
