"""Checks parameters before they are sent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

Hint = Any
"""A type as `get_type_hints` gives it."""


def checked(parameters: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are not None.

    `parameters` is one of the TypedDicts of `turnlog.parameters`. Raises TypeError for an unknown name, and for a value
    of another type; ValueError for a value that the server does not know, and for a number that is not finite.
    """
    known = _hints(parameters)
    for name in given:
        if name not in known:
            raise TypeError(f"{name} is not a parameter{_meant(name, known)}: there are {', '.join(sorted(known))}")
    found = {name: value for name, value in given.items() if value is not None}
    for name, value in found.items():
        _require(name, value, known[name])
    return found


def wanted(parameters: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The `checked` parameters as a query has them: `columns` with commas, each key of the `metadata` in a name of its
    own. Raises TypeError, ValueError."""
    found = checked(parameters, given)
    if not isinstance(columns := found.get("columns", ""), str):
        found["columns"] = ",".join(columns)
    for key, value in found.pop("metadata", {}).items():
        values = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        if not values:
            raise ValueError(f"metadata: {key} has an empty list of values")
        found[f"metadata.{key}"] = [one if isinstance(one, str) else json.dumps(one) for one in values]
    return found


@cache
def _hints(parameters: type) -> Mapping[str, Hint]:
    return get_type_hints(parameters)


def _meant(name: str, known: Mapping[str, Hint]) -> str:
    close = get_close_matches(name, known, n=1)
    return f", did you mean {close[0]}" if close else ""


def _require(name: str, value: object, hint: Hint) -> None:
    """Raises TypeError, ValueError."""
    choices = _choices(hint)
    fields = next((choice for choice in choices if is_typeddict(choice)), None)
    if fields is not None and isinstance(value, Mapping):
        try:
            checked(fields, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None
        return
    if any(_is(value, choice) for choice in choices):
        if _is(value, float) and not math.isfinite(value):  # type: ignore[arg-type]
            raise ValueError(f"{name} must be finite, not {value}")
        return
    words = [choice for choice in choices if isinstance(choice, str)]
    if words and isinstance(value, str):
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {value:.64}")
    if isinstance(value, Sequence) and not isinstance(value, str) and (items := _items(choices)):
        raise ValueError(f"each of {name} must be one of {', '.join(items)}")
    raise TypeError(f"{name} must be {' or '.join(map(_name, choices))}, not {type(value).__name__}")


def _choices(hint: Hint) -> list[Hint]:
    """The types and, of literals, the values that a hint allows."""
    origin: Any = get_origin(hint)
    if origin in (Union, UnionType):
        return [choice for one in get_args(hint) for choice in _choices(one)]
    if origin is Literal:
        return list(get_args(hint))
    return [hint]


def _items(choices: Sequence[Hint]) -> list[str]:
    """The words of which a sequence may consist."""
    origins: list[Any] = [get_origin(choice) for choice in choices]
    kinds = [get_args(choice)[0] for choice, origin in zip(choices, origins, strict=True) if origin is Sequence]
    return [word for kind in kinds for word in _choices(kind) if isinstance(word, str)]


def _is(value: object, choice: Hint) -> bool:
    """Numbers may be of any kind, so numpy's are numbers too."""
    if isinstance(choice, str):
        return value == choice
    if is_typeddict(choice):
        return False  # `isinstance` refuses one; `_require` has looked into a mapping
    origin: Any = get_origin(choice)
    if origin is Sequence:
        of = _choices(get_args(choice)[0])
        return (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(any(_is(one, each) for each in of) for one in value)
        )
    if choice is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if choice is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    return isinstance(value, origin or choice)


def _name(choice: Hint) -> str:
    if isinstance(choice, str):
        return repr(choice)
    if is_typeddict(choice):
        return "a mapping"
    found: str = getattr(get_origin(choice) or choice, "__name__", str(choice))
    return {"NoneType": "None", "Mapping": "a mapping", "Sequence": "a sequence"}.get(found, found)
