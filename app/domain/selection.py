"""Which sessions a list, an export, an archive or a webhook is about: those of a run, of groups, with values of their
metadata."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import parse_qsl

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from app.domain import patterns

MAX_VALUES = 100
"""Groups, or values of one key, that a request names."""

MAX_KEYS = 20
"""Keys of the metadata that a request names."""

MISSING = object()


def _listed(given: object) -> object:
    return [given] if isinstance(given, str) else given


def _texts(given: object) -> object:
    """A body may have numbers, true, false and null as they are."""
    if given is None or isinstance(given, bool | int | float):
        return [msgspec.json.encode(given).decode()]
    return _listed(given)


def _by_key(given: object) -> object:
    if isinstance(given, str):
        raise ValueError("expected metadata.<key>=<value>")
    return given


Text = Annotated[str, Field(max_length=512, pattern=patterns.NO_NUL)]

Values = Annotated[list[Text], Field(min_length=1, max_length=MAX_VALUES), BeforeValidator(_texts)]

Metadata = Annotated[
    dict[Annotated[str, Field(min_length=1, max_length=512)], Values],
    Field(max_length=MAX_KEYS),
    BeforeValidator(_by_key),
]


class Selection(BaseModel):
    """Conditions on a session; None and empty: any. Of several groups, and of several values of a key, one must fit."""

    model_config = ConfigDict(frozen=True)

    run: str | None = Field(default=None, pattern=patterns.ID, description="Only sessions of this run.")
    group_id: Annotated[list[Text], BeforeValidator(_listed)] = Field(
        default=[], max_length=MAX_VALUES, description="Only sessions of this group; repeated: of any of these."
    )
    group_prefix: Text | None = Field(default=None, description="Only sessions of groups whose id begins with this.")
    metadata: Metadata = Field(
        default={},
        description="`metadata.<key>=<value>`: only sessions whose metadata has this value; another key: this too. A "
        "dot in the key leads into an object.",
    )

    @property
    def run_and_group(self) -> dict[str, Any]:
        """The conditions that a session's row answers: the fields of `store.selection.GroupFilter`."""
        return {"run": self.run, "group_id": tuple(self.group_id), "group_prefix": self.group_prefix}


class _Told(Selection):
    model_config = ConfigDict(extra="forbid")


def selection_of(text: str) -> Selection:
    """Of a text such as `run=a&group_prefix=maze&metadata.level=3`. Raises ValueError."""
    pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=True)
    return _Told.model_validate(fields_of(pairs, {"group_id"}, {"metadata"}))


def fields_of(pairs: Iterable[tuple[str, str]], lists: Collection[str], maps: Collection[str]) -> dict[str, Any]:
    """The fields of a query: of `lists` all values, of `maps` those of each key behind the field's name and a dot."""
    fields = dict[str, Any]()
    for name, value in pairs:
        field, _, key = name.partition(".")
        if key and field in maps:
            fields.setdefault(field, {}).setdefault(key, []).append(value)
        elif name in lists:
            fields.setdefault(name, []).append(value)
        else:
            fields[name] = value
    return fields


def has_all(stored: bytes, wanted: Mapping[str, Sequence[str]]) -> bool:
    """Has this metadata, as JSON, one of the values of each key?"""
    try:
        metadata = msgspec.json.decode(stored)
    except msgspec.MsgspecError:
        return False
    return all(any(is_value(value_of(metadata, key), text) for text in texts) for key, texts in wanted.items())


def value_of(metadata: object, key: str) -> object:
    """The value of a key; if there is no such key, a dot in it leads into an object."""
    if not isinstance(metadata, Mapping):
        return MISSING
    if key in metadata:
        value: object = metadata[key]
        return value
    head, dot, rest = key.partition(".")
    return value_of(metadata.get(head), rest) if dot else MISSING


def is_value(value: object, text: str) -> bool:
    """Is this the text, or the value that it is as JSON? `3` is both the number and the text."""
    if value is MISSING:
        return False
    if isinstance(value, str):
        return value == text
    try:
        given: Any = msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeEncodeError):
        return False
    return _canonical(value) == _canonical(given)


def _canonical(value: object) -> bytes:
    return msgspec.json.encode(value, order="deterministic")
