"""Makes faults in a file: each is one statement that is replaced, or two that change places."""

from __future__ import annotations

import ast
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from tests.tools.mutants import patterns


class Mutant(NamedTuple):
    """Lines `first` to `last` of a file are `text` instead. `before` and `after` are what differs, in one line, however
    the code is laid out; `ordinal` counts the faults of a pattern in a function."""

    path: str
    function: str
    pattern: str
    ordinal: int
    before: str
    after: str
    first: int
    last: int
    text: str

    @property
    def id(self) -> str:
        return f"{self.path}:{self.function}:{self.pattern}:{self.ordinal}"

    def applied(self, source: str) -> str:
        """The file's text with the fault."""
        lines = source.splitlines(keepends=True)
        return "".join((*lines[: self.first - 1], self.text, *lines[self.last :]))


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """The faults that all patterns make in a file, in the order of its lines."""
    counts = Counter[tuple[str, str]]()
    lines = source.splitlines()
    for found in _of_body(ast.parse(source).body, ()):
        function = ".".join(found.names) or "module"
        counts[function, found.pattern] += 1
        indent = lines[found.first - 1][: -len(lines[found.first - 1].lstrip())]
        try:
            ast.parse(found.text)
        except SyntaxError:
            continue
        text = textwrap.indent(found.text, indent) + "\n"
        before, after = (" ".join(part.split()) for part in (found.before, found.after))
        ordinal = counts[function, found.pattern]
        yield Mutant(path, function, found.pattern, ordinal, before, after, found.first, found.last, text)


class _Found(NamedTuple):
    names: tuple[str, ...]
    pattern: str
    before: str
    after: str
    first: int
    last: int
    text: str


def _of_body(body: Sequence[ast.stmt], names: tuple[str, ...], *, runs: bool = False) -> Iterator[_Found]:
    """`runs`: the statements are a function's."""
    for statement in body:
        if patterns.is_left_out(statement):
            continue
        own = (*names, *_named(statement)) if not runs or isinstance(statement, _NAMED) else names
        for pattern, before, after, new in patterns.of_statement(statement, runs=runs):
            if pattern == "state" and own[-1] == "__init__":
                continue  # Nothing works without an attribute.
            yield _Found(own, pattern, before, after, statement.lineno, _end(statement), ast.unparse(new))
        yield from _of_expressions(statement, own)
        is_function = isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
        for inner in _bodies(statement):
            yield from _of_body(inner, own, runs=runs or is_function)
    if runs:
        for one, other in pairwise(body):
            if patterns.change_places(one, other):
                before, after = f"{ast.unparse(one)}; {ast.unparse(other)}", "the other way round"
                yield _Found(
                    names, "swap", before, after, one.lineno, _end(other), f"{ast.unparse(other)}\n{ast.unparse(one)}"
                )


_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _named(statement: ast.stmt) -> tuple[str, ...]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return (name,)
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return (name,)
    return ()


def _begin(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _end(statement: ast.stmt) -> int:
    assert statement.end_lineno is not None
    return statement.end_lineno


def _bodies(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    """The lists of statements right below one."""
    parts = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    for part in parts:
        for name in ("body", "orelse", "finalbody"):
            if isinstance(inner := getattr(part, name, None), list):
                yield inner


def _of_expressions(statement: ast.stmt, names: tuple[str, ...]) -> Iterator[_Found]:
    """What patterns make of the expressions of a statement, those of statements in it left out."""
    if isinstance(statement, ast.ClassDef | ast.Raise):
        return
    for parent, field, index in list(_places(statement)):
        value = getattr(parent, field)
        node = value if index is None else value[index]
        for pattern, make in patterns.PATTERNS.items():
            for new, before, after in make(node):
                changed = new if index is None else [*value[:index], new, *value[index + 1 :]]
                setattr(parent, field, changed)
                text = ast.unparse(statement)
                setattr(parent, field, value)
                yield _Found(names, pattern, before, after, _begin(statement), _end(statement), text)


def _places(node: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where expressions stand in a statement: parent, field and the place in it if it is a list."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.stmt) or patterns.is_plain(child):
                continue
            yield node, field, index
            yield from _places(child)
