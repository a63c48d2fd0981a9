"""What the service logs as an error is a fault that nobody expected."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from tests.tools.simulation.history import History


class _Errors(logging.Handler):
    def __init__(self, history: History) -> None:
        super().__init__(logging.ERROR)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        fault = "" if record.exc_info is None else f": {record.exc_info[1]!r}"
        self._history.problem(f"the log has an error: {record.getMessage()}{fault}")


@contextlib.contextmanager
def expecting_no_errors(history: History) -> Iterator[None]:
    """Each that is logged is a problem of the schedule."""
    logs = _Errors(history)
    logger = logging.getLogger("turnlog")
    logger.addHandler(logs)
    propagated, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(logs)
        logger.propagate = propagated
