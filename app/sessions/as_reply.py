"""Fills a reply's type from what has fields of the same names."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def as_reply(kind: type[T], of: object, /, **others: Any) -> T:
    """A `TypedDict` of `turnlog.replies`, in its order: `others` by their names, every other field from `of`."""
    fields: Any = {name: others[name] if name in others else getattr(of, name) for name in kind.__annotations__}
    return fields  # type: ignore[no-any-return]
