"""Real agent harnesses, each with its own way of sending a history back: no turn is taken for a divergence."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from integration.stand import WEATHER, Talk, user

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

TASKS = ("What is the weather in Oslo?", "And in Bergen?", "And in Tromsø?")


def weather(city: str, days: int = 1) -> str:
    """The weather of a city."""
    return f"Rain in {city} for {days} days"


def installed(name: str) -> ModuleType:
    """The harness's module; where it is not installed, the test is skipped."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        pytest.skip(f"{name} is not installed")


def test_openai(base_url: str, talk: Talk) -> None:
    openai = installed("openai")
    with openai.OpenAI(base_url=base_url, api_key="unused") as client:

        def complete(messages: list[Any]) -> Any:
            return client.chat.completions.create(model="simulator", messages=messages, tools=[WEATHER])

        loop(complete, lambda message: message)
    check(talk)


def test_litellm(base_url: str, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the internet for prices
    litellm = installed("litellm")

    def complete(messages: list[Any]) -> Any:
        return litellm.completion(
            model="openai/simulator", api_base=base_url, api_key="unused", messages=messages, tools=[WEATHER]
        )

    loop(complete, lambda message: message)
    check(talk)


def test_openai_agents(base_url: str, talk: Talk) -> None:
    agents = installed("agents")
    openai = installed("openai")
    agents.set_tracing_disabled(True)

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused") as client:
            model = agents.OpenAIChatCompletionsModel(model="simulator", openai_client=client)
            agent = agents.Agent(
                name="agent", instructions="Be brief.", model=model, tools=[agents.function_tool(weather)]
            )
            items: list[Any] = []
            for task in TASKS:
                result = await agents.Runner.run(agent, [*items, user(task)], max_turns=20)
                items = result.to_input_list()

    asyncio.run(work())
    check(talk)


def test_langchain_openai(base_url: str, talk: Talk) -> None:
    langchain = installed("langchain_openai")
    core = installed("langchain_core.messages")
    model = langchain.ChatOpenAI(base_url=base_url, api_key="unused", model="simulator").bind_tools([weather])
    messages: list[Any] = []
    for task in TASKS:
        messages.append(core.HumanMessage(task))
        while (reply := model.invoke(messages)).tool_calls:
            messages.append(reply)
            messages += [core.ToolMessage(weather(**c["args"]), tool_call_id=c["id"]) for c in reply.tool_calls]
        messages.append(reply)
    check(talk)


def test_pydantic_ai(base_url: str, talk: Talk) -> None:
    pydantic_ai = installed("pydantic_ai")
    models = installed("pydantic_ai.models.openai")
    providers = installed("pydantic_ai.providers.openai")
    openai = installed("openai")

    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="unused") as client:
            model = models.OpenAIChatModel("simulator", provider=providers.OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(model, tools=[pydantic_ai.Tool(weather)], instructions="Be brief.")
            history: list[Any] = []
            for task in TASKS:
                history = (await agent.run(task, message_history=history)).all_messages()

    asyncio.run(work())
    check(talk)


def loop(complete: Callable[[list[Any]], Any], keep: Callable[[Any], Any]) -> None:
    """The plain tool loop of a client without an agent of its own."""
    messages: list[Any] = []
    for task in TASKS:
        messages.append(user(task))
        while True:
            message = complete(messages).choices[0].message
            messages.append(keep(message))
            if not message.tool_calls:
                break
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rain"} for call in message.tool_calls]


def check(talk: Talk) -> None:
    """Several turns with tool calls, all on one live path and in one segment."""
    committed = talk.committed()
    assert len(committed) > len(TASKS)
    assert set(talk.types()) == {"SessionCreated", "TurnOpened", "AffinityBound", "TurnCommitted"}
    [row] = talk.rows()
    assert [span["turn"] for span in row["turns"]] == list(range(1, len(committed) + 1))
    assert [span["finish_reason"] for span in row["turns"]].count("tool_calls") >= len(TASKS)
    assert sum(message["role"] == "tool" for message in row["messages"]) >= len(TASKS)
