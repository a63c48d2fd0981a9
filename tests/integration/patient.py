"""A client that sends one turn until it is answered, whatever dies meanwhile."""

from __future__ import annotations

import time
from typing import Any

import httpx

from integration.stand import Stand, Talk

AGAIN_S = 0.02


def answered(stand: Stand, talk: Talk, body: dict[str, Any], within_s: float, key: str | None = None) -> httpx.Response:
    """The turn's 200. An answer of the 400s is the test's own mistake. `key` marks the turn, by default its session."""
    headers = {"idempotency-key": key or talk.id}
    deadline = time.monotonic() + within_s
    while True:
        assert time.monotonic() < deadline, "never answered"
        try:
            response = httpx.post(stand.base_url + talk.chat_path, json=body, headers=headers, timeout=within_s)
        except httpx.TransportError:
            time.sleep(AGAIN_S)
            continue
        if response.status_code == 200:
            return response
        assert response.status_code >= 500, response.text[:300]
        time.sleep(AGAIN_S)
