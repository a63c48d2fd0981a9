"""Log lines: JSON for machines, or colours on a terminal; each says which request and session it is about.

Modules log with the standard library. The lines are made here, uvicorn's too; structlog colours them for people, and is
not even imported for machines, as it brings rich along. They hold ids, lengths, limits and times: what an agent or an
engine said, tokens and secrets are in none. So a foreign exception, which may quote what it stumbled over, is shown by
its type and where it came from, without its message.
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
"""What a line may hold beside its text (`extra`); anything else that a library adds is left out."""

FRAMES = 40
"""The innermost of an exception's."""

OWN = ("app.", "workers.")
OF_CODE = (TypeError, AttributeError, NameError, ImportError, OSError)
"""Exceptions whose messages are shown: of these modules, and those that speak of code and files, not of values."""


class About:
    """What a request is about. Tasks that outlive it have it too, and it says nothing any more once it has ended."""

    __slots__ = ("has_ended", "request_id", "session_id")

    def __init__(self, request_id: str, session_id: str | None) -> None:
        self.request_id = request_id
        self.session_id = session_id
        self.has_ended = False


CURRENT: ContextVar[About | None] = ContextVar("turnlog_request", default=None)


def about_session(session_id: str) -> None:
    """The current request turned out to be about this session."""
    about = CURRENT.get()
    if about is not None:
        about.session_id = session_id


def configure(form: Format, level: Level) -> None:
    """Send all lines to standard error, of Turnlog and uvicorn from `level` on, of other libraries warnings.

    Whoever has set up the root logger himself (uvicorn's --log-config, pytest) keeps what he has. uvicorn's line for
    each request, which costs more than the routing, goes away in any case.
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
        uvicorns = logging.getLogger(name)
        uvicorns.handlers.clear()
        uvicorns.propagate = True
        uvicorns.setLevel(max(number, logging.INFO))


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, to be told from others'."""


def formatter(form: Format, stream: TextIO) -> logging.Formatter:
    """How records become lines; `auto` is for people where `stream` is a terminal."""
    is_terminal = stream.isatty()
    for_people = form == "console" or (form == "auto" and is_terminal)
    return _Formatter(_coloured(is_terminal) if for_people else _as_json)


class _Formatter(logging.Formatter):
    def __init__(self, render: Callable[[dict[str, Any]], str]) -> None:
        super().__init__()
        self._render = render

    def format(self, record: logging.LogRecord) -> str:
        return self._render(_line(record))


def _as_json(line: dict[str, Any]) -> str:
    return json.dumps(line, default=repr)


def _coloured(colours: bool) -> Callable[[dict[str, Any]], str]:
    import structlog

    render = structlog.dev.ConsoleRenderer(colors=colours)
    return lambda line: str(render(None, line["level"], line))


def _line(record: logging.LogRecord) -> dict[str, Any]:
    """A library may quote things in a message's further lines; its first one stands."""
    text = record.getMessage()
    if not record.name.startswith(("turnlog", "uvicorn")):
        text = text.partition("\n")[0]
    about = CURRENT.get()
    line: dict[str, Any] = {
        "timestamp": _moment(record.created),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": text.rstrip(),
    }
    if about is not None and not about.has_ended:
        line["request_id"] = about.request_id
        if about.session_id is not None:
            line["session_id"] = about.session_id
    for name in FIELDS:
        if name in record.__dict__:
            line.setdefault(name, record.__dict__[name])
    error = record.exc_info[1] if record.exc_info else None
    if error is not None:
        line["exception"] = "".join(_trace(error, set())).rstrip()
    return line


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _trace(error: BaseException, seen: set[int]) -> Iterator[str]:
    """As Python shows it, causes first."""
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
        for one in error.exceptions:
            if id(one) not in seen:
                yield "with:\n"
                yield from _trace(one, seen)


def _headline(error: BaseException) -> str:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    is_open = kind.__module__.startswith(OWN) or isinstance(error, OF_CODE)
    return f"{name}: {error}\n" if is_open and str(error) else f"{name}\n"
