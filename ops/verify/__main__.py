"""Runs `turnlog verify`; `ops.keeping` lists the exit codes."""

from __future__ import annotations

from ops.keeping import run_as_turnlog

if __name__ == "__main__":
    run_as_turnlog("verify")
