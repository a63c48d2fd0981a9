"""Programs that send several conversations to one session. They run the real packages; one that is not installed is
skipped. Where a program needs a certain reply, the engine is told to give it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from integration.stand import WEATHER, Message, user

from e2e.harnesses import installed

KEY = "unused"
CITIES = ("Oslo", "Bergen", "Tromsø")
OPENCODE_S = 120.0


@dataclass(frozen=True)
class Where:
    """`url` is a session's `/v1`, `headers_url` the server's; `plan(when, **sim)` has the engine answer so the next
    request whose last message holds `when`; `folder` is empty."""

    url: str
    headers_url: str
    plan: Callable[..., None]
    folder: Path


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def unrelated(where: Where) -> None:
    openai = installed("openai")
    with openai.OpenAI(base_url=where.url, api_key=KEY) as client:
        for number in range(5):
            with contextlib.suppress(openai.BadRequestError):
                client.chat.completions.create(model="simulator", messages=[user(f"Task {number}")])


def compaction(where: Where) -> None:
    """As Claude Code compacts: a sibling of turn 2 asks for the summary, and a new beginning carries turn 2's reply."""
    with httpx.Client(base_url=where.url) as client:

        def say(messages: list[Message], **sim: Any) -> Message:
            body = {"model": "simulator", "messages": messages, "tools": [WEATHER], "sim": {"tool_calls": False, **sim}}
            reply = client.post("/chat/completions", json=body).raise_for_status()
            message: Message = reply.json()["choices"][0]["message"]
            return message

        def result(message: Message) -> Message:
            return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "Rain"}

        task = user("What is the weather?")
        first = say([task], calls=[call("weather", city="Oslo")])
        history = [task, first, result(first)]
        second = say(history, calls=[call("weather", city="Bergen")])
        summary = say([*history, user("CRITICAL: Respond with TEXT ONLY. Summarise the conversation.")])
        again = user(f"This session is being continued from another conversation. {summary['content']}")
        history = [again, second, result(second)]
        say([*history, say(history), user("Go on")])


def opencode(where: Where) -> None:
    """The program itself: a title beside the first turn, a compaction, and a sub-agent before and after it."""
    run_opencode(where, where.url)


def opencode_by_header(where: Where) -> None:
    """The same without a path of its own: each of its sessions is named by a header."""
    run_opencode(where, where.headers_url)


def run_opencode(where: Where, url: str) -> None:
    if (program := shutil.which("opencode")) is None:
        pytest.skip("opencode is not installed")
    task = call("task", description="Look", prompt="Look for it", subagent_type="general")
    where.plan("Here is the conversation so far", text="It looks for a bug.")
    where.plan("Mend the bug", completion_tokens=3000, calls=[task])  # with the prompt enough for a compaction
    where.plan("Continue if you have next steps", calls=[task])
    for ends in ("Look for it", "<task_result>"):
        where.plan(ends, text="Found nothing.")
        where.plan(ends, text="Found nothing again.")
    limit = {"context": 12_000, "output": 4_096}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": KEY},
        "models": {"simulator": {"limit": limit}},
    }
    config = {
        "provider": {"turnlog": provider},
        "model": "turnlog/simulator",
        "small_model": "turnlog/simulator",
        "permission": {"*": "deny", "task": "allow"},
        "share": "disabled",
    }
    # It looks for a project from PWD upwards, and writes into the Git folder of the one that it finds.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "OPENCODE_", "GIT_"))
    } | {
        "HOME": str(where.folder),
        "PWD": str(where.folder),
        "OPENCODE_CONFIG_CONTENT": json.dumps(config),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }
    ran = subprocess.run(
        [program, "run", "--format", "json", "Mend the bug"],
        cwd=where.folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=OPENCODE_S,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert '"type":"error"' not in ran.stdout, ran.stdout[-2000:]


def crewai(where: Where) -> None:
    """Two tasks of a crew at once, and a third that is told their results."""
    package = installed("crewai")
    llm = package.LLM(model="openai/simulator", base_url=where.url, api_key=KEY)
    agents = [package.Agent(role=f"Guide of {city}", goal="Answer", backstory="Local", llm=llm) for city in CITIES]
    tasks = [
        package.Task(
            description=f"What is the weather in {city}?",
            expected_output="A sentence",
            agent=agent,
            async_execution=city != CITIES[-1],
        )
        for city, agent in zip(CITIES, agents, strict=True)
    ]
    package.Crew(agents=agents, tasks=tasks).kickoff()


def weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}"


def dspy(where: Where) -> None:
    """A tool loop that sends its steps inside one user message, three inputs at once; its model always answers with all
    fields that it asks for."""
    package = installed("dspy")
    fields = {
        "reasoning": "It is autumn",
        "next_thought": "I look",
        "next_tool_name": "weather",
        "next_tool_args": '{"city": "Oslo"}',
        "answer": "Rain",
    }
    text = "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in {**fields, "completed": ""}.items())
    options = {"cache": False, "num_retries": 0, "extra_body": {"sim": {"text": text}}}
    with package.context(lm=package.LM("openai/simulator", api_base=where.url, api_key=KEY, **options)):
        program = package.ReAct("question -> answer", tools=[weather], max_iters=2)
        inputs = [package.Example(question=f"How is {city}?").with_inputs("question") for city in CITIES]
        package.Parallel(num_threads=3, disable_progress_bar=True)([(program, one) for one in inputs])


def agents_of(where: Where, work: Callable[[Any, Any], Any]) -> None:
    """Run `work(agents, model)` with openai-agents over chat completions."""
    agents, openai = installed("agents"), installed("openai")
    agents.set_tracing_disabled(True)

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=where.url, api_key=KEY) as client:
            await work(agents, agents.OpenAIChatCompletionsModel(model="simulator", openai_client=client))

    asyncio.run(run())


def as_tool(where: Where) -> None:
    """An agent that is another one's tool has a conversation of its own."""

    async def work(agents: Any, model: Any) -> None:
        inner = agents.Agent(name="translator", instructions="Translate.", model=model)
        tool = inner.as_tool(tool_name="translate", tool_description="Translates")
        outer = agents.Agent(name="editor", instructions="Be brief.", model=model, tools=[tool])
        await agents.Runner.run(outer, "Say it in Norwegian", max_turns=20)

    agents_of(where, work)


def tools_at_once(where: Where) -> None:
    """Two calls of that tool in one reply run at once."""
    where.plan("Say it", calls=[call("translate", input="Good day"), call("translate", input="Good night")])
    as_tool(where)


def handoff(where: Where) -> None:
    """The agent that takes over has the same history under another system message."""

    async def work(agents: Any, model: Any) -> None:
        expert = agents.Agent(name="translator", instructions="Translate.", model=model)
        desk = agents.Agent(name="desk", instructions="Pass it on.", model=model, handoffs=[expert])
        where.plan("Say it", calls=[call("transfer_to_translator")])
        result = await agents.Runner.run(desk, "Say it in Norwegian")
        await agents.Runner.run(result.last_agent, [*result.to_input_list(), user("And in Danish")])

    agents_of(where, work)


def chat_model(where: Where) -> Any:
    return installed("langchain_openai").ChatOpenAI(base_url=where.url, api_key=KEY, model="simulator")


def summarisation(where: Where) -> None:
    """A chat that keeps its last two messages and a summary of the others, which a node of its graph asks for."""
    graphs, core = installed("langgraph.graph"), installed("langchain_core.messages")
    model = chat_model(where)

    def answer(state: Any) -> Mapping[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def summarise(state: Any) -> Mapping[str, Any]:
        *old, question, reply = state["messages"]
        summary = model.invoke([*old, question, reply, core.HumanMessage("Summarise the conversation")])
        short = [core.SystemMessage(f"Summary: {summary.content}", id=old[0].id)]
        return {"messages": [*short, *(core.RemoveMessage(id=one.id) for one in old[1:])]}

    def long(state: Any) -> str:
        return "summarise" if len(state["messages"]) > 4 else graphs.END

    graph = graphs.StateGraph(graphs.MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("summarise", summarise)
    graph.add_edge(graphs.START, "answer")
    graph.add_conditional_edges("answer", long, ["summarise", graphs.END])
    chat = graph.compile(checkpointer=installed("langgraph.checkpoint.memory").InMemorySaver())
    for city in (*CITIES, "Narvik", "Bodø"):
        thread = {"configurable": {"thread_id": "1"}}
        chat.invoke({"messages": [core.HumanMessage(f"What is the weather in {city}?")]}, thread)


AT_ONCE = (unrelated, compaction, crewai, dspy, tools_at_once, handoff, summarisation, opencode)


def all_at_once(where: Where) -> None:
    """Many of the programs at once, without those that are not installed."""

    def run(program: Callable[[Where], None]) -> None:
        folder = where.folder / program.__name__
        folder.mkdir()
        with contextlib.suppress(pytest.skip.Exception):
            program(replace(where, folder=folder))

    with ThreadPoolExecutor(len(AT_ONCE)) as pool:
        list(pool.map(run, AT_ONCE))
