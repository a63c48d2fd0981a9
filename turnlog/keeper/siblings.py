"""A folder where several servers of one keeper put their metrics (`app/metric_files.py`), which also sweeps up after a
keeper that was killed: hence its name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from turnlog.keeper.plan import Plan

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PREFIX = "turnlog-metrics-"


@contextlib.contextmanager
def folder(plan: Plan) -> Iterator[None]:
    """For all processes that are started meanwhile. A server by itself has its metrics in memory."""
    if plan.servers == 1 or os.environ.get(VARIABLE):
        yield
        return
    import shutil
    import tempfile

    made = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
    os.environ[VARIABLE] = made
    try:
        yield
    finally:
        shutil.rmtree(made, ignore_errors=True)
