"""Formats log lines, uvicorn's too: JSON, or colours on a terminal. A line names its request and session.

Modules log with the standard library. Lines hold ids, lengths, limits and times, never the text of an agent or engine,
a token or a secret. A library's exception may quote such a value, so it is shown by its type and traceback, without its
message.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

Format = Literal["auto", "json", "console"]
Level = Literal["debug", "info", "warning", "error"]

FIELDS = ("request_id", "session_id", "code", "status", "stage", "duration_ms", "turn", "stages_ms", "peer", "route")
"""Fields of `extra` that a line shows; others are left out."""

FRAMES = 40
"""Innermost frames of a traceback that are shown."""

OWN_MODULES = ("app.", "workers.")
CODE_ERRORS = (TypeError, AttributeError, NameError, ImportError, OSError)
"""Exceptions whose messages are shown: those of our modules, and those about code and files instead of values."""


MAX_SESSION_ID = 128
"""Characters of a session's id that are shown; one in a path may be longer, and is then no session's."""


class LogContext:
    """Request and session of the log lines, looked up when a line is written. Tasks that outlive the request inherit
    it; `has_ended` turns it off."""

    __slots__ = ("has_ended", "request_id", "session_id")

    def __init__(self, request_id: str, session_id: str | None) -> None:
        self.request_id = request_id
        self.session_id = session_id
        self.has_ended = False


CURRENT: ContextVar[LogContext | None] = ContextVar("turnlog_request", default=None)


def request_id() -> str | None:
    """The current request's id."""
    about = CURRENT.get()
    return None if about is None else about.request_id


def configure(form: Format, level: Level) -> None:
    """Send lines to standard error: those of Turnlog and uvicorn from `level` on, warnings of other libraries.

    A root logger that has handlers already (uvicorn's --log-config, pytest) is left as it is. uvicorn's line for each
    request is always turned off: it costs more than the routing.
    """
    access = logging.getLogger("uvicorn.access")
    access.handlers.clear()
    access.propagate = False
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.getLogger("turnlog").setLevel(number)
    root = logging.getLogger()
    if any(not isinstance(handler, _Handler) for handler in root.handlers):
        return
    handler = _Handler(sys.stderr)
    handler.setFormatter(formatter(form, sys.stderr))
    root.handlers = [handler]
    for name in ("uvicorn", "uvicorn.error"):
        uvicorn_logger = logging.getLogger(name)
        uvicorn_logger.handlers.clear()
        uvicorn_logger.propagate = True
        uvicorn_logger.setLevel(max(number, logging.INFO))


class _Handler(logging.StreamHandler[TextIO]):
    """Its own type, so that `configure` recognises it."""


def formatter(form: Format, stream: TextIO) -> logging.Formatter:
    """The formatter of a form; `auto` is `console` if `stream` is a terminal, else `json`."""
    is_terminal = stream.isatty()
    for_people = form == "console" or (form == "auto" and is_terminal)
    return _Formatter(_for_people(is_terminal) if for_people else _as_json)


class _Formatter(logging.Formatter):
    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        return self._render(_line(record))


def _as_json(line: dict[str, Any]) -> str:
    return json.dumps(line, default=repr)


COLOURS = {"warning": "33", "error": "31", "critical": "31"}
"""Of a level on a terminal; others are green (32)."""


def _for_people(colours: bool) -> Callable[[dict[str, Any]], str]:
    def render(line: dict[str, Any]) -> str:
        rest = dict(line)
        level, exception = rest.pop("level"), rest.pop("exception", None)
        shown = f"\x1b[{COLOURS.get(level, '32')}m{level:8}\x1b[0m" if colours else f"{level:8}"
        first = f"{rest.pop('timestamp')} {shown} {rest.pop('event')} [{rest.pop('logger')}]"
        # A session's id may be any text of a request's path: line breaks or a terminal's codes.
        fields = " ".join(
            f"{name}={value if str(value).isprintable() else ascii(value)}" for name, value in rest.items()
        )
        return "\n".join(filter(None, (f"{first} {fields}".rstrip(), exception)))

    return render


def _line(record: logging.LogRecord) -> dict[str, Any]:
    """The fields of one line. Of a library's message only the first line is kept: the others may quote values."""
    text = record.getMessage()
    if not record.name.startswith(("turnlog", "uvicorn")):
        text = text.partition("\n")[0]
    about = CURRENT.get()
    line: dict[str, Any] = {
        "timestamp": _timestamp(record.created),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": text.rstrip(),
    }
    if about is not None and not about.has_ended:
        line["request_id"] = about.request_id
        if about.session_id is not None:
            line["session_id"] = about.session_id[:MAX_SESSION_ID]
    for name in FIELDS:
        if name in record.__dict__:
            line.setdefault(name, record.__dict__[name])
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        line["exception"] = "".join(_trace(error, set())).rstrip()
    return line


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(error: BaseException, seen: set[int]) -> Iterator[str]:
    """Causes first, as in Python's own traceback."""
    seen.add(id(error))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None and id(cause) not in seen:
        yield from _trace(cause, seen)
        yield "which led to:\n"
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__, limit=-FRAMES)
    yield _headline(error)
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            if id(member) not in seen:
                yield "with:\n"
                yield from _trace(member, seen)


def _headline(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    shows_message = kind.__module__.startswith(OWN_MODULES) or isinstance(error, CODE_ERRORS)
    return f"{name}: {error}\n" if shows_message and str(error) else f"{name}\n"
