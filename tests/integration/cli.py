"""The command line as a test calls it: in the test's process, or as one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.warm import popen
from typer.testing import CliRunner, Result

from turnlog.cli.commands import app_of


def run(*arguments: str | Path, code: int = 0) -> Result:
    """A command that must end with this exit code. Its output is as wide as it likes, whatever runs the tests says."""
    result = CliRunner(env={"COLUMNS": None}).invoke(app_of(), [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    return result


def answer(*arguments: str | Path, code: int = 0) -> Any:
    """What a command says with `--json`: one document, and nothing else."""
    return json.loads(run(*arguments, "--json", code=code).stdout)


def complaint(*arguments: str | Path, code: int = 1) -> str:
    """The one line on standard error with which a command fails."""
    result = run(*arguments, code=code)
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def started(
    *arguments: str | Path, folder: Path, environment: Mapping[str, str] | None = None, **more: Any
) -> subprocess.Popen[str]:
    """A command as a process of its own, in a folder that is not the checkout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TURNLOG_")}
    return popen(
        [sys.executable, "-m", "turnlog.cli", *(str(argument) for argument in arguments)],
        cwd=folder,
        env={**inherited, "NO_COLOR": "1", **(environment or {})},
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
    )
