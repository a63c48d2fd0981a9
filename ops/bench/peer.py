"""rllm-model-gateway, another server that records turns, from its published package in an environment of its own.

Version 0.1.0 has Turnlog's routes for sessions and chat. One process serves; an inference engine is what it calls a
worker. Its store is SQLite (its default) or memory; it writes a trace in the background after the reply (its default)
or, with `sync_traces`, which exists only in its configuration file, before. With SQLite it runs
`journal_mode=DELETE, synchronous=NORMAL`.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from pathlib import Path

from ops.server import ROOT, OwnProcess

PACKAGE, VERSION = "rllm-model-gateway", "0.1.0"
STORES = ("sqlite-sync", "sqlite", "memory")
"""SQLite, recorded before the reply; its defaults, after it; in memory before it, and lost with the process."""


class PeerNotInstalled(Exception):
    """The message is what pip printed."""


def rllm_gateway(store: str, folder: Path, engine_url: str) -> OwnProcess:
    """The gateway with one of its `STORES`. Raises PeerNotInstalled."""
    made = OwnProcess(
        [str(_installed()), "--config", str(folder / "gateway.yaml")],
        folder / "gateway.log",
        environment={name: value for name, value in os.environ.items() if not name.startswith("RLLM_")},
        start_timeout_s=30.0,
        stop_s=30.0,
    )
    configuration = {
        "host": "127.0.0.1",
        "port": made.port,
        "workers": [{"url": engine_url}],
        "store_worker": store.partition("-")[0],
        "db_path": str(folder / "gateway.db"),
        "sync_traces": store != "sqlite",
        "log_level": "WARNING",
    }
    (folder / "gateway.yaml").write_text(json.dumps(configuration))  # which is YAML too
    return made


def _installed() -> Path:
    """The gateway's program, installed where it is not yet."""
    home = ROOT / "var" / "peers" / f"{PACKAGE}-{VERSION}"
    program = home / "bin" / PACKAGE
    if not program.exists():
        venv.create(home, with_pip=True)
        command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerNotInstalled(done.stdout + done.stderr)
    return program
