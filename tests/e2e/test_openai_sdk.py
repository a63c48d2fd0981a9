"""The OpenAI SDK, unchanged but for its base URL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from integration.stand import WEATHER, Stand, Talk, held, user
from openai import APIStatusError, AsyncOpenAI, BadRequestError, ConflictError, NotFoundError, OpenAI


def sim(**wish: Any) -> dict[str, Any]:
    return {"sim": wish}


def test_the_async_client_streams(base_url: str, talk: Talk) -> None:
    async def converse() -> list[Any]:
        messages: list[Any] = []
        async with AsyncOpenAI(base_url=base_url, api_key="unused") as client:
            for text in ("One", "Two", "Three"):
                messages.append(user(text))
                stream = await client.chat.completions.create(
                    model="simulator", messages=messages, stream=True, stream_options={"include_usage": True}
                )
                content, usage = "", None
                async for chunk in stream:
                    usage = chunk.usage or usage
                    content += "".join(choice.delta.content or "" for choice in chunk.choices)
                assert usage is not None
                messages.append({"role": "assistant", "content": content})
        return messages

    messages = asyncio.run(converse())
    [row] = talk.rows()
    assert [message["content"] for message in row["messages"]] == [message["content"] for message in messages]
    assert (len(talk.committed()), "RolledBack" in talk.types()) == (3, False)


def test_streamed_tool_calls_go_round(base_url: str, talk: Talk) -> None:
    messages: list[Any] = [user("What is the weather?")]
    with OpenAI(base_url=base_url, api_key="unused") as client:
        for turn in range(3):
            with client.chat.completions.stream(
                model="simulator",
                messages=messages,
                tools=[WEATHER],  # type: ignore[list-item]
                extra_body=sim(tool_calls=turn < 2),
            ) as stream:
                message = stream.get_final_completion().choices[0].message
            messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": "Rain"} for call in message.tool_calls or ()
            ]
    assert (len(talk.committed()), "RolledBack" in talk.types(), len(talk.rows())) == (3, False, 1)


@pytest.mark.parametrize(("timeout", "latency"), [(0.6, 1.4), (0.6, 0.9)], ids=["joins", "replays"])
def test_its_own_timeout_and_retry_make_one_generation(
    base_url: str, talk: Talk, timeout: float, latency: float
) -> None:
    with OpenAI(base_url=base_url, api_key="unused", timeout=timeout, max_retries=8) as client:
        reply = client.chat.completions.create(
            model="simulator", messages=[{"role": "user", "content": "Slow"}], extra_body=sim(latency_s=latency)
        )
    [record] = talk.state()["records"]
    assert reply.choices[0].message.content == record["response"]["choices"][0]["message"]["content"]
    assert (talk.generations(), len(talk.committed())) == (1, 1)


def test_an_engines_hiccup_is_retried_by_the_sdk(base_url: str, talk: Talk, stand: Stand) -> None:
    stand.sim.post("/sim/faults", json={"fault": "status_500"})
    with OpenAI(base_url=base_url, api_key="unused") as client:
        client.chat.completions.create(model="simulator", messages=[{"role": "user", "content": "Hello"}])
    assert (talk.generations(), len(talk.committed())) == (2, 1)


def test_a_final_refusal_is_not_retried(base_url: str, talk: Talk, stand: Stand) -> None:
    with OpenAI(base_url=base_url, api_key="unused", max_retries=5) as client:
        with held(stand.sim):
            call = stand.meanwhile(talk.chat, [user("Slow")])
            stand.until_generating(talk)
            with pytest.raises(ConflictError) as busy:
                client.chat.completions.create(model="simulator", messages=[{"role": "user", "content": "Other"}])
        assert call.result().status_code == 200
        with pytest.raises(BadRequestError) as mismatch:
            client.chat.completions.create(
                model="simulator",
                messages=[user("Slow"), {"role": "assistant", "content": "no"}],  # type: ignore[list-item]
            )
        stand.http.delete(talk.path)
        with pytest.raises(NotFoundError) as closed:
            client.chat.completions.create(model="simulator", messages=[{"role": "user", "content": "Other"}])
    codes = [_code(error) for error in (busy.value, mismatch.value, closed.value)]
    assert codes == ["session_busy", "history_mismatch", "session_closed"]
    assert talk.generations() == 1


def _code(error: APIStatusError) -> str | None:
    return error.code
