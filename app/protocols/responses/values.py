"""Reads decoded JSON values; every error names the field by its path."""

from __future__ import annotations

from typing import Any

from app.errors import InvalidRequest, Unsupported

MAX_SHOWN = 64
"""Characters of a client's own word that an error repeats."""


def text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path} must be a string")
    return value


def name(value: Any, path: str) -> str:
    if not text(value, path):
        raise InvalidRequest(f"{path} must not be empty")
    return str(value)


def text_or_none(value: Any, path: str) -> str | None:
    return None if value is None else text(value, path)


def flag_or_none(value: Any, path: str) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequest(f"{path} must be true or false")


def fields(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{path} must be an object")
    return value


def items(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} must be a list")
    return value


def placed(values: list[Any], path: str) -> list[tuple[str, Any]]:
    """The values of a list with their paths."""
    return [(f"{path}[{index}]", value) for index, value in enumerate(values)]


def one_of(value: Any, path: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed or not isinstance(value, str):
        raise InvalidRequest(f"{path} must be one of {', '.join(allowed)}")
    return value


def unsupported(path: str, value: Any = None) -> Unsupported:
    """`value` is what stands there, if it is a short word of the protocol."""
    shown = f" {value[:MAX_SHOWN]!r}" if isinstance(value, str) else ""
    return Unsupported(f"{path}{shown} is not supported: it cannot be carried to an engine")
