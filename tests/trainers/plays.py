"""Agents for the tests of trainers' adapters, and their kills."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import httpx

PROMPT = [{"role": "user", "content": "What is 6 times 7?"}]
HELD, GO = "held", "go"
ATTEMPT_HELD = 1

COMMAND = (
    sys.executable,
    "-c",
    """
import json, os, urllib.request
told = json.load(open(os.environ["TURNLOG_ROLLOUT"]))
body = {"model": "simulator", "messages": told["prompt"], **told["request_kwargs"]}
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head)
urllib.request.urlopen(asked).read()
print(json.dumps({"reward": told["metadata"]["attempt"]}))
""",
)
"""An agent of one turn. Its reward is its attempt, as that of the others."""


async def two_turns(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> float:
    """With `hold` in the metadata, a folder, attempt 1 waits there between its turns."""
    messages = list(prompt)
    for turn in range(2):
        if turn and metadata.get("hold") and metadata["attempt"] == ATTEMPT_HELD:
            Path(metadata["hold"], HELD).touch()
            while not Path(metadata["hold"], GO).exists():
                await asyncio.sleep(0.02)
        body = {"model": "simulator", "messages": messages, **request_kwargs}
        reply = await _ask(f"{base_url}/v1/chat/completions", metadata["api_key"], body)
        messages += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
    return float(metadata["attempt"])


async def two_conversations(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> float:
    """Two rows of one session."""
    for text in ("What is 6 times 7?", "In short: 6 times 7?"):
        body = {"model": "simulator", "messages": [{"role": "user", "content": text}], **request_kwargs}
        await _ask(f"{base_url}/v1/chat/completions", metadata["api_key"], body)
    return float(metadata["attempt"])


async def first_raises(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> float:
    """Attempt 0 raises after its first turn."""
    body = {"model": "simulator", "messages": prompt, **request_kwargs}
    await _ask(f"{base_url}/v1/chat/completions", metadata["api_key"], body)
    if metadata["attempt"] == 0:
        raise ValueError("the sandbox is gone")
    return float(metadata["attempt"])


async def _ask(url: str, key: str, body: Any) -> Any:
    """The same request until it is answered, as an agent's SDK does while a server starts again."""
    head = {"authorization": f"Bearer {key}", "idempotency-key": uuid.uuid4().hex}
    async with httpx.AsyncClient(timeout=60, trust_env=False, headers=head) as http:
        while True:
            try:
                return (await http.post(url, json=body)).raise_for_status().json()
            except httpx.TransportError:
                await asyncio.sleep(0.05)


async def while_held(folder: Path, play: Any, do: Callable[[], None]) -> Any:
    """Do something between the turns of attempt 1 of this play."""
    task = asyncio.ensure_future(play)
    while not (folder / HELD).exists() and not task.done():
        await asyncio.sleep(0.02)
    await anyio.to_thread.run_sync(do)
    (folder / GO).touch()
    return await task


async def killed_and_again(folder: Path, command: Sequence[str], environment: dict[str, str]) -> str:
    """What a trainer prints that was killed (SIGKILL) between the turns of attempt 1, and is started again."""
    pipe = asyncio.subprocess.PIPE
    trainer = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment)
    while not (folder / HELD).exists():
        assert trainer.returncode is None, "the trainer ended before its kill"
        await asyncio.sleep(0.02)
    trainer.kill()
    await trainer.communicate()
    (folder / GO).touch()
    again = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=environment)
    printed, _ = await again.communicate()
    assert again.returncode == 0
    return printed.decode()
