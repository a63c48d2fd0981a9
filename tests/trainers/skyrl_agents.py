"""Agents that SkyRL's tests name by their import path; what one is to do stands in the data set's columns."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import httpx

QUESTIONS = ("Hello", "Are you sure?")


async def ask(http: httpx.AsyncClient, messages: list[dict[str, Any]], question: str, **body: Any) -> None:
    messages.append({"role": "user", "content": question})
    sent = {"model": "simulator", "messages": messages, **body}
    reply = (await http.post("/v1/chat/completions", json=sent)).raise_for_status().json()
    messages.append({name: value for name, value in reply["choices"][0]["message"].items() if value is not None})


async def two_turns(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
    """The reward is the attempt, a quarter of it the first turn's. `fault` is that of the second attempt; `gate` is a
    folder: a file with the process is put there after a turn, and it goes on when there is one called open."""
    fault = metadata.get("fault") if metadata["attempt"] == 1 else None
    if fault == "early":
        raise ValueError("no sandbox")
    head = {"authorization": f"Bearer {metadata['api_key']}"}
    async with httpx.AsyncClient(base_url=base_url, headers=head, timeout=60) as http:
        messages: list[dict[str, Any]] = []
        await ask(http, messages, prompt[-1]["content"], **request_kwargs)
        if fault == "late":
            raise ValueError("the sandbox is gone")
        if gate := metadata.get("gate"):
            Path(gate, metadata["session_id"]).write_text(str(os.getpid()))
            while not Path(gate, "open").exists():
                await asyncio.sleep(0.05)
        if metadata.get("turn_rewards"):
            await http.put("/reward", json={"reward": 0.25, "turn": 1})
        if fault == "branches":
            messages = []
        await ask(http, messages, "Are you sure?", **request_kwargs)
    return float(metadata["attempt"])


COMMAND = f"{sys.executable} {__file__}"
"""The same conversation as a command."""


def main() -> None:
    import json

    told = json.loads(Path(os.environ["TURNLOG_ROLLOUT"]).read_text())
    url = os.environ["ANTHROPIC_BASE_URL"]
    print(asyncio.run(two_turns(url, told["prompt"], told["request_kwargs"], told["metadata"])))


if __name__ == "__main__":
    main()
