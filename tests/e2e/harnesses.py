"""Agent harnesses as they are, told only where their session is: three tasks with one tool."""

from __future__ import annotations

import asyncio
import importlib
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from integration.stand import WEATHER, user

KEY = "unused"
TASKS = ("What is the weather in Oslo?", "And in Bergen?", "And in Tromsø?")


def weather(city: str, days: int = 1) -> str:
    """The weather of a city.

    Args:
        city: its name
        days: how many
    """
    return f"Rain in {city} for {days} days"


def installed(name: str) -> ModuleType:
    """The harness's module; where it is not installed, the test is skipped."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        pytest.skip(f"{name} is not installed")


@dataclass(frozen=True)
class Harness:
    """`run(base_url)` does the tasks, where `base_url` is a session's, with `/v1`.

    `tool` and `arguments` are a good call of its own tool, `ends` is how the engine answers what it is not told to
    answer in another way.
    """

    run: Callable[[str], None]
    tool: str = "weather"
    arguments: Mapping[str, Any] = field(default_factory=lambda: {"city": "Oslo"})
    ends: Mapping[str, Any] = field(default_factory=lambda: {"tool_calls": False})


def loop(complete: Callable[[list[Any]], Any]) -> None:
    """The plain tool loop of a client without an agent of its own."""
    messages: list[Any] = []
    for task in TASKS:
        messages.append(user(task))
        while True:
            message = complete(messages).choices[0].message
            messages.append(message)
            if not message.tool_calls:
                break
            messages += [{"role": "tool", "tool_call_id": call.id, "content": "Rain"} for call in message.tool_calls]


def openai(base_url: str) -> None:
    with installed("openai").OpenAI(base_url=base_url, api_key=KEY) as client:
        loop(
            lambda messages: client.chat.completions.create(model="simulator", messages=messages, tools=[WEATHER]),
        )


def litellm(base_url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else its import asks the internet for prices
    package = installed("litellm")
    options = {"model": "openai/simulator", "api_base": base_url, "api_key": KEY, "tools": [WEATHER]}
    loop(lambda messages: package.completion(messages=messages, **options))


def anthropic(base_url: str) -> None:
    package = installed("anthropic")
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    messages: list[Any] = []
    with package.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=KEY) as client:
        for task in TASKS:
            messages.append(user(task))
            while True:
                reply = client.messages.create(model="simulator", max_tokens=1000, messages=messages, tools=[tool])
                messages.append({"role": "assistant", "content": reply.content})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "Rain"}
                    for block in reply.content
                    if block.type == "tool_use"
                ]
                if not results:
                    break
                messages.append({"role": "user", "content": results})


def openai_agents(base_url: str, model: str = "OpenAIChatCompletionsModel") -> None:
    agents, client_of = installed("agents"), installed("openai").AsyncOpenAI
    agents.set_tracing_disabled(True)

    async def work() -> None:
        async with client_of(base_url=base_url, api_key=KEY) as client:
            agent = agents.Agent(
                name="agent",
                instructions="Be brief.",
                model=getattr(agents, model)(model="simulator", openai_client=client),
                tools=[agents.function_tool(weather)],
            )
            items: list[Any] = []
            for task in TASKS:
                result = await agents.Runner.run(agent, [*items, user(task)], max_turns=20)
                items = result.to_input_list()

    asyncio.run(work())


def langchain(base_url: str, **options: Any) -> None:
    chat, core = installed("langchain_openai").ChatOpenAI, installed("langchain_core.messages")
    model = chat(base_url=base_url, api_key=KEY, model="simulator", **options).bind_tools([weather])
    messages: list[Any] = []
    for task in TASKS:
        messages.append(core.HumanMessage(task))
        while (reply := model.invoke(messages)).tool_calls:
            messages.append(reply)
            messages += [core.ToolMessage("Rain", tool_call_id=call["id"]) for call in reply.tool_calls]
        messages.append(reply)


def langgraph(base_url: str) -> None:
    chat = installed("langchain_openai").ChatOpenAI(base_url=base_url, api_key=KEY, model="simulator")
    agent = installed("langgraph.prebuilt").create_react_agent(chat, [weather])
    messages: list[Any] = []
    for task in TASKS:
        messages = agent.invoke({"messages": [*messages, ("user", task)]})["messages"]


def pydantic_ai(base_url: str) -> None:
    package = installed("pydantic_ai")
    models, providers = installed("pydantic_ai.models.openai"), installed("pydantic_ai.providers.openai")

    async def work() -> None:
        async with installed("openai").AsyncOpenAI(base_url=base_url, api_key=KEY) as client:
            model = models.OpenAIChatModel("simulator", provider=providers.OpenAIProvider(openai_client=client))
            agent = package.Agent(model, tools=[package.Tool(weather)], instructions="Be brief.", retries=3)
            history: list[Any] = []
            for task in TASKS:
                history = (await agent.run(task, message_history=history)).all_messages()

    asyncio.run(work())


def inspect_ai(base_url: str) -> None:
    models, tools = installed("inspect_ai.model"), installed("inspect_ai.tool")

    async def look(city: str, days: int = 1) -> str:
        return weather(city, days)

    async def work() -> None:
        config = models.GenerateConfig(max_retries=0)
        name = "openai-api/turnlog/simulator"
        described = {"city": "its name", "days": "how many"}
        tool = tools.ToolDef(look, name="weather", description="The weather", parameters=described).as_tool()
        messages: list[Any] = []
        async with models.get_model(name, base_url=base_url, api_key=KEY, config=config, memoize=False) as model:
            for task in TASKS:
                messages.append(models.ChatMessageUser(content=task))
                while (output := await model.generate(messages, tools=[tool])).message.tool_calls:
                    messages.append(output.message)
                    messages += (await models.execute_tools(messages, [tool])).messages
                messages.append(output.message)

    asyncio.run(work())


def smolagents(base_url: str) -> None:
    package = installed("smolagents")
    model = package.OpenAIServerModel("simulator", api_base=base_url, api_key=KEY)
    agent = package.ToolCallingAgent(tools=[package.tool(weather)], model=model, max_steps=3, verbosity_level=0)
    for task in TASKS:
        agent.run(task, reset=False)


def mini_swe_agent(base_url: str) -> None:
    """One task of several steps: each of its runs begins a conversation."""
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
    os.environ |= {**quiet, "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
    agents, models = installed("minisweagent.agents.default"), installed("minisweagent.models.litellm_model")
    environments = installed("minisweagent.environments.local")
    with tempfile.TemporaryDirectory() as folder:
        model = models.LitellmModel(
            model_name="openai/simulator",
            model_kwargs={"api_base": base_url, "api_key": KEY},
            cost_tracking="ignore_errors",
            format_error_template="Call the tool. {{ error }}",
        )
        place = environments.LocalEnvironment(cwd=str(Path(folder)))
        texts = {"system_template": "Be brief.", "instance_template": "{{ task }}"}
        agents.DefaultAgent(model, place, **texts, step_limit=5).run(TASKS[0])


HARNESSES: Mapping[str, Harness] = {
    "openai": Harness(openai),
    "litellm": Harness(litellm),
    "anthropic": Harness(anthropic),
    "openai-agents": Harness(openai_agents),
    "openai-agents, Responses": Harness(lambda base_url: openai_agents(base_url, "OpenAIResponsesModel")),
    "langchain-openai": Harness(langchain),
    "langchain-openai, Responses": Harness(lambda base_url: langchain(base_url, use_responses_api=True)),
    "langgraph": Harness(langgraph),
    "pydantic-ai": Harness(pydantic_ai),
    "inspect-ai": Harness(inspect_ai),
    "smolagents": Harness(
        smolagents,
        ends={"calls": [{"name": "final_answer", "arguments": {"answer": "Rain"}}]},
    ),
    "mini-swe-agent": Harness(
        mini_swe_agent,
        tool="bash",
        arguments={"command": "echo Rain"},
        ends={"calls": [{"name": "bash", "arguments": {"command": "echo Rain"}}]},
    ),
}
