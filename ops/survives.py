"""A turn at `turnlog serve`, kill -9, another turn, and both in the export: with the Turnlog that is installed.

Run by its path, in an empty folder, with the environment's own Python: `…/bin/python -P ops/survives.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import httpx

from turnlog import Turnlog
from turnlog.server_code import put_on_path


def say(session_url: str, messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The conversation with a message and its reply. Raises httpx.HTTPError."""
    asked = [*messages, {"role": "user", "content": text}]
    body = {"model": "simulator", "messages": asked}
    replied = httpx.post(f"{session_url}/chat/completions", json=body, trust_env=False, timeout=60)
    return [*asked, replied.raise_for_status().json()["choices"][0]["message"]]


def main() -> int:
    put_on_path()
    from ops.server import PORT, OwnProcess
    from ops.simulator.process import SimulatorProcess

    folder = Path.cwd()
    with SimulatorProcess() as engine:
        store = f"sqlite+aiosqlite:///{folder / 'turnlog.db'}"
        environment = {**os.environ, "TURNLOG_DATABASE_URL": store, "TURNLOG_UPSTREAMS": engine.base_url}
        command = [str(Path(sys.executable).with_name("turnlog")), "serve", "--port", PORT]
        server = OwnProcess(command, folder / "server.log", environment=environment, root=folder, group=True)
        with server, Turnlog(server.base_url) as turnlog:
            session = turnlog.create_session()
            messages = say(session.base_url, [], "Hello")
            server.kill()
            server.start()
            messages = say(session.base_url, messages, "Hello again")
            exported = [len(row["messages"]) for row in turnlog.export(session_id=session.id)]
    if exported != [len(messages)]:
        print(f"{len(messages)} messages were acknowledged, the rows have {exported}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
