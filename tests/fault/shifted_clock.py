"""`app.main:app` with a wrong clock: `time.time()` is off by as many seconds as a file says at the moment.

Only the process's own clock can be moved. The database's cannot; leases and heartbeats go by that one.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

FILE = "SHIFTED_CLOCK_FILE"
APPLICATION = f"{__name__}:app"

_true_time = time.time


def shift(file: Path, seconds: float) -> None:
    """Called by the test: the clock jumps to `seconds` from the true time."""
    new = file.with_suffix(".new")
    new.write_text(str(seconds))
    new.replace(file)


def _shifted_time() -> float:
    return _true_time() + float(Path(os.environ[FILE]).read_text())


if FILE in os.environ:
    time.time = _shifted_time
    from app.main import app

    __all__ = ["app"]
