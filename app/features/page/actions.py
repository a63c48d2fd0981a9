"""What an agent did, in a line: its calls as `bash: pytest -q`, or how its text begins; and how a result begins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

LINE = 200
"""Characters of a line."""

SHORT = 40
"""A longer argument is left out beside the one that says what the call does."""

SAYS = (
    *("command", "cmd", "commands", "code", "script", "sql", "query", "pattern", "q", "keywords", "url", "uri"),
    *("file_path", "path", "filename", "file", "name", "expression", "question", "prompt", "input", "answer", "text"),
)
"""Arguments that say what a call does, the most telling first."""

SHELLS = frozenset({"bash", "sh", "zsh", "/bin/bash", "/bin/sh"})

_THOUGHT = re.compile(r"\s*<think>.*?(</think>|\Z)", re.DOTALL)
_TAG = re.compile(r"</?[\w-]+>")
_RULED = re.compile(r"={3,}|-{3,}")
_FAILED = re.compile(
    r"Traceback \(most recent call last\)|^(\w*Error|error|ERROR|fatal|FATAL|panic)\b"
    r"|: (command not found|No such file)|\b[Ee]xit(ed with)? (code|status):? (?!0\b)\d|<returncode>(?!0<)",
    re.MULTILINE,
)


class Action(msgspec.Struct, frozen=True):
    """A call of `tool`, and what it was asked to do; without a tool, the first line of what was said.

    `text` has one line of at most LINE characters; it ends with `…` where more was there.
    """

    tool: str | None
    text: str


def actions_of(messages: Sequence[object]) -> list[Action]:
    """The actions of the assistants' messages among these, in their order; the others have none.

    A message is an object as in a chat; what is none, or has odd fields, gives what can be read of it.
    """
    return [action for message in messages for action in _actions(message)]


def result_line(message: object) -> str:
    """The first line of a result, or of any message, at most LINE characters; empty if it has no text."""
    text = _text(_field(message, "content"))
    parsed = _parsed(text)
    if isinstance(parsed, Mapping):
        said = next((parsed[name] for name in ("error", "output", "result", "content") if parsed.get(name)), None)
        text = said if isinstance(said, str) else _values(parsed)
    line = _line(text)
    if _RULED.match(line):
        # pytest and its like begin with a ruled heading and end with a ruled sum of what happened.
        line = text.rstrip().rpartition("\n")[2].strip("=- ")[:LINE] or line
    return line


def has_failed(message: object) -> bool:
    """Does a tool's result say, or look as if, the call failed? For people's eyes only: it goes by the text."""
    if _field(message, "role") not in ("tool", "function", "user"):
        return False
    if _field(message, "is_error") is True:
        return True
    if _field(message, "role") == "user":
        return False
    text = _text(_field(message, "content"))
    parsed = _parsed(text)
    if isinstance(parsed, Mapping):
        codes = (parsed.get("exit_code"), _field(parsed.get("metadata"), "exit_code"))
        return bool(parsed.get("error")) or any(isinstance(code, int) and code != 0 for code in codes)
    return _FAILED.search(text, 0, 20_000) is not None


def _actions(message: object) -> list[Action]:
    if _field(message, "role") != "assistant":
        return []
    listed = _field(message, "tool_calls")
    calls = [_field(call, "function") or call for call in listed] if isinstance(listed, list) else []
    if _field(message, "function_call"):
        calls.append(_field(message, "function_call"))
    if calls:
        return [Action(_line(str(_field(call, "name") or "?")), _asked(_field(call, "arguments"))) for call in calls]
    said = _text(_field(message, "content")) or _text(_field(message, "refusal"))
    thought = _text(_field(message, "reasoning_content")) or _text(_field(message, "reasoning"))
    line = _line(_THOUGHT.sub("", said, count=1)) or _line(said) or _line(thought)
    return [Action(None, line.lstrip("# ") or line)]


def _asked(arguments: object) -> str:
    """What a call's arguments ask for."""
    given = _parsed(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(given, Mapping):
        return _line(arguments if isinstance(arguments, str) else _text(arguments))
    names = [name for name in SAYS if given.get(name)] or [name for name, value in given.items() if value][:1]
    if not names:
        return ""
    first = names[0]
    if len(given) > 1 and first not in SAYS:
        return _line(_values(given))
    others = {name: value for name, value in given.items() if name != first and len(_scalar(value)) <= SHORT}
    return _line(", ".join(filter(None, (_command(given[first]), _values(others)))))


def _command(value: object) -> str:
    """The first line of an argument; a command in a list of words as one would type it."""
    if isinstance(value, list) and all(isinstance(word, str) for word in value):
        words = value[2:] if value[:1] and value[0] in SHELLS and value[1:2] in (["-c"], ["-lc"]) else value
        value = " ".join(words)
    return _line(_text(value))


def _values(fields: Mapping[str, object]) -> str:
    """`days 2, city Bonn`; lists, objects and nulls are left out."""
    return ", ".join(f"{name} {_scalar(value)}" for name, value in fields.items() if _scalar(value))


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int | float) else ""


def _text(value: object) -> str:
    """The text of a message's content, whatever it is made of."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, (_part(part) for part in value)))
    return "" if value is None else msgspec.json.encode(value).decode()


def _part(part: object) -> str:
    text = _field(part, "text")
    if isinstance(text, str):
        return text
    kind = _field(part, "type")
    return f"[{kind}]" if isinstance(kind, str) else _text(part) if isinstance(part, str) else ""


def _field(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else None


def _parsed(text: str) -> object:
    """The value of a JSON object or list; None if it is none, or too deep."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None


def _line(text: str) -> str:
    """The first line that says something, without blanks around it."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        line = text[start : len(text) if end < 0 else end].strip()
        start = len(text) if end < 0 else end + 1
        if line and not _TAG.fullmatch(line):
            more = len(line) > LINE or bool(text[start : start + LINE].strip())
            return line[: LINE - 2] + " …" if len(line) > LINE else line + (" …" if more else "")
    return ""
