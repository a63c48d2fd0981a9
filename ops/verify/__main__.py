"""The command; see `ops.keeping` for its exit codes."""

from __future__ import annotations

from ops.keeping import as_turnlog

if __name__ == "__main__":
    as_turnlog("verify")
