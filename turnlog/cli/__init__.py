"""The command line `turnlog`.

Each module has a few commands. A command imports what it needs beyond typer when it runs, so that `turnlog --help` and
shell completion are quick.
"""

from __future__ import annotations

import io
import sys


def main() -> None:
    """The entry point. Exit codes: 0 success; 1 failure or a problem found; 2 wrong usage; 130 interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Latin-1 has no dash, and UTF-8 no lone surrogate: they become question marks instead of ending the command.
        sys.stdout.reconfigure(errors="replace")
    from turnlog.cli.commands import app

    app(prog_name="turnlog")
