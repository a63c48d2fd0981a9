"""A simulator to ask, without a server around it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from ops.simulator.app import Simulator
from ops.simulator.config import Config, Dialect

CHAT = "/v1/chat/completions"
SGLANG_ASKS = {
    "logprobs": True,
    "return_meta_info": True,
    "return_prompt_token_ids": True,
    "return_token_ids": True,
}


@asynccontextmanager
async def engine(dialect: Dialect = "sglang", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = Simulator(Config(dialect=dialect, **options))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as client:  # type: ignore[arg-type]
        yield client


def user(text: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def ask(client: httpx.AsyncClient, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    response = await client.post(CHAT, json={"messages": messages, **SGLANG_ASKS, **fields})
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


def choice_of(reply: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = reply["choices"][0]
    return choice
