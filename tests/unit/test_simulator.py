"""The faults of the engine simulator: each spoils one reply, and a reader refuses it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from helpers.replies import parse_reply

from ops.simulator.app import Simulator
from ops.simulator.faults import FAULTS
from ops.simulator.wire import Config, Dialect
from workers.parse import PromptDiffers, Rejected, token_text

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SGLANG_ASKS = {"logprobs": True, "return_meta_info": True, "return_prompt_token_ids": True, "return_token_ids": True}
VLLM_ASKS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True}
COMPLETION_ASKS = {"logprobs": 0, "return_token_ids": True}
DIALECTS: list[Dialect] = ["sglang", "vllm"]


pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def engine(dialect: Dialect = "sglang", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = Simulator(Config(dialect=dialect, **options))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://engine") as client:  # type: ignore[arg-type]
        yield client


def user(text: str = "hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


PAYLOADS = {"wrong_experts_rows", "bad_experts_base64", "misaligned_experts"}
DELIVERY = {"never", "reset", "drip", "abort"}


@pytest.mark.parametrize("protocol", ["chat", "completions"])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", sorted(set(FAULTS) - PAYLOADS - DELIVERY))
async def test_a_fault_spoils_one_reply(name: str, dialect: Dialect, protocol: Any) -> None:
    async with engine(dialect) as client:
        body: dict[str, Any] = {"prompt": [5, 6, 7], **COMPLETION_ASKS}
        if protocol == "chat":
            body = {"messages": user(), **(SGLANG_ASKS if dialect == "sglang" else VLLM_ASKS)}
        path, sent = (CHAT, None) if protocol == "chat" else (COMPLETIONS, token_text([5, 6, 7]))
        assert (await client.post("/sim/faults", json={"fault": name})).json() == {"queued": [name]}
        bad = await client.post(path, json=body)
        if not FAULTS[name].generates and name != "empty_200":
            assert bad.status_code >= 300
        elif protocol == "chat" and name == "duplicate_meta_key" and dialect == "vllm":
            pass  # its chats have no such object
        elif protocol == "chat" and name == "no_usage" and dialect == "sglang":
            pass  # its counts are read from meta_info
        elif protocol == "chat" and (name == "other_prompt" or name.endswith("prompt_tokens")):
            pass  # which only the caller can tell
        elif name.endswith("prompt_tokens"):
            assert parse_reply(bad.content, "auto", protocol=protocol, sent=sent).miscounted
        else:
            known = None if name == "missing_prompt_ids" else sent
            with pytest.raises(Rejected) as raised:
                parse_reply(bad.content, "auto", protocol=protocol, sent=known)
            assert isinstance(raised.value, PromptDiffers) is (name == "other_prompt")
        good = parse_reply((await client.post(path, json=body)).content, "auto", protocol=protocol, sent=sent)
        assert (good.dialect, good.miscounted) == (dialect, None)
