"""The command line `turnlog`.

A module is a few commands; what a command needs beyond typer it imports when it runs, so that `turnlog --help` and
shell completion are quick.
"""

from __future__ import annotations


def main() -> None:
    """The entry point. Exit codes: 0 done; 1 it failed, or not all is well; 2 wrong usage; 130 interrupted."""
    from turnlog.cli.commands import app

    app(prog_name="turnlog")
