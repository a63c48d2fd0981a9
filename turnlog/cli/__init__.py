"""The command line `turnlog`.

Each module has a few commands. Only the module of the command that was asked for is imported, and what it needs beyond
typer when it runs.
"""

from __future__ import annotations

import io
import sys


def main() -> None:
    """The entry point. Exit codes: 0 success; 1 failure or a problem found; 2 wrong usage; 130 interrupted."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Latin-1 has no dash, and UTF-8 no lone surrogate: they become question marks instead of ending the command.
        sys.stdout.reconfigure(errors="replace")
    wanted = sys.argv[1] if len(sys.argv) > 1 else None
    if sys.argv[1:] == ["--version"]:
        print_version()
        return
    # httpx looks for its own command line, which imports rich and pygments whole; without it, it goes on.
    sys.modules["httpx._main"] = None  # type: ignore[assignment]
    from turnlog.cli.commands import app_of

    app_of(wanted)(prog_name="turnlog")


def print_version() -> None:
    from importlib.metadata import version

    print(f"turnlog {version('turnlog')}")
