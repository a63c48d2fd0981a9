"""The folder in which the servers of one keeper share their metrics (`app/metric_files.py`).

Its name holds the keeper's process id, so that a later start finds and removes what a killed keeper left.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from turnlog.keeper.options import ServeOptions

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
PREFIX = "turnlog-metrics-"


@contextlib.contextmanager
def metrics_folder(options: ServeOptions) -> Iterator[None]:
    """For the servers that are started meanwhile. A single server keeps its metrics in memory."""
    if options.servers == 1 or os.environ.get(VARIABLE):
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
