"""Decodes parts of a Messages request; an invalid one is an InvalidRequest that names its place."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from app.errors import InvalidRequest

T = TypeVar("T")

_FAULT = re.compile(r"(?P<what>.*?)(?: - at `\$?(?P<path>.*)`)?", re.DOTALL)
_LONGEST = 120
"""Characters of a message: it may repeat an invalid value."""

_MISSING = re.compile(r"Object missing required field `(.*)`")


def decode(decoder: msgspec.json.Decoder[T], raw: bytes | msgspec.Raw, where: str) -> T:
    """The value at `where` of the request."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_at(str(error), where)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where} is not a value that can be read") from error


def _at(fault: str, where: str) -> str:
    """msgspec's message with the place in the whole request."""
    found = _FAULT.fullmatch(fault)
    what, path = (found["what"], found["path"] or "") if found else (fault, "")
    missing = _MISSING.fullmatch(what)
    return (
        f"{where}{path}.{missing[1]} is missing" if missing else f"{where}{path}: {what[:1].lower()}{what[1:_LONGEST]}"
    )


def required(value: T | None, where: str) -> T:
    """A field that its block must have."""
    if value is None:
        raise InvalidRequest(f"{where} is missing")
    return value


def object_text(raw: msgspec.Raw, where: str) -> bytes:
    """A raw JSON object. Raises InvalidRequest for anything else."""
    text = bytes(raw).strip()
    if not text:
        raise InvalidRequest(f"{where} is missing")
    if text[:1] != b"{":
        raise InvalidRequest(f"{where} must be an object")
    return text


def is_given(raw: msgspec.Raw | None) -> bool:
    """Is there a value other than null?"""
    return raw is not None and bytes(raw).strip() not in (b"", b"null")
