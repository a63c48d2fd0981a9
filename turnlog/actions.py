"""What an agent was asked and did, in a line: its calls as `bash: pytest -q`, how its task, text or a result begins.

Messages are objects as in a chat; of what is none, or has odd fields, it gives what can be read. For people's eyes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple

LINE = 200
"""Characters of a line."""

TASK = 600
"""Characters of a task."""

HEAD = 24
"""A shorter beginning that tasks share is left in its place."""

SHORT = 40
"""A longer argument is left out beside the one that says what the call does."""

PARSED = 1 << 20
"""A longer text is not read as JSON: one parse would hold up a server's other requests."""

SAYS = (
    *("command", "cmd", "commands", "code", "script", "sql", "query", "pattern", "q", "keywords", "url", "uri"),
    *("file_path", "path", "filename", "file", "name", "expression", "question", "prompt", "input", "answer", "text"),
)
"""Arguments that say what a call does, the most telling first."""

SHELLS = frozenset({"bash", "sh", "zsh", "/bin/bash", "/bin/sh"})

_THOUGHT = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_TAG = re.compile(r"</?[\w-]+>")
_RULED = re.compile(r"={3,}|-{3,}")
END = 1_000
"""Characters at the end of a result in which a summary or an exception is looked for."""

BEHIND = 6
"""Lines behind the exception of a traceback that ends a result: the rest of its message, a prompt."""

_CODES = ("exit_code", "exitCode", "returncode", "return_code", "exit_status")
_CODE = (
    r"(?:(?:[\w ]{1,24} with )?(?:exit|return) ?(?:code|status)|(?:command|process) exited with code):? "
    r"(-?\d+)[.\])>]*(?= \(|\s*(?:\n|\Z))"
)
_ABOVE = r"(?:(?:chunk id|wall time|command|directory|cwd)\b[^\n]*\n){0,6}"
_BELOW = r"(?:\n+(?:\[|</|signal:|background pids:|process group|duration)[^\n]*)*\s*\Z"
_BEGINS_WITH_CODE = re.compile(rf"\s*{_ABOVE}(?:<returncode>(-?\d+)<|(?:error: )?{_CODE})", re.IGNORECASE)
_ENDS_WITH_CODE = re.compile(rf"^[\[(<]?{_CODE}{_BELOW}", re.IGNORECASE | re.MULTILINE)

_OBSERVED = re.compile(r"\s*(?:<returncode>|EXECUTION RESULT of \[|exitcode: |OBSERVATION:|New Terminal Output:)")
"""How a user's message begins that an agent without tool calls makes of a result."""

_TRACEBACK = re.compile(r"^(?:\w+ +)?Traceback \(most recent call last\)", re.MULTILINE)
_RAISED = re.compile(r"(?:(?:[a-z_]\w*\.)+\w+|\w+(?:Error|Exception|Interrupt|Exit|Warning|Group))(?::|\Z)")
_LOGGED = re.compile(r"\W*(?:\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|(?:DEBUG|INFO|WARN|WARNING|ERROR)\b)")

_SUMMARIES = tuple(
    (mark, re.compile(pattern, re.MULTILINE))
    for mark, pattern in (
        (" failed", r"^(?:=+ )?(?:\d+ \w+, )*[1-9]\d* failed(?:, \d+ \w+)* in [\d.]+ ?s"),  # pytest
        (" error in ", r"^(?:=+ )?(?:\d+ \w+, )*1 error in [\d.]+ ?s"),
        (" errors in ", r"^(?:=+ )?(?:\d+ \w+, )*[1-9]\d* errors in [\d.]+ ?s"),
        ("FAILED (", r"^FAILED \((?:\w+=\d+, )*(?:failures|errors)=[1-9]"),  # unittest
        (" failed", r"^ *Test(?:s| Suites| Files):? +(?:\d+ \w+, )*[1-9]\d* failed\b"),  # jest, vitest
        ("test result: FAILED", r"^test result: FAILED\."),  # cargo
        ("error[E", r"^error\[E\d{4}\]: .+\n *--> "),
        ("could not compile", r"^error: could not compile `"),
        ("--- FAIL", r"^ *--- FAIL: \S+ \([\d.]+s\)"),  # go
        ("FAIL\t", r"^FAIL\t\S+(?:\t[\d.]+s| \[)"),
        ("BUILD FAIL", r"^(?:\[(?:INFO|ERROR)\] )?BUILD FAIL(?:URE|ED)\b"),  # mvn, gradle, ant
        ("Failed to execute goal", r"^\[ERROR\] Failed to execute goal "),
        ("Tests run:", r"^(?:\[\w+\] )?Tests run: \d+, (?:Failures: [1-9]|Failures: 0, Errors: [1-9])"),
        (" not found", r"^(?:\S*/)?(?:ba|z|da)?sh: (?:\S+ ?\d*: )*(?:command )?not found\s*\Z"),
    )
)
"""Lines that sum up failing tests, a failing build or command, each with a text that is in it."""

_SIGNS = ("ailed", "FAIL", "error", "Tests run:", " not found")
"""One of these is in each of those lines."""


@dataclass(frozen=True, slots=True)
class Action:
    """A call of `tool`, and what it was asked to do; without a tool, the first line of what was said.

    `text` has one line of at most LINE characters; it ends with `…` where more was there.
    """

    tool: str | None
    text: str

    @property
    def line(self) -> str:
        """`bash: pytest -q`."""
        return ": ".join(filter(None, (self.tool, self.text)))


class Call(NamedTuple):
    """A tool call; `arguments` as they were given, usually JSON text."""

    name: str
    arguments: object

    @property
    def line(self) -> str:
        """What the call asks for."""
        return _asked(self)

    @property
    def given(self) -> object:
        """The arguments, as a value if they are JSON; None: a text that is none."""
        return json_of(self.arguments) if isinstance(self.arguments, str) else self.arguments

    def hands_on(self, task: str) -> bool:
        """Is the text in one of its arguments, as where the call starts an agent?"""
        return bool(task) and json.dumps(task)[1:-1] in json.dumps(self.given)


def actions_of(messages: Sequence[object]) -> list[Action]:
    """The actions of the assistants' messages among these, in their order; the others have none."""
    return [action for message in messages for action in _actions(message)]


def task_of(messages: Sequence[object]) -> str:
    """The first line of the first user's message with text, else of another one's; empty if there is no text.

    What begins with a tag, as a harness's own remarks do, is taken where there is nothing else. A message that is a
    text is a completion's prompt.
    """
    return _line(asked_first(messages))


def task_text(messages: Sequence[object]) -> str:
    """The text whose first line is the task: its beginning, at most TASK characters, with blanks for line breaks."""
    words = " ".join(asked_first(messages)[: 2 * TASK].split())
    return (words if len(words) <= TASK else words[: TASK - 2] + " …").encode(errors="replace").decode()


def common_heads(tasks: Iterable[str]) -> list[str]:
    """The beginnings of whole words that a third of the different tasks share, the longest first, none below HEAD."""
    ordered = sorted(set(filter(None, tasks)))
    many = max(2, math.ceil(len(ordered) / 3))
    heads = {_shared(first, last) for first, last in zip(ordered, ordered[many - 1 :], strict=False)}
    return sorted((head for head in heads if len(head) >= HEAD), key=len, reverse=True)


def without_head(task: str, heads: Sequence[str]) -> str:
    """The task from where it differs from the others on."""
    head = next((one for one in heads if task.startswith(one)), "")
    return f"… {task[len(head) :]}" if head else task


def _shared(first: str, last: str) -> str:
    pairs = zip(first.split(" "), last.split(" "), strict=False)
    return "".join(f"{word} " for word, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def asked_first(messages: Sequence[object]) -> str:
    """The text that is the task, whole."""
    texts: list[tuple[str, str]] = []
    for message in messages:
        said = {"role": "user", "content": message} if isinstance(message, str) else message
        content = field(said, "content")
        parts = content if isinstance(content, list) else [content]
        words = (part if isinstance(part, str) else text_of(field(part, "text")) for part in parts)
        texts += [(str(field(said, "role")), stripped) for word in words if (stripped := word.strip())]
    return min(texts, key=_rank)[1] if texts else ""


def _rank(said: tuple[str, str]) -> tuple[bool, bool, bool]:
    role, text = said
    return role != "user", role in ("system", "developer"), text.startswith("<")


def result_line(message: object) -> str:
    """The first line of a result, or of any message, at most LINE characters; empty if it has no text."""
    text = text_of(field(message, "content"))
    parsed = json_of(text)
    if isinstance(parsed, Mapping):
        said = next((parsed[name] for name in ("error", "output", "result", "content") if parsed.get(name)), None)
        text = said if isinstance(said, str) else _values(parsed)
    line = _line(text)
    if _RULED.match(line):
        # pytest and its like begin with a ruled heading and end with a ruled sum of what happened.
        line = _line(text.rstrip().rpartition("\n")[2].strip("=- ")) or line
    return line


def has_failed(message: object) -> bool:
    """Does a tool's result say that the call failed?

    By its protocol's flag, by an exit code, or because it ends with a traceback or the summary of failing tests or of a
    failing build. A file, a search's hits or a log that speak of errors do not, nor does a traceback where the exit
    code is 0.
    """
    role = field(message, "role")
    if role not in ("tool", "function", "user"):
        return False
    if field(message, "is_error") is True:
        return True
    text = text_of(field(message, "content"))
    if role == "user" and not _OBSERVED.match(text):
        return False
    code = None
    parsed = json_of(text)
    if isinstance(parsed, Mapping):
        if any(parsed.get(name) is True for name in ("isError", "is_error")) or parsed.get("success") is False:
            return True
        if isinstance(parsed.get("error"), str | Mapping | list | bool) and parsed["error"]:
            return True
        code = _code_in(parsed)
        text = "\n".join(said for name in ("output", "stdout", "stderr") if isinstance(said := parsed.get(name), str))
    if code is None:
        code = _code_of(text)
    return bool(code) or (code is None and _ends_with_traceback(text)) or _sums_up_failures(text)


def _code_in(result: Mapping[str, object]) -> int | None:
    """The exit code in a result that is an object, or in its `metadata` or `data`."""
    within = (result, result.get("metadata"), result.get("data"))
    codes = (field(one, name) for one in within for name in _CODES)
    return next((code for code in codes if isinstance(code, int) and not isinstance(code, bool)), None)


def _code_of(text: str) -> int | None:
    """The exit code with which a text begins or ends."""
    found = _BEGINS_WITH_CODE.match(text)
    if found is None and ("exit" in (end := text[-400:].lower()) or "return code" in end):
        found = _ENDS_WITH_CODE.search(text, max(len(text) - 400, 0))
    return None if found is None else int(found[found.lastindex or 0])


def _ends_with_traceback(text: str) -> bool:
    at = text.rfind("Traceback (most")
    if at < 0 or not _TRACEBACK.match(text, text.rfind("\n", 0, at) + 1):
        return False  # within a line: a hit of a search, a numbered line of a file
    lines = [line for line in text[max(at, len(text) - 4 * END) :].splitlines() if line.strip()]
    raised = max((place for place, line in enumerate(lines) if _RAISED.match(line)), default=None)
    if raised is None:
        return False
    behind = lines[raised + 1 :]
    return len(behind) <= BEHIND and not any(map(_LOGGED.match, behind))


def _sums_up_failures(text: str) -> bool:
    end = text[-END:]
    return any(sign in end for sign in _SIGNS) and any(
        mark in end and pattern.search(end) for mark, pattern in _SUMMARIES
    )


def calls_of(message: object) -> list[Call]:
    listed = field(message, "tool_calls")
    calls = [field(call, "function") or call for call in listed] if isinstance(listed, list) else []
    if field(message, "function_call"):
        calls.append(field(message, "function_call"))
    return [Call(str(field(call, "name") or "?"), field(call, "arguments")) for call in calls]


def said_by(message: object) -> tuple[str, str]:
    """An assistant's reasoning, also if it stands before the text, and its text or its refusal."""
    thought = text_of(field(message, "reasoning_content")) or text_of(field(message, "reasoning"))
    text = text_of(field(message, "content"))
    if before := _THOUGHT.match(text):
        thought, text = thought or before[1], text[before.end() :]
    return thought.strip(), text.strip() or text_of(field(message, "refusal"))


def _actions(message: object) -> list[Action]:
    if field(message, "role") != "assistant":
        return []
    if calls := calls_of(message):
        return [Action(_line(call.name), call.line) for call in calls]
    thought, said = said_by(message)
    line = _line(said) or _line(thought)
    return [Action(None, line.lstrip("# ") or line)]


def _asked(call: Call) -> str:
    """What a call's arguments ask for."""
    given = call.given
    if not isinstance(given, Mapping):
        return _line(text_of(call.arguments))
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
    return _line(text_of(value))


def _values(fields: Mapping[str, object]) -> str:
    """`days 2, city Bonn`; lists, objects and nulls are left out."""
    return ", ".join(f"{name} {_scalar(value)}" for name, value in fields.items() if _scalar(value))


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return " ".join(str(value).split()) if isinstance(value, str | int | float) else ""


def text_of(content: object) -> str:
    """The text of a message's content, whatever it is made of; `[image_url]` and so on stand for other parts."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(filter(None, map(_part, content)))
    try:
        return "" if content is None else json.dumps(content, ensure_ascii=False)
    except RecursionError:
        return ""


def _part(part: object) -> str:
    text = field(part, "text")
    if isinstance(text, str):
        return text
    kind = field(part, "type")
    return f"[{kind}]" if isinstance(kind, str) else part if isinstance(part, str) else ""


def field(value: object, name: str) -> Any:
    """None where the value is no object, or lacks it."""
    return value.get(name) if isinstance(value, Mapping) else None


def json_of(text: str) -> object:
    """The value of a JSON object or list; None if it is none, or too long or deep."""
    if len(text) > PARSED or text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _line(text: str) -> str:
    """The first line that says something, without blanks around it; half of a surrogate pair becomes `?`."""
    start = 0
    while start < len(text):
        end = text.find("\n", start)
        line = text[start : len(text) if end < 0 else end].strip()
        start = len(text) if end < 0 else end + 1
        if line and not _TAG.fullmatch(line):
            more = len(line) > LINE or bool(text[start : start + LINE].strip())
            short = line[: LINE - 2] + " …" if len(line) > LINE else line + (" …" if more else "")
            return short.encode(errors="replace").decode()
    return ""
