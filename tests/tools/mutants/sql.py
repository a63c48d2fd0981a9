"""Faults in SQL that is text: conditions, columns that are set, comparisons, orders and locks."""

from __future__ import annotations

import re
from collections.abc import Iterator

Change = tuple[str, str, str]
"""The new text, and what of it differs: before and after."""

_IS_SQL = re.compile(r"\b(INSERT INTO|DELETE FROM|UPDATE \w+ (\w+ )?SET|SELECT)\b")
_COMMENT = re.compile(r"--[^\n]*")
_BEGINS = re.compile(r"\b(WHERE|ON|AND)\b")
_ENDS = re.compile(r"\b(AND|WHERE|FOR|RETURNING|ORDER|GROUP|LIMIT|JOIN|LEFT|FROM|USING|SET|ON|THEN|ELSE|END|DO)\b|,|;")
_PARAMETER = re.compile(r"\?\d*|(?<!:):[a-z]\w*")

_WORDS = (
    (re.compile(r" SKIP LOCKED\b"), ""),
    (re.compile(r"\s+FOR UPDATE\b( OF \w+)?( SKIP LOCKED)?"), ""),
    (re.compile(r"\s+ORDER BY [\w., ]+"), ""),
    (re.compile(r"\bDESC\b"), "ASC"),
    (re.compile(r"\bGREATEST\b"), "LEAST"),
    (re.compile(r"(?<=\S) < (?=\S)"), " <= "),
    (re.compile(r"(?<=\S) <= (?=\S)"), " < "),
    (re.compile(r"(?<=\S) > (?=\S)"), " >= "),
    (re.compile(r"(?<=\S) >= (?=\S)"), " > "),
    (re.compile(r" [+-] 1\b"), ""),
    (re.compile(r"\bNOT EXISTS\b"), "EXISTS"),
    (re.compile(r"\bpg_advisory_xact_lock(_shared)?\(\d+\)"), "1"),
)


def is_sql(text: str) -> bool:
    """Is a text a statement of SQL, or a lock?"""
    return _IS_SQL.search(text) is not None or "pg_advisory" in text


def changes(text: str) -> Iterator[Change]:
    """The faults in one statement."""
    bare = _COMMENT.sub(lambda found: " " * len(found.group()), text)
    yield from _conditions(bare)
    yield from _columns(bare)
    for word, other in _WORDS:
        for found in word.finditer(bare):
            line = _line(bare, found.start(), found.end())
            new = bare[: found.start()] + other + bare[found.end() :]
            yield new, line, f"{found.group().strip()} → {other.strip() or 'nothing'}"


def _line(text: str, begin: int, end: int) -> str:
    """What stands around a place."""
    return text[text.rfind("\n", 0, begin + 1) + 1 : (text + "\n").find("\n", end)].strip()


def _end(text: str, begin: int, word: re.Pattern[str]) -> int:
    """Where the part that begins there ends: before such a word, or the bracket around it."""
    depth = 0
    for found in re.finditer(rf"[()]|{word.pattern}", text[begin:]):
        depth += {"(": 1, ")": -1}.get(found.group(), 0)
        if depth < 0 or (depth == 0 and found.group() not in "()"):
            return begin + found.start()
    return len(text)


def _conditions(text: str) -> Iterator[Change]:
    for found in _BEGINS.finditer(text):
        end = _end(text, found.end(), _ENDS)
        condition = text[found.end() : end].strip()
        if not condition or " BETWEEN " in text[max(0, found.start() - 60) : found.start()]:
            continue
        # A parameter that nothing names would be one too many.
        always = " AND ".join(f"({one} IS NULL OR TRUE)" for one in _PARAMETER.findall(condition)) or "TRUE"
        yield f"{text[: found.end()]} {always} {text[end:]}", f"{found.group()} {condition}", "nothing"


def _columns(text: str) -> Iterator[Change]:
    for found in re.finditer(r"\bSET\b", text):
        end = _end(text, found.end(), re.compile(r"\b(WHERE|FROM|RETURNING)\b"))
        columns = _split(text[found.end() : end])
        if len(columns) > 1:
            for index, column in enumerate(columns):
                name, value = (part.strip() for part in column.split("=", 1))
                # A parameter that nothing names would be one too many.
                kept = (
                    [f"{name} = CASE WHEN {value} IS NULL THEN {name} ELSE {name} END"]
                    if _has_parameter(column)
                    else []
                )
                left = [*columns[:index], *columns[index + 1 :], *kept]
                yield f"{text[: found.end()]} {', '.join(left)} {text[end:]}", f"SET {column}", "nothing"


def _has_parameter(text: str) -> bool:
    return _PARAMETER.search(text) is not None


def _split(text: str) -> list[str]:
    """Parts between commas that stand in no bracket."""
    parts, depth, begin = [], 0, 0
    for place, sign in enumerate(text):
        depth += {"(": 1, ")": -1}.get(sign, 0)
        if sign == "," and depth == 0:
            parts.append(text[begin:place].strip())
            begin = place + 1
    return [*parts, text[begin:].strip()]
