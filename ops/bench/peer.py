"""Runs rllm-model-gateway, another server that records turns, from its published package in a separate environment.

Version 0.1.0 has Turnlog's routes for sessions and chat. One process serves; it calls an inference engine a worker. Its
store is SQLite (the default) or memory. It writes a trace in the background after the reply (the default) or, with
`sync_traces`, which exists only in its configuration file, before the reply. It opens SQLite with `journal_mode=DELETE,
synchronous=NORMAL`.
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
"""SQLite, written before the reply; SQLite, written after it (the gateway's defaults); memory, written before it."""


class PeerNotInstalled(Exception):
    """pip failed; the message is its output."""


def rllm_gateway(store: str, folder: Path, engine_url: str) -> OwnProcess:
    """The gateway with one of the STORES, not started. Raises PeerNotInstalled."""
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
    (folder / "gateway.yaml").write_text(json.dumps(configuration))  # JSON is valid YAML
    return made


def _installed() -> Path:
    """The path of the gateway's program, which is installed at the first use."""
    home = ROOT / "var" / "peers" / f"{PACKAGE}-{VERSION}"
    program = home / "bin" / PACKAGE
    if not program.exists():
        venv.create(home, with_pip=True)
        command = [str(home / "bin" / "python"), "-m", "pip", "install", "-q", f"{PACKAGE}=={VERSION}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise PeerNotInstalled(done.stdout + done.stderr)
    return program
