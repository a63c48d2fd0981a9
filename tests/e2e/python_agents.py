"""Python packages as agent programs: ``python python_agents.py NAME TASK``; the environment names the server."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Mapping

RETRIES = 8
"""The packages' own two may be over before a killed server is back."""


def bash(command: str) -> str:
    """Run a command.

    Args:
        command: what to run
    """
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False).stdout


def claude_agent_sdk(task: str) -> None:
    """It starts the Claude Code that its wheel holds."""
    from claude_agent_sdk import ClaudeAgentOptions, query

    async def run() -> None:
        async for message in query(prompt=task, options=ClaudeAgentOptions(allowed_tools=["Bash", "Agent"])):
            print(message)

    asyncio.run(run())


def openai_agents(task: str, **by: bool) -> None:
    """With its default model, Responses: the whole history each time, or the id of the response before."""
    import agents
    from openai import AsyncOpenAI

    agents.set_default_openai_client(AsyncOpenAI(max_retries=RETRIES))
    agents.set_tracing_disabled(True)
    shell = agents.function_tool(bash)
    inner = agents.Agent(name="inner", model="simulator", tools=[shell])
    helper = inner.as_tool(tool_name="helper", tool_description="Somebody who looks.")
    agent = agents.Agent(name="outer", model="simulator", tools=[shell, helper])
    print(agents.Runner.run_sync(agent, task, **by).final_output)


def anthropic(task: str, *, stream: bool = False) -> None:
    """The package's own loop over tools."""
    from anthropic import Anthropic, beta_tool

    runner = Anthropic(max_retries=RETRIES).beta.messages.tool_runner(
        model="simulator",
        max_tokens=1000,
        tools=[beta_tool(bash)],
        messages=[{"role": "user", "content": task}],
        stream=stream,
    )
    for said in runner:
        print(said.get_final_message() if stream else said)


AGENTS: Mapping[str, Callable[[str], None]] = {
    "claude-agent-sdk": claude_agent_sdk,
    "openai-agents": openai_agents,
    "openai-agents, by id": lambda task: openai_agents(task, auto_previous_response_id=True),
    "anthropic": anthropic,
    "anthropic, streamed": lambda task: anthropic(task, stream=True),
}

if __name__ == "__main__":
    AGENTS[sys.argv[1]](sys.argv[2])
