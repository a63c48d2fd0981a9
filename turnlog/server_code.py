"""Where the server's code is.

In a checkout `app`, `workers`, `ops` and `migrations` are at its top. The wheel has them in `turnlog/_server`: other
packages have such names, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent

_IN_WHEEL = PACKAGE / "_server"

FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else PACKAGE.parent


def put_on_path() -> None:
    """Its modules are imported before others of the same names. Worker processes look where this one does."""
    folder = str(FOLDER)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
