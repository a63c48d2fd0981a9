"""`python -m ops.bench.harnesses NAME URL`: an agent as its harness makes one, that talks until its input ends.

Every client is as it comes: no retry is added and no error handled. Each answer is a line on standard output. What
ends it otherwise is the harness's own error.
"""

from __future__ import annotations

import asyncio
import itertools
import select
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

TURNS = 3
"""Of a conversation; each has a session of its own, made by its first turn."""

MODEL = "simulator"


def question(turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Question {turn}"}


async def _openai(url: str, session: dict[str, str]) -> AsyncIterator[None]:
    import openai

    with openai.OpenAI(base_url=url, api_key="unused", default_headers=session) as client:
        messages: list[Any] = []
        for turn in range(TURNS):
            messages.append(question(turn))
            reply = client.chat.completions.create(model=MODEL, messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            yield


async def _openai_agents(url: str, session: dict[str, str]) -> AsyncIterator[None]:
    import agents
    import openai

    agents.set_tracing_disabled(True)
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", default_headers=session) as client:
        model = agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client)
        agent = agents.Agent(name="agent", instructions="Be brief.", model=model)
        items: list[Any] = []
        for turn in range(TURNS):
            items = (await agents.Runner.run(agent, [*items, question(turn)])).to_input_list()
            yield


async def _pydantic_ai(url: str, session: dict[str, str]) -> AsyncIterator[None]:
    import openai
    import pydantic_ai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async with openai.AsyncOpenAI(base_url=url, api_key="unused", default_headers=session) as client:
        model = OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=client))
        agent = pydantic_ai.Agent(model, instructions="Be brief.")
        history: list[Any] = []
        for turn in range(TURNS):
            history = (await agent.run(f"Question {turn}", message_history=history)).all_messages()
            yield


async def _langgraph(url: str, session: dict[str, str]) -> AsyncIterator[None]:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    model = ChatOpenAI(base_url=url, api_key="unused", model=MODEL, default_headers=session)

    async def answer(state: Any) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph: Any = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", END)
    compiled = graph.compile()
    state: Any = {"messages": []}
    for turn in range(TURNS):
        state = await compiled.ainvoke({"messages": [*state["messages"], ("user", f"Question {turn}")]})
        yield


Conversation = Callable[[str, dict[str, str]], AsyncIterator[None]]

HARNESSES: dict[str, tuple[str, Conversation]] = {
    "openai": ("openai", _openai),
    "openai-agents": ("agents", _openai_agents),
    "pydantic-ai": ("pydantic_ai", _pydantic_ai),
    "langgraph": ("langgraph.graph", _langgraph),
}
"""By name: the module that must be installed, and a conversation."""


@asynccontextmanager
async def _closed(turns: AsyncIterator[None]) -> AsyncIterator[AsyncIterator[None]]:
    try:
        yield turns
    finally:
        await turns.aclose()  # type: ignore[attr-defined]


async def talk(name: str, url: str) -> None:
    converse = HARNESSES[name][1]
    for number in itertools.count():
        session = {"x-session-id": f"{name}-{uuid.uuid4().hex[:8]}-{number}"}
        async with _closed(converse(f"{url}/v1", session)) as turns:
            async for _ in turns:
                print("answered", flush=True)
                if select.select([sys.stdin], [], [], 0)[0]:
                    return


if __name__ == "__main__":
    asyncio.run(talk(*sys.argv[1:]))
