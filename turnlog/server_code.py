"""Finds the server's code.

In a checkout `app`, `workers`, `ops` and `migrations` are at its top. The wheel has them in `turnlog/_server`, because
other packages use the same names.
"""

from __future__ import annotations

import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent

_IN_WHEEL = PACKAGE / "_server"

FOLDER = _IN_WHEEL if _IN_WHEEL.is_dir() else PACKAGE.parent


def put_on_path() -> None:
    """Put the server's modules first on the import path, for this process and its worker processes."""
    folder = str(FOLDER)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
