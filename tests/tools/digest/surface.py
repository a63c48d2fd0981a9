"""What a user can see of a checkout: routes, types on the wire, stored events, rows, settings, metrics, commands,
errors and the client's names.

`visible` gives them as sections of lines, each a fact that somebody may rest on. The digest runs this file as a program
so that the code that is looked at is that of the working folder. It prints what needs no server.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, is_typeddict

if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))

Fact = tuple[str, str]
"""A section, such as `setting TURNLOG_HISTORY`, and a line in it; the line is empty for the section itself."""

COMPONENT = "#/components/schemas/"
WITHOUT = ("/ui/api",)
"""Paths that are no one's but the page's."""


def main() -> None:
    """Print all lines that need no server, sorted within their kind."""
    for kind in (settings, events, rows, commands, errors, client):
        for section, line in sorted(kind()):
            print(section, line)


def visible(document: dict[str, Any], metrics_text: str) -> list[Fact]:
    """All facts, sorted; of a running server's OpenAPI document, its `/metrics`, and this process's code."""
    kinds = (settings, events, rows, commands, errors, client)
    found = {fact for kind in kinds for fact in kind()}
    # What the client's types say of objects on the wire is said by the document already.
    on_wire = {f"client {name}" for name in document["components"]["schemas"]}
    found -= {(section, line) for section, line in found if section in on_wire and line}
    found |= {*routes(document), *types(document), *metrics(metrics_text)}
    return sorted(found | {(section, "") for section, _ in found})


def settings() -> Iterator[Fact]:
    """Each setting with its default and, where these are few, the values that it takes."""
    from app.settings import CLIENT_VARIABLES, CONFIG, PREFIX, Settings

    for name in (*CLIENT_VARIABLES, CONFIG):
        yield f"setting {name}", ""
    for name, field in Settings.model_fields.items():
        section = f"setting {PREFIX}{name.upper()}"
        yield section, "" if field.default_factory is not None else f"default {field.default!r}"
        yield from ((section, f"takes {value!r}") for value in _values_of(field.annotation))


def _values_of(annotation: Any) -> Iterator[str]:
    """The values of the Literals in a type."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _values_of(part)


def events() -> Iterator[Fact]:
    """Each event with the version under which it is written; its fields, with defaults, and what these hold."""
    import msgspec

    from app.domain import events, fleet

    known: dict[str, type[msgspec.Struct]] = {**events.TYPES, **fleet.TYPES}
    for name, kind in known.items():
        yield f"event {name}", f"version {vars(kind).get('VERSION', 1)}"
    waiting = list(known.values())
    seen: set[Any] = set()
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        is_list = kind.__struct_config__.array_like
        for place, field in enumerate(msgspec.structs.fields(kind)):
            before = f"{place} " if is_list else ""
            default = "" if field.required else f" = {_default(field)}"
            yield f"event {kind.__name__}", f"{before}{field.name}: {_spelled(field.type)}{default}"
            waiting += _structs(field.type)


def _default(field: Any) -> str:
    import msgspec

    return repr(field.default_factory() if field.default is msgspec.NODEFAULT else field.default)


def _structs(annotation: Any) -> Iterator[Any]:
    if hasattr(annotation, "__struct_fields__"):
        yield annotation
    for part in get_args(annotation):
        yield from _structs(part)


def rows() -> Iterator[Fact]:
    """Each shape and document with its columns, and each format."""
    from app.export import formats

    for name in formats.FORMATS:
        yield f"format {name}", ""
    for name, entry in {**formats.SHAPES, **formats.DOCUMENTS}.items():
        for columns in (entry.columns, entry.masks, entry.of_turns):
            yield from ((f"row {name}", f"{column}: {kind}") for column, kind in _columns(columns))


def _columns(columns: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for name, kind in columns.items():
        if isinstance(kind, str):
            yield before + name, kind
        else:
            yield from _columns(kind, f"{before}{name}.")


def commands() -> Iterator[Fact]:
    """Each command with its arguments and options."""
    import typer.main

    from turnlog.cli.commands import app_of

    yield from _commands("turnlog", typer.main.get_command(app_of()))


def _commands(name: str, command: Any) -> Iterator[Fact]:
    yield f"command {name}", ""
    for one in command.params:
        takes = (
            "a flag" if getattr(one, "is_flag", False) else "values" if one.nargs == -1 or one.multiple else "a value"
        )
        needed = ", required" if one.required else ""
        yield f"command {name}", f"{', '.join([*one.opts, *one.secondary_opts])}: {takes}{needed}"
    for below, one in getattr(command, "commands", {}).items():
        yield from _commands(f"{name} {below}", one)


def errors() -> Iterator[Fact]:
    """Each code with its status and type."""
    from app.errors import AppError

    def below(kind: type[AppError]) -> Iterator[type[AppError]]:
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    import app.main  # noqa: F401  # features have errors of their own

    for kind in below(AppError):
        yield f"error {kind.code}", f"{kind.status} {kind.type}"


def client() -> Iterator[Fact]:
    """What `turnlog` and `turnlog.errors` export: functions, classes with their methods, the fields of dicts."""
    import turnlog
    import turnlog.errors

    names: list[str] = getattr(turnlog, "__all__")  # noqa: B009  # made at first use
    for name in names:
        found = getattr(turnlog, name)
        if f"Async{name}" in names:  # made of that one
            yield f"client {name}", f"as Async{name}"
        else:
            yield from _exported(f"client {name}", found)
    for name, kind in vars(turnlog.errors).items():
        if inspect.isclass(kind) and issubclass(kind, turnlog.errors.TurnlogError):
            yield f"client errors.{name}", f"is a {kind.__mro__[1].__name__}"
    yield from _called("client errors.TurnlogError", "", turnlog.errors.TurnlogError)


def _exported(section: str, found: Any) -> Iterator[Fact]:
    yield section, ""
    if is_typeddict(found):
        for name, spelled in found.__annotations__.items():
            yield section, f"{name}{'' if name in found.__required_keys__ else '?'}: {_spelled(spelled)}"
    elif inspect.isclass(found) and issubclass(found, Exception):
        yield section, f"is a {found.__mro__[1].__name__}"
    elif inspect.isclass(found):
        for name, member in inspect.getmembers(found):
            if name.startswith("_") and name not in ("__init__", "__enter__", "__aenter__", "__iter__", "__aiter__"):
                continue
            if isinstance(member, property) or not callable(member):
                yield section, name
            elif found.__module__.startswith("turnlog"):
                yield from _called(section, f"{name} ", member)
        for name, spelled in getattr(found, "__annotations__", {}).items():
            if not name.startswith("_"):
                yield section, f"{name}: {_spelled(spelled)}"
    elif callable(found) and inspect.isroutine(found):
        yield from _called(section, "", found)
    else:
        yield from ((section, f"may be {value!r}") for value in _values_of(found))


_STARS: Mapping[str, str] = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**", "KEYWORD_ONLY": "="}


def _called(section: str, before: str, function: Callable[..., Any]) -> Iterator[Fact]:
    """A function's parameters, those behind a `*` with an equals sign, and what it gives."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C
        return
    yield section, f"{before}gives {_spelled(signature.return_annotation)}"
    for name, one in signature.parameters.items():
        if name == "self" or name.startswith("_"):
            continue
        default = "" if one.default is one.empty else f" = {one.default!r}"
        stars = _STARS.get(one.kind.name, "")
        yield section, f"{before}takes {stars}{name}: {_spelled(one.annotation)}{default}"


def _spelled(annotation: Any) -> str:
    """A type as text, without modules. Literals are `of` their type."""
    if isinstance(annotation, str):
        return annotation
    if hasattr(annotation, "__forward_arg__"):
        return str(annotation.__forward_arg__)
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return " | ".join(_spelled(part) for part in parts)
    if origin is Literal:
        return " | ".join(map(repr, parts))
    if annotation is None or annotation is type(None):
        return "None"
    if isinstance(annotation, TypeVar):
        return annotation.__name__
    name = getattr(annotation, "__name__", str(annotation))
    if not parts:
        return "..." if annotation is Ellipsis else str(name)
    return f"{name}[{', '.join(_spelled(part) for part in parts)}]"


# The OpenAPI document.


def routes(document: dict[str, Any]) -> Iterator[Fact]:
    """Each route with its parameters, what it requires, its body and its answers."""
    for path, methods in document["paths"].items():
        if path.startswith(WITHOUT):
            continue
        for method, operation in methods.items():
            yield from _route(f"route {method.upper()} {path}", operation)


def _route(section: str, operation: dict[str, Any]) -> Iterator[Fact]:
    parameters = operation.get("parameters", ())
    for one in parameters:
        yield from _typed(section, f"{one['in']} {one['name']}", one["schema"])
    required = sorted(one["name"] for one in parameters if one["required"])
    body = operation.get("requestBody")
    if body is not None:
        required += ["a body"] if body["required"] else []
        yield section, f"body {_kind(body['content']['application/json']['schema'])}"
    yield section, f"requires {' '.join(required) or 'nothing'}"
    for status, reply in operation["responses"].items():
        if "$ref" in reply:
            yield section, f"fails with {status}"
            continue
        yield from ((section, f"{status} with {header}") for header in reply.get("headers", ()))
        for media, content in reply.get("content", {"": {"schema": {}}}).items():
            schema = content["schema"].get("x-line", content["schema"])
            yield section, f"{status} {media} {_kind(schema)}".rstrip()


def types(document: dict[str, Any]) -> Iterator[Fact]:
    """The fields of each object that routes take or give."""
    for name, schema in document["components"]["schemas"].items():
        section = f"type {name}"
        yield section, f"requires {' '.join(sorted(schema.get('required', ()))) or 'nothing'}"
        for field, kind in schema.get("properties", {}).items():
            yield from _typed(section, field, kind)
        if "properties" not in schema:
            yield from _typed(section, "is", schema)


def _typed(section: str, name: str, schema: dict[str, Any]) -> Iterator[Fact]:
    """A field's type and default; each value of an enumeration is a line of its own, since more may come."""
    default = f" = {json.dumps(schema['default'])}" if "default" in schema else ""
    yield section, f"{name}: {_kind(schema)}{default}"
    yield from ((section, f"{name} may be {json.dumps(value)}") for value in _enumerated(schema))


def _enumerated(schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        yield from schema.get("enum", ())
        for key, value in schema.items():
            if key in ("anyOf", "items", "additionalProperties", "prefixItems"):
                for part in value if isinstance(value, list) else [value]:
                    yield from _enumerated(part)


def _kind(schema: Any) -> str:
    if not isinstance(schema, dict):
        return "any"
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(COMPONENT)
    for key, between in (("anyOf", " | "), ("allOf", " & ")):
        if key in schema:
            return between.join(_kind(part) for part in schema[key])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return "enum"
    kind = schema.get("type", "any")
    if kind == "array":
        return f"[{_kind(schema.get('items', {}))}]"
    if kind == "object" and "properties" in schema:
        return f"{{{', '.join(f'{name}: {_kind(one)}' for name, one in sorted(schema['properties'].items()))}}}"
    if kind == "object":
        return f"{{{_kind(schema.get('additionalProperties', {}))}}}"
    return " | ".join(kind) if isinstance(kind, list) else str(kind)


class _Sampled(NamedTuple):
    name: str
    labels: frozenset[str]


_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? \S+")


def metrics(text: str) -> Iterator[Fact]:
    """Each metric that Prometheus' text has, with its type and its labels."""
    kinds = dict(line.split(" ")[2:4] for line in text.splitlines() if line.startswith("# TYPE"))
    for name, kind in kinds.items():
        yield f"metric {name}", kind
    for sample in {_sampled(line) for line in text.splitlines() if line[:1] not in ("#", "")}:
        name = sample.name
        for end in ("_bucket", "_sum", "_count"):
            if name not in kinds:
                name = name.removesuffix(end) if name.removesuffix(end) in kinds else name
        yield from ((f"metric {name}", f"label {label}") for label in sample.labels - {"le"})


def _sampled(line: str) -> _Sampled:
    found = _SAMPLE.fullmatch(line)
    assert found is not None, line
    return _Sampled(found[1], frozenset(re.findall(r'(\w+)="', found[2] or "")))


# The listing of a release.

_LIST = re.compile(r"(?:\S+ )?(?:takes|may be|fails with|with) |(?:header|query|path) ")
BETWEEN = "; "
"""Between lines that begin alike, which are written as one."""


def written(facts: Iterable[Fact]) -> str:
    """The facts as text: a section, and its lines below it, indented."""
    lines: list[str] = []
    before = ""
    for section, line in facts:
        if section != before:
            lines.append(section)
            before = section
        common = _common(line)
        if common and lines[-1].startswith(f"  {common}"):
            lines[-1] += BETWEEN + line.removeprefix(common)
        elif line:
            lines.append(f"  {line}")
    return "\n".join(lines) + "\n"


def _common(line: str) -> str:
    """What lines of one list have in common; empty for another line."""
    found = _LIST.match(line)
    return found[0] if found else ""


def read(text: str) -> list[Fact]:
    """What `written` wrote."""
    found: list[Fact] = []
    section = ""
    for line in text.splitlines():
        if line.startswith("  "):
            common = _common(line[2:])
            values = line[2:].removeprefix(common)
            found += [(section, common + value) for value in (values.split(BETWEEN) if common else [values])]
        else:
            section = line
            found.append((section, ""))
    return found


if __name__ == "__main__":
    main()
