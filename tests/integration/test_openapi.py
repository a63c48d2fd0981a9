"""The OpenAPI document against a real server: schemathesis makes requests from it and judges the replies by it.

By hand: the command that a failure prints, with more `--max-examples` or another `--phases`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.places import Places
from integration.stand import Stand, standing
from ops.server import ROOT

pytestmark = pytest.mark.long

TOKEN = "an-admin-token-of-the-tests"
CONFIG = Path(__file__).parent / "conforming" / "schemathesis.toml"
PROBED = re.compile(r"/|/(docs|ui|health|ready|metrics).*|/sessions/{session_id}")
"""Have a HEAD, which the document leaves out: it is the GET without its body."""

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@pytest.fixture(scope="module")
def guarded(places: Places) -> Iterator[Stand]:
    """A server that wants a token, so that it can be seen to."""
    with standing(places.new("openapi"), "--seed", "3", environment={"TURNLOG_ADMIN_TOKEN": TOKEN}) as stand:
        stand.http.headers["authorization"] = f"Bearer {TOKEN}"
        yield stand


def conform(stand: Stand, tmp_path: Path, *options: str) -> None:
    """Fails with schemathesis' own report. The server must not have met a fault of its own, either."""
    document = stand.http.get("/openapi.json")
    assert document.status_code == 200
    file = tmp_path / "openapi.json"
    file.write_bytes(document.content)
    base = stand.server.base_url
    run = ["--config-file", str(CONFIG), "run", str(file), "--url", base, "--no-color", *options]
    command = [str(Path(sys.executable).with_name("schemathesis")), *run]
    environment = {**os.environ, "TURNLOG_URL": base, "TURNLOG_TOKEN": TOKEN}
    environment["TURNLOG_ENGINE"] = str(stand.sim.base_url).rstrip("/")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-20_000:]}{done.stderr[-2000:]}"
    assert "Traceback" not in stand.server.log_path.read_text()


def test_replies_are_what_the_document_says(guarded: Stand, tmp_path: Path) -> None:
    conform(guarded, tmp_path, "--phases", "examples")


def test_every_path_says_which_methods_it_has(guarded: Stand) -> None:
    paths = guarded.http.get("/openapi.json").json()["paths"]
    assert len(paths) > 30
    for path, operations in paths.items():
        documented = {method.upper() for method in operations}
        if "/adapters/{name}/" in path:
            # The path of an adapter whose name ends so, too.
            documented.add("GET")
        if path.endswith("/responses/compact"):
            documented.add("GET")  # A response may have this id.
        for method in METHODS:
            if method in documented or (method == "HEAD" and PROBED.fullmatch(path)):
                continue
            reply = guarded.http.request(method, path.replace("{", "").replace("}", ""))
            assert reply.status_code == 405, (method, path, reply.status_code)
            assert documented <= set(reply.headers["allow"].split(", ")) <= documented | {"HEAD"}, (method, path)
