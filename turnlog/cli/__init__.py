"""The command line `turnlog`.

Each module has a few commands. A command imports what it needs beyond typer when it runs, so that `turnlog --help` and
shell completion are quick.
"""

from __future__ import annotations


def main() -> None:
    """The entry point. Exit codes: 0 success; 1 failure or a problem found; 2 wrong usage; 130 interrupted."""
    from turnlog.cli.commands import app

    app(prog_name="turnlog")
