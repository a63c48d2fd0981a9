from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from app.errors import StoreUnavailable
from app.logs import CURRENT, MAX_SESSION_ID, LogContext, formatter
from ops.server import ROOT

CANARY = "the-canary-sings-7f3a"


class Lines:
    """What a logger's records become."""

    def __init__(self, form: str = "json") -> None:
        self._stream = io.StringIO()
        self._handler = logging.StreamHandler(self._stream)
        self._handler.setFormatter(formatter(form, self._stream))  # type: ignore[arg-type]

    def of(self, name: str) -> logging.Logger:
        logger = logging.Logger(name)
        logger.addHandler(self._handler)
        return logger

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def last(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text.splitlines()[-1])
        return found


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def about() -> Iterator[LogContext]:
    made = LogContext("req-1", None)
    token = CURRENT.set(made)
    yield made
    CURRENT.reset(token)


def test_a_line_is_one_json_object_that_begins_with_when_how_bad_who_and_what(lines: Lines) -> None:
    lines.of("turnlog.claims").warning("session %s: %d", "s-1", 3, extra={"code": "claim_lost", "prompt": CANARY})
    assert list(lines.last) == ["timestamp", "level", "logger", "event", "code"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", lines.last["timestamp"])
    assert (lines.last["level"], lines.last["logger"], lines.last["event"]) == (
        "warning",
        "turnlog.claims",
        "session s-1: 3",
    )
    assert CANARY not in lines.text


def test_a_line_names_its_request_and_session_until_the_request_has_ended(lines: Lines, about: LogContext) -> None:
    log = lines.of("turnlog.chat")
    log.info("one")
    assert (lines.last["request_id"], "session_id" in lines.last) == ("req-1", False)
    about.session_id = "s-1"
    log.info("two")
    assert (lines.last["request_id"], lines.last["session_id"]) == ("req-1", "s-1")
    about.session_id = "x" * 500
    log.info("three")
    assert lines.last["session_id"] == "x" * MAX_SESSION_ID

    async def outlives() -> None:
        async def later() -> None:
            log.info("within" if not about.has_ended else "after")

        await asyncio.create_task(later())
        assert lines.last["request_id"] == "req-1"
        about.has_ended = True
        await asyncio.create_task(later())

    asyncio.run(outlives())
    assert lines.last["event"] == "after"
    assert not {"request_id", "session_id"} & set(lines.last)


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_session_in_a_path_forges_no_line(form: str, about: LogContext) -> None:
    lines = Lines(form)
    about.session_id = "x\nforged\x1b[2J\u2028y"
    lines.of("turnlog.chat").info("turn failed")
    assert len(lines.text.splitlines()) == 1
    assert "\x1b" not in lines.text


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as found:  # noqa: BLE001 - whatever it was given
        return found


def test_an_exception_is_told_with_its_causes_and_places_and_without_what_it_quotes(lines: Lines) -> None:
    cause = raised(ValueError(f"invalid literal: {CANARY}"))
    error = raised(StoreUnavailable("the database is away"), cause)
    lines.of("turnlog").error("a fault", exc_info=error)
    told = lines.last["exception"].splitlines()
    assert told[0] == "Traceback (most recent call last):"
    assert "ValueError" in told
    assert told[-1] == "app.errors.StoreUnavailable: the database is away"
    assert sum("in raised" in line for line in told) == 2
    assert CANARY not in lines.text


@pytest.mark.parametrize(
    "error",
    [
        KeyError(CANARY),
        UnicodeDecodeError("utf-8", CANARY.encode(), 0, 1, CANARY),
        ExceptionGroup(CANARY, [ValueError(CANARY), RuntimeError(CANARY)]),
        type(CANARY.replace("-", "_")[:3], (Exception,), {})(CANARY),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("form", ["json", "console"])
def test_no_foreign_message_is_in_a_line(error: BaseException, form: str) -> None:
    lines = Lines(form)
    lines.of("turnlog").error("a fault", exc_info=raised(error))
    assert "Traceback" in lines.text
    assert CANARY not in lines.text


def test_a_library_s_line_ends_where_it_begins_to_quote(lines: Lines) -> None:
    message = f"Task exception was never retrieved\nfuture: <Task exception=ValueError('{CANARY}')>"
    lines.of("asyncio").error(message, exc_info=raised(ValueError(CANARY)))
    assert lines.last["event"] == "Task exception was never retrieved"
    assert CANARY not in lines.text


CONFIGURED = """
import logging, sys
from app.logs import configure
for name in ("uvicorn", "uvicorn.access"):
    logging.getLogger(name).addHandler(logging.StreamHandler())
{before}
configure("auto", "warning")
configure("auto", "{level}")
logging.getLogger("uvicorn.access").info("GET /")
for name in ("turnlog.x", "uvicorn.error", "sqlalchemy"):
    for level in ("debug", "info", "warning"):
        logging.getLogger(name).log(logging.getLevelNamesMapping()[level.upper()], "%s %s", name, level)
"""


def configured(level: str, before: str = "") -> list[str]:
    """What a process of its own writes to standard error."""
    command = [sys.executable, "-c", CONFIGURED.format(level=level, before=before)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", ["turnlog.x debug", "turnlog.x info", "turnlog.x warning", "uvicorn.error info"]),
        ("info", ["turnlog.x info", "turnlog.x warning", "uvicorn.error info"]),
        ("error", []),
    ],
)
def test_each_line_is_written_once_from_its_level_on(level: str, written: list[str]) -> None:
    always = ["uvicorn.error warning"] if level != "error" else []
    events = [json.loads(line)["event"] for line in configured(level)]
    assert events == [*written, *always, "sqlalchemy warning"]


def test_whoever_has_set_up_logging_keeps_it() -> None:
    before = "logging.basicConfig(format='mine: %(message)s')"
    assert "mine: turnlog.x info" in configured("info", before)
