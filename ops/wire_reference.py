"""Generates docs/wire.md from the OpenAPI document: `python -m ops.wire_reference`.

`--check` only reports whether the page is current.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from app.api.openapi import document
from app.api.openapi.schemas import JSON
from app.errors import AppError
from app.main import create_app
from app.settings import Settings
from ops.generated_page import GeneratedPage
from ops.server import ROOT

FILE = ROOT / "docs" / "wire.md"
ADDRESS = "http://127.0.0.1:8000"
WHO = {
    "adminToken": "the admin token",
    "sessionToken": "the session's own token",
    "pageCookie": "the page's cookie",
}

INTRODUCTION = """# Wire reference

Every route. The page is made from the OpenAPI document (`GET /openapi.json`) by `python -m ops.wire_reference`.
[API](api.md) says what the routes mean, and why. Where `TURNLOG_ADMIN_TOKEN` is set, a request needs
`Authorization: Bearer <token>`; each route says whose. Errors that any route may answer with are not repeated at each;
they are in bold at the [end of the page](#errors).
"""

ABOUT_ERRORS = """The body is an [Error](#error). 405 `method_not_allowed` is a method that a path has not: `Allow`
names those that it has. An engine's own error passes with its status and body. A code in bold may be any route's
answer. The last two columns are the reply's headers."""

Schema = dict[str, Any]


class Reference:
    """The OpenAPI document as Markdown."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._operations = [
            (path, method.upper(), operation)
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ]
        guarded = [operation for _, _, operation in self._operations if operation["security"]]
        self._everywhere = set.intersection(*(self._codes_of(operation) for operation in guarded))

    def text(self) -> str:
        parts = [INTRODUCTION]
        tags = [(tag["name"], tag["description"], self._tagged(tag["name"])) for tag in self._document["tags"]]
        rows = [
            f"| {name if number == 0 else ''} | {_link(method, path)} | {operation['summary']} |"
            for name, _, tagged in tags
            for number, (path, method, operation) in enumerate(tagged)
        ]
        parts.append(_table("| | route | |", rows))
        for name, description, tagged in tags:
            parts.append(f"\n## {name}\n\n{description}\n")
            for path, method, operation in tagged:
                parts += self._operation(path, method, operation)
        parts.append("\n## Bodies\n")
        for name in self._document["components"]["schemas"]:
            parts += self._component(name)
        parts += self._errors()
        return "\n".join(part.strip("\n") + "\n" for part in parts)

    def _tagged(self, tag: str) -> list[tuple[str, str, Schema]]:
        return [one for one in self._operations if one[2]["tags"] == [tag]]

    def _operation(self, path: str, method: str, operation: Schema) -> Iterator[str]:
        yield f"\n### {method} {path}\n"
        described = operation.get("description") or f"{operation['summary']}."
        yield f"{described} For {self._who(operation)}."
        parameters = sorted(operation.get("parameters", []), key=lambda one: _parameter_order(one, path))
        rows = [self._parameter(one) for one in parameters]
        if rows:
            yield _table("| parameter | in | | | |", rows)
        body = operation.get("requestBody")
        if body is not None:
            needed = "needed" if body["required"] else "may be left out"
            yield f"Body ({needed}): {self._kind(body['content'][JSON]['schema'])}."
        yield f"```sh\n{_curl(path, method, operation)}\n```"
        yield from self._replies(operation)

    def _who(self, operation: Schema) -> str:
        names = [WHO[name] for one in operation["security"] for name in one]
        return " or ".join(names) if names else "anyone"

    def _parameter(self, parameter: Schema) -> str:
        schema = parameter["schema"]
        default, description = _default(schema, parameter["required"]), parameter["description"]
        return f"| `{parameter['name']}` | {parameter['in']} | {self._kind(schema)} | {default} | {description} |"

    def _replies(self, operation: Schema) -> Iterator[str]:
        rows, errors = [], []
        for status, given in operation["responses"].items():
            reply = self._resolved(given)
            named = [f"`{code}`" for code in _codes(reply) if code not in self._everywhere]
            if named:
                errors.append(f"{status} {', '.join(named)}")
            elif not _codes(reply):
                content = "; ".join(self._content(one, of["schema"]) for one, of in reply.get("content", {}).items())
                headers = ", ".join(f"`{name}`" for name in reply.get("headers", {}))
                rows.append(f"| {status} | {reply['description']} | {content} | {headers} |")
        yield _table("| status | | body | headers |", rows)
        if errors:
            yield f"Errors: {'; '.join(errors)}."

    def _content(self, media_type: str, schema: Schema) -> str:
        line = schema.get("x-line")
        kind = f"{self._kind(line)} a line" if line else self._kind(schema)
        return f"`{media_type}`" + ("" if kind in ("text", "bytes", "anything") else f": {kind}")

    def _codes_of(self, operation: Schema) -> set[str]:
        return {code for reply in operation["responses"].values() for code in _codes(self._resolved(reply))}

    def _errors(self) -> Iterator[str]:
        yield "\n## Errors\n"
        yield ABOUT_ERRORS
        found = sorted(set.union(*(self._codes_of(operation) for _, _, operation in self._operations)))
        rows = [_error(code, code in self._everywhere) for code in found]
        yield _table("| code | status | when | `x-should-retry` | `Retry-After`, s |", rows)

    def _component(self, name: str) -> Iterator[str]:
        schema = self._document["components"]["schemas"][name]
        yield f"\n### {name}\n"
        parts = schema.get("allOf", [schema])
        described = " ".join(" ".join(part.get("description", "").split()) for part in parts).strip()
        others = [self._kind(part) for part in parts if "$ref" in part]
        if others:
            described = f"{' and '.join(others)}, and more. {described}"
        if described:
            yield described
        rows = [row for part in parts for row in self._fields(part)]
        if rows:
            yield _table("| field | | | |", rows)

    def _fields(self, schema: Schema, within: str = "") -> Iterator[str]:
        """One row for each field; the fields of a nested object without a schema name get rows as well."""
        for field, of in schema.get("properties", {}).items():
            is_needed = field in schema.get("required", ())
            yield f"| `{within}{field}` | {self._kind(of)} | {_default(of, is_needed)} | {_description(of)} |"
            yield from self._fields(of, f"{within}{field}.")

    def _resolved(self, reply: Schema) -> Schema:
        found: Schema = reply
        if "$ref" in reply:
            found = self._document["components"]["responses"][reply["$ref"].rpartition("/")[2]]
        return found

    def _kind(self, schema: Schema) -> str:
        """A short description of a schema's type."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return f"[{name}](#{name.lower()})"
        if "anyOf" in schema:
            return " or ".join(self._kind(one) for one in schema["anyOf"])
        if "allOf" in schema:
            return " with ".join(self._kind(one) for one in schema["allOf"])
        if "enum" in schema:
            return ", ".join(f"`{one}`" for one in schema["enum"])
        if "const" in schema:
            return f"`{json.dumps(schema['const'])}`"
        if schema.get("type") == "array":
            return f"list of {self._kind(schema.get('items', {}))}"
        if isinstance(schema.get("additionalProperties"), dict):
            return f"object of {self._kind(schema['additionalProperties'])}"
        if schema.get("format") == "binary":
            return "bytes"
        names = {"string": "text", "integer": "integer", "object": "object", None: "anything"}
        kind = schema.get("type")
        return names.get(kind, str(kind)) + _bounds(schema)


def _error(code: str, is_everywhere: bool) -> str:
    """A row about a code: its statuses, and of the class that defines it what a client may do."""
    classes = [one for one in _errors() if one.code == code]
    first = classes[0]
    name = f"**`{code}`**" if is_everywhere else f"`{code}`"
    statuses = ", ".join(str(status) for status in sorted({one.status for one in classes}))
    retry = "" if first.retry is None else f"`{str(first.retry).lower()}`"
    return f"| {name} | {statuses} | {first.meaning} | {retry} | {first.retry_after_s or ''} |"


def _errors(error: type[AppError] = AppError) -> Iterator[type[AppError]]:
    """An error before those below it."""
    yield error
    for below in error.__subclasses__():
        yield from _errors(below)


def _bounds(schema: Schema) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum")
    if low is not None and high is not None and (isinstance(high, float) or high < 2**53):
        return f" {low} to {high}"
    if low is not None:
        return f" from {low}"
    if "pattern" in schema and "\\x00" not in schema["pattern"] and "\0" not in schema["pattern"]:
        return f" `{schema['pattern']}`"
    if "maxLength" in schema:
        return f" of at most {schema['maxLength']} characters"
    return ""


def _table(head: str, rows: list[str]) -> str:
    return "\n".join((head, "|" + " --- |" * (head.count("|") - 1), *rows))


def _parameter_order(parameter: Schema, path: str) -> int:
    """Sort key: path parameters first, in the order of the path."""
    return path.index(f"{{{parameter['name']}}}") if parameter["in"] == "path" else len(path)


def _description(schema: Schema) -> str:
    return "" if "$ref" in schema else " ".join(schema.get("description", "").split())


def _curl(path: str, method: str, operation: Schema) -> str:
    """An example request with everything that is required."""
    parameters = operation.get("parameters", [])
    for one in parameters:
        if one["in"] == "path":
            path = path.replace(f"{{{one['name']}}}", _example_value(one))
    query = "&".join(
        f"{one['name']}={_example_value(one)}" for one in parameters if one["in"] == "query" and one["required"]
    )
    words = [
        "curl -s" if method == "GET" else f"curl -s -X {method}",
        shlex.quote(ADDRESS + path + "?" * bool(query) + query),
    ]
    if operation["security"]:
        words.append('-H "Authorization: Bearer $TURNLOG_TOKEN"')
    session = next(
        (one["name"] for one in parameters if one["in"] == "header" and one["name"].endswith("session-id")), None
    )
    if session is not None:
        words.append(f"-H '{session}: s-1'")
    example = operation.get("requestBody", {}).get("content", {}).get(JSON, {}).get("example")
    if example is not None:
        words.append(f"-d {shlex.quote(json.dumps(example, ensure_ascii=False))}")
    return f"{words[0]} {words[1]}" + "".join(f" \\\n     {word}" for word in words[2:])


def _default(schema: Schema, is_needed: bool) -> str:
    if is_needed:
        return "needed"
    default = schema.get("default")
    return "" if default in (None, {}) else f"`{json.dumps(default)}`"


def _codes(reply: Schema) -> list[str]:
    """The error codes of a reply; empty if it is not an error or is the engine's own error."""
    schema = reply.get("content", {}).get(JSON, {}).get("schema", {})
    parts = [
        part for one in (schema, *schema.get("anyOf", ())) for part in one.get("allOf", ()) if "properties" in part
    ]
    found: list[str] = parts[0]["properties"]["error"]["properties"]["code"]["enum"] if parts else []
    return found


def _example_value(parameter: Schema) -> str:
    samples = {"session_id": "s-1", "group_id": "task-17", "name": "adapter-a", "consumer": "trainer-0"}
    name, schema = parameter["name"], parameter["schema"]
    return samples.get(name) or (schema["enum"][0] if "enum" in schema else "1")


def _link(method: str, path: str) -> str:
    """A link to the route's heading, with the anchor that GitHub generates."""
    kept = "".join(letter for letter in f"{method} {path}".lower() if letter.isalnum() or letter in " -_")
    return f"[`{method} {path}`](#{kept.replace(' ', '-')})"


def generate() -> str:
    return Reference(document(create_app(Settings()))).text()


PAGE = GeneratedPage(FILE, generate)

if __name__ == "__main__":
    sys.exit(PAGE.main("ops.wire_reference", __doc__))
