"""What the page copies for a shell."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from integration.stand import CHAT, engine_requests

from e2e.page import PageStand, Watched

pytestmark = pytest.mark.long


def test_the_copied_request_goes_to_the_engine_and_leaves_the_session_alone(
    page_stand: PageStand, watch: Callable[..., Watched], tmp_path: Path
) -> None:
    stand = page_stand.stand
    talk = stand.talk()
    touched = tmp_path / "touched"
    said = f"it's \u202e \u0000 \u001b[31m $(touch {touched}) `touch {touched}`\nTURNLOG\n"
    talk.say(said, sim={"latency_s": 0}, temperature=0.5)
    watched = watch(stand.server.base_url)
    page = watched.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    watched.open(f"#/session/{talk.id}")
    page.locator(".said").last.wait_for()
    before = talk.events()
    page.locator(".promptfold > summary").click()
    page.get_by_role("button", name="Copy request to the engine as curl").click()
    page.get_by_text("Copied").first.wait_for()
    command = page.evaluate("navigator.clipboard.readText()")
    assert "\u202e" not in command
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(ran.stdout)["choices"][0]["message"]["role"] == "assistant"
    (sent,) = (one["body"] for one in stand.engine_requests(talk.id))
    again = engine_requests(stand.sim, CHAT, None)[-1]["body"]
    assert again["messages"] == sent["messages"]
    assert again["temperature"] == 0.5
    assert talk.events() == before
    assert not touched.exists()
