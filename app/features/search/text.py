"""The text of a message for a search: what was said, called and returned, without the JSON around it; what a client
searches for: words, phrases, alternatives and exclusions; and where they are in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from app.errors import InvalidRequest

MAX_TEXT = 32_768
"""Characters of one message that are searched."""

MAX_NAME, MAX_TOOLS = 256, 256
"""Characters of a role's or tool's name, and names of tools of one message, that are searched: PostgreSQL's index takes
1 MiB of a message."""

MAX_DEPTH = 8
"""How deep objects in content are looked into."""

_SAID = ("reasoning_content", "reasoning", "thinking", "content", "refusal", "text", "output", "arguments", "input")
"""Fields with text, in the order in which they are read."""

_WORD_BREAKS = re.compile(r"[\W_]+")


class MessageText(msgspec.Struct, frozen=True):
    """A message: `tools` are the names of the tools that it calls, or whose result it is."""

    role: str
    tools: tuple[str, ...]
    text: str


def read_message(raw: bytes, called: Mapping[str, str]) -> tuple[MessageText, dict[str, str]]:
    """A message and the calls that it makes, names by ids. `called` are those of the message before, by which a result
    is known. A message that is no JSON object is its text."""
    try:
        message = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = raw.decode("utf-8", "replace")
    if not isinstance(message, dict):
        return MessageText("user", (), bounded(str(message))), {}
    calls = dict(_calls(message))
    names = dict.fromkeys(map(name_of, (*calls.values(), *_results(message, called))))
    role = message.get("role")
    text = bounded(*calls.values(), *_texts(message))
    return MessageText(name_of(role) if isinstance(role, str) else "", tuple(names)[:MAX_TOOLS], text), calls


def name_of(text: str) -> str:
    """A name as the index has it: short, and without NUL, which PostgreSQL's text cannot hold, or line feeds, which
    stand between the names."""
    return text[:MAX_NAME].replace("\0", " ").replace("\n", " ").encode("utf-8", "replace").decode()


def words_of(text: str) -> str:
    """The text as words with one space between them, lower case: what a database's parser cannot read otherwise."""
    return _WORD_BREAKS.sub(" ", text).strip().lower()


def bounded(*parts: str) -> str:
    """The parts as one text, as the index has it."""
    text = "\n".join(part for part in parts if part)[:MAX_TEXT]
    return text.replace("\0", " ").encode("utf-8", "replace").decode()


def _calls(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for call in _objects(message.get("tool_calls")):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else call.get("name")
        if isinstance(name, str):
            yield str(call.get("id")), name
    for part in _objects(message.get("content")):
        if part.get("type") == "tool_use" and isinstance(part.get("name"), str):
            yield str(part.get("id")), part["name"]
    old = message.get("function_call")
    if isinstance(old, dict) and isinstance(old.get("name"), str):
        yield "", old["name"]


def _results(message: Mapping[str, Any], called: Mapping[str, str]) -> Iterator[str]:
    if message.get("role") in ("tool", "function"):
        name = message.get("name") or called.get(str(message.get("tool_call_id")))
        if isinstance(name, str):
            yield name
    for part in _objects(message.get("content")):
        if part.get("type") == "tool_result" and (name := called.get(str(part.get("tool_use_id")))):
            yield name


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    yield from (one for one in value if isinstance(one, dict)) if isinstance(value, list) else ()


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    for name in _SAID:
        yield from _strings(message.get(name), MAX_DEPTH)
    for call in _objects(message.get("tool_calls")):
        function = call.get("function")
        yield from _strings(function.get("arguments") if isinstance(function, dict) else call, MAX_DEPTH)
    old = message.get("function_call")
    if isinstance(old, dict):
        yield from _strings(old.get("arguments"), MAX_DEPTH)


def _strings(value: Any, depth: int) -> Iterator[str]:
    """All texts in a value; of a part of a list of contents only those of its known fields, so no image is read."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list) and depth:
        for one in value:
            if isinstance(one, dict) and "type" in one:
                for name in _SAID:
                    yield from _strings(one.get(name), depth - 1)
            else:
                yield from _strings(one, depth - 1)
    elif isinstance(value, dict) and depth:
        for key, one in value.items():
            yield str(key)
            yield from _strings(one, depth - 1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)


MAX_TERMS = 32

_TERM = re.compile(r'(-?)"([^"]*)"?|(\S+)')

SNIPPET = 160
"""Characters of a snippet, about; a third of them stand before the first match."""

MAX_MARKS = 20


class Query(msgspec.Struct, frozen=True):
    """Every one of `needed` must match, each a list of alternatives; none of `excluded` may. A term is one or several
    words, one behind the other, with a space between them."""

    needed: tuple[tuple[str, ...], ...]
    excluded: tuple[str, ...] = ()


def parse(text: str) -> Query:
    """Raises InvalidRequest: no word, only exclusions, or too many terms."""
    needed: list[tuple[str, ...]] = []
    excluded: list[str] = []
    alternative = False
    for match in _TERM.finditer(text):
        minus, phrase, plain = match[1], match[2], match[3]
        if plain == "OR":
            alternative = bool(needed)
            continue
        if plain is not None and plain.startswith("-") and len(plain) > 1:
            minus, plain = "-", plain[1:]
        term = words_of(phrase if plain is None else plain)
        if not term:
            continue
        if minus:
            excluded.append(term)
        elif alternative:
            needed[-1] = (*needed[-1], term)
        else:
            needed.append((term,))
        alternative = False
    if not needed:
        raise InvalidRequest("q needs a word to search for: letters or digits, not only excluded ones")
    if sum(map(len, needed)) + len(excluded) > MAX_TERMS:
        raise InvalidRequest(f"q has more than {MAX_TERMS} words and phrases")
    return Query(tuple(needed), tuple(excluded))


class Snippet(msgspec.Struct, frozen=True):
    """A part of a text. `marks` are [start, end) of what matches in it, in characters."""

    text: str
    marks: Sequence[tuple[int, int]]


def snippet(text: str, query: Query | None) -> Snippet:
    """The surroundings of the first match; without a query the beginning."""
    ranges: list[tuple[int, int]] = []
    if query is not None:
        terms = [term for alternatives in query.needed for term in alternatives]
        words = (r"[\W_]+".join(map(re.escape, term.split())) for term in sorted(terms, key=len, reverse=True))
        pattern = rf"(?<![^\W_])(?:{'|'.join(words)})(?![^\W_])"
        ranges = [match.span() for match in re.finditer(pattern, text, re.IGNORECASE)]
    start = max(0, ranges[0][0] - SNIPPET // 3) if ranges else 0
    end = min(len(text), start + SNIPPET)
    before, behind = "… " if start else "", " …" if end < len(text) else ""
    shift = len(before) - start
    marks = [(a + shift, min(b, end) + shift) for a, b in ranges if start <= a < end][:MAX_MARKS]
    return Snippet(before + text[start:end] + behind, marks)
