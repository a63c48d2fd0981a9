"""Two answers to one question, row by row and field by field: what is another value, what is new, what is gone.

A row is known by its session, segment and turn rather than by its place. New fields stand behind the old ones. A list
of allowed changes says which differences are meant, and why; one that nothing needs any more is a fault too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from integration.reading import CONTAINERS, DOCUMENTS, read

from compat.answers import Question

MISSING = "(missing)"
"""Stands for a value that one side does not have."""

Path = str
"""Keys and places from the outside in, with slashes; a row's is its session, segment and turn."""


class Difference(NamedTuple):
    question: Question
    path: Path
    before: Any
    after: Any


class Allowed(NamedTuple):
    """Differences that are meant: `question` and `path` are regular expressions that match the whole.

    `fits`: of the values before and after.
    """

    why: str
    question: str
    path: str
    fits: Callable[[Any, Any], bool] = lambda before, after: True


def added(before: Any, after: Any) -> bool:
    return bool(isinstance(before, str) and before == MISSING)


def unexpected(found: Sequence[Difference], allowed: Sequence[Allowed]) -> tuple[list[Difference], list[Allowed]]:
    """Differences that nothing allows, and what allows none of them."""
    used: set[int] = set()
    left: list[Difference] = []
    for one in found:
        fitting = [
            number
            for number, rule in enumerate(allowed)
            if re.fullmatch(rule.question, one.question)
            and re.fullmatch(rule.path, one.path)
            and rule.fits(one.before, one.after)
        ]
        used.update(fitting)
        if not fitting:
            left.append(one)
    return left, [rule for number, rule in enumerate(allowed) if number not in used]


def differences(question: Question, before: bytes, after: bytes) -> list[Difference]:
    """Between two answers: status, a line feed, the body."""
    if before == after:
        return []
    (status, old), (other, new) = (_split(answer) for answer in (before, after))
    if status != other:
        return [Difference(question, "status", status, other)]
    found = [Difference(question, *one) for one in _compare("", _parsed(question, old), _parsed(question, new))]
    # A Parquet file depends on its library's version as well.
    if not found and "format=parquet" not in question:
        found.append(Difference(question, "bytes", old[:200], new[:200]))
    return found


def _split(answer: bytes) -> tuple[int, bytes]:
    status, _, body = answer.partition(b"\n")
    return int(status), body


def _parsed(question: Question, body: bytes) -> Any:
    """Rows by what they are of, or whatever JSON it is, or the bytes."""
    format = re.search(r"[?&]format=(\w+)", question)
    if format is not None and not body.startswith(b'{"error"'):
        assert format[1] in (*CONTAINERS, *DOCUMENTS)
        return _keyed(read(format[1], body))
    if "/samples" in question and not body.startswith(b"{"):
        return {name: _json(value) for name, value in _tensors(body).items()}
    try:
        lines = [json.loads(line) for line in body.splitlines()]
    except ValueError:
        return body
    return _keyed(lines) if question.startswith("GET /export") else lines


def _tensors(body: bytes) -> dict[str, Any]:
    import safetensors.numpy

    found: dict[str, Any] = safetensors.numpy.load(body)
    return found


def _json(value: Any) -> Any:
    """A tensor, or the JSON that one holds."""
    raw = value.tobytes()
    return json.loads(raw) if value.dtype == np.uint8 and raw.startswith(b"{") else value


def _keyed(rows: Sequence[Any]) -> Any:
    """By session, segment and turn, where that is what rows are known by."""
    keys = [_key(row) for row in rows]
    return dict(zip(keys, rows, strict=True)) if len(set(keys)) == len(keys) else list(rows)


def _key(row: Any) -> str:
    if not isinstance(row, dict):
        return ""
    parts = [row.get(name) for name in ("session_id", "group_id", "segment", "turn", "excluded")]
    return ",".join(str(part) for part in parts if isinstance(part, str | int))


def _compare(path: Path, old: Any, new: Any) -> Iterator[tuple[Path, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _compare_objects(path, old, new)
    elif isinstance(old, list) and isinstance(new, list):
        for place in range(max(len(old), len(new))):
            pair = (values[place] if place < len(values) else MISSING for values in (old, new))
            yield from _compare(_below(path, place), *pair)
    elif not _same(old, new):
        yield path, old, new


def _compare_objects(path: Path, old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[Path, Any, Any]]:
    for name in (*old, *(name for name in new if name not in old)):
        yield from _compare(_below(path, name), old.get(name, MISSING), new.get(name, MISSING))
    kept = [name for name in old if name in new]
    if [name for name in new if name in old] != kept or list(new)[: len(kept)] != kept:
        yield _below(path, "(order)"), list(old), list(new)


def _below(path: Path, part: str | int) -> Path:
    return f"{path}/{part}" if path else str(part)


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, np.ndarray) and isinstance(new, np.ndarray):
        return old.dtype == new.dtype and np.array_equal(old, new)
    if isinstance(old, np.ndarray) or isinstance(new, np.ndarray):
        return False
    return type(old) is type(new) and bool(old == new)
