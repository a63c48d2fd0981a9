"""What refused bodies do to a server: `python -m tests.tools.memory [CHECKOUT [KIND…]]`, MiB of its process.

Of each kind three bodies come at once. RSS before, at most, and 3 s after the last answer; the server is the same for
all kinds, so what one leaves stays in the rows below it.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from ops.bench.measure import table
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from tests.tools import hostile

SIZE, AT_ONCE, AFTER_S = 16 << 20, 3, 3.0


def main(root: Path, *kinds: str) -> None:
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        SimulatorProcess() as engine,
        ServerProcess(Path(folder), upstreams=[engine.base_url], root=root) as server,
        ThreadPoolExecutor(AT_ONCE) as threads,
    ):
        for number in range(AT_ONCE):
            post(server.port, "/sessions", json.dumps({"session_id": f"session-{number}"}).encode())
            hello = b'{"messages":[{"role":"user","content":"Hello"}]}'  # another conversation is then refused
            post(server.port, f"/sessions/session-{number}/v1/chat/completions", hello)
        for kind, (route, body) in hostile.bodies(SIZE).items():
            if kinds and kind not in kinds:
                continue
            before = rss(server.pid, "VmRSS")
            Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the peak begins anew
            paths = [f"/sessions/session-{number}/{route}" for number in range(AT_ONCE)]
            statuses = set(threads.map(partial(post, server.port, body=body), paths))
            time.sleep(AFTER_S)
            peak, after = rss(server.pid, "VmHWM"), rss(server.pid, "VmRSS")
            rows.append({"kind": kind, "statuses": str(statuses), "before": before, "peak": peak, "3 s after": after})
    table(rows)


def post(port: int, path: str, body: bytes) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    connection.close()
    return response.status


def rss(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) >> 10


if __name__ == "__main__":
    main(Path(sys.argv[1] if sys.argv[1:] else ".").resolve(), *sys.argv[2:])
