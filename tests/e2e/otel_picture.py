"""The picture of docs/observability.md: a session's turns in a real collector, Phoenix (`pip install arize-phoenix`
in an environment of its own). `PYTHONPATH=tests python -m e2e.otel_picture ENVIRONMENT/bin/phoenix FILE.png`"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import tempfile
import time
from pathlib import Path

import httpx
from integration.stand import standing, until, user
from PIL import Image
from playwright.sync_api import FloatRect

from e2e.page import launched
from ops.server import free_port

SHOWN_MS, TIMEOUT_MS = 3000, 120_000
CLIP: FloatRect = {"x": 360, "y": 45, "width": 1080, "height": 1135}
"""Without the collector's own navigation."""

CALL = {"calls": [{"name": "bash", "arguments": '{"command": "pytest -q"}'}], "call_ids": ["call_1"], "latency_s": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("phoenix", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    url = f"http://127.0.0.1:{(port := free_port())}"
    with tempfile.TemporaryDirectory() as folder:
        own = {"PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": str(port), "PHOENIX_GRPC_PORT": str(free_port())}
        quiet = {"PHOENIX_WORKING_DIR": folder, "PHOENIX_TELEMETRY_ENABLED": "false"}
        collector = subprocess.Popen(
            [arguments.phoenix, "serve"], env={**os.environ, **own, **quiet}, stdout=subprocess.DEVNULL
        )
        try:
            until(lambda: answers(url), timeout_s=300)
            play(Path(folder), url)
            shoot(url, arguments.file)
        finally:
            collector.terminate()
            collector.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").status_code == 200
    except httpx.TransportError:
        return False


def play(folder: Path, url: str) -> None:
    """Three turns, one of which fails first."""
    with standing(folder / "turns", environment={"OTEL_EXPORTER_OTLP_ENDPOINT": url}) as stand:
        talk = stand.talk(session_id="django-11099.1", group_id="django-11099")
        talk.say("Find out why the validator accepts a trailing newline.", sim=CALL)
        time.sleep(0.4)  # what the environment takes
        talk.add({"role": "tool", "tool_call_id": "call_1", "content": "1 failed"}, sim={"latency_s": 0.8})
        stand.sim.post("/sim/faults", json={"fault": "empty_200"})
        talk.chat([*talk.messages, user("Go on.")])
        talk.say("Go on.", sim={"latency_s": 0.3})
        stand.http.delete(talk.path)


def shoot(url: str, file: Path) -> None:
    project, [span] = (httpx.get(f"{url}/v1/projects{path}").json()["data"] for path in ("", "/default/spans?limit=1"))
    with launched() as browser:
        page = browser.new_page(viewport={"width": 1440, "height": 1180})
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(f"{url}/projects/{project[0]['id']}/traces/{span['context']['trace_id']}")
        page.get_by_text("chat simulator").nth(2).click()  # the turn that failed
        page.get_by_text("upstream_invalid").first.wait_for(state="attached")
        page.wait_for_timeout(SHOWN_MS)
        picture = Image.open(io.BytesIO(page.screenshot(clip=CLIP))).convert("RGB").quantize(64)
    picture.save(file, optimize=True)


if __name__ == "__main__":
    main()
