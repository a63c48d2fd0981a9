"""Options that are a route's parameters: their names, choices and texts are those of `turnlog.parameters`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer

from turnlog.cli import complete
from turnlog.cli.running import UsageError

Command = Callable[..., None]


def takes(parameters: type, *without: str) -> Callable[[Command], Command]:
    """The command's `**parameters` become options, one for each of the TypedDict's fields but `without`.

    `group_id` is `--group`, and so on; as a filter it may be repeated. An object is given as JSON, which `read_object`
    reads; in a filter by metadata as `KEY=VALUE`, which may be repeated.
    """

    def with_options(command: Command) -> Command:
        own = inspect.signature(command, eval_str=True)
        hints = get_type_hints(parameters, include_extras=True)
        options = [_option(name, hint) for name, hint in hints.items() if name not in without]
        *others, _ = own.parameters.values()
        command.__signature__ = own.replace(parameters=[*others, *options])  # type: ignore[attr-defined]
        return command

    return with_options


def given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The options that were given, as the server reads them in a query. Raises UsageError."""
    there = {name: "true" if value is True else value for name, value in parameters.items() if name != "metadata"}
    named = {name: value for name, value in there.items() if value not in (None, []) and value is not False}
    return named | {f"metadata.{key}": values for key, values in by_key(parameters.get("metadata")).items()}


def by_key(pairs: Sequence[str] | None) -> dict[str, list[str]]:
    """Of `KEY=VALUE`s. Raises UsageError."""
    found: dict[str, list[str]] = {}
    for pair in pairs or ():
        key, sign, value = pair.partition("=")
        if not (key and sign):
            raise UsageError(f"--metadata {pair:.64}: expected KEY=VALUE")
        found.setdefault(key, []).append(value)
    return found


def read_object(flag: str, text: str | None) -> dict[str, Any] | None:
    """Raises UsageError."""
    try:
        value = None if text is None else json.loads(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None
    if value is not None and not isinstance(value, dict):
        raise UsageError(f"{flag} is not a JSON object")
    return value


def _option(name: str, hint: Any) -> inspect.Parameter:
    allowed, told = get_args(hint)
    kind, metavar = _kind(name, allowed)
    flag = "--" + name.removesuffix("_id").replace("_", "-")
    return inspect.Parameter(
        name,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=False if kind is bool else None,
        annotation=Annotated[
            kind | None,
            typer.Option(
                flag,
                help=told,
                metavar=metavar,
                min=1 if name == "limit" else None,
                autocompletion=complete.BY_NAME.get(name),
            ),
        ],
    )


def _kind(name: str, hint: Any) -> tuple[Any, str | None]:
    """The option's type, and what stands for its value in the help."""
    kinds = set(get_args(hint) if get_origin(hint) in (Union, UnionType) else [hint]) - {type(None)}
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if name == "group_id" and len(kinds) > 1:
        return list[str], None
    if bool in kinds:
        return bool, None
    if words:
        return StrEnum(name, {word: word for word in words}), None
    if kinds <= {int, float}:
        return kinds.pop(), None
    objects = [kind for kind in kinds if get_origin(kind) is Mapping or hasattr(kind, "__total__")]
    if objects:
        is_filter = get_origin(objects[0]) is Mapping and get_args(objects[0])[1] is not Any
        return (list[str], "KEY=VALUE") if is_filter else (str, "JSON")
    return str, None
