"""Agent programs as they are, told only where their server is: how each is started, and what its engine is to say."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

RUN_S = 120

Call = dict[str, str]


def call(name: str, **arguments: Any) -> Call:
    return {"name": name, "arguments": json.dumps(arguments)}


@dataclass(frozen=True)
class Place:
    """`base_url` is a session's, without `/v1`; `folder` is the program's own home and working folder."""

    base_url: str
    folder: Path
    token: str = "unused"

    def run(self, program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program in an environment of its own."""
        path = shutil.which(program)
        if path is None:
            pytest.skip(f"{program} is not installed")
        own = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "PWD": str(self.folder), **environment}
        return subprocess.Popen(
            [path, *arguments],
            cwd=self.folder,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


Start = Callable[[Place, str, Mapping[str, str]], subprocess.Popen[str]]


@dataclass(frozen=True)
class Program:
    """`start(place, task, more)` runs it on a task, `more` is in its environment, or in Codex' settings. `goes_on` does
    so with the conversation that it had in that place before. `shell(command)` is its tool call for a command,
    `agent(task)` that for a sub-agent, whose branch has the cause `agent_cause`. `causes` are those of its branches
    beside any task, `session` is what its session is created with."""

    start: Start
    shell: Callable[[str], Call]
    agent: Callable[[str], Call] | None = None
    agent_cause: str = "agent"
    causes: Sequence[str] = ()
    session: Mapping[str, str] = field(default_factory=dict)
    goes_on: Start | None = None


def _anthropic(place: Place) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": place.base_url,
        "ANTHROPIC_AUTH_TOKEN": place.token,
        "ANTHROPIC_MODEL": "simulator",
    }


def _openai(place: Place) -> Mapping[str, str]:
    return {"OPENAI_BASE_URL": f"{place.base_url}/v1", "OPENAI_API_KEY": place.token}


def _claude(place: Place, task: str, more: Mapping[str, str], *flags: str) -> subprocess.Popen[str]:
    arguments = (*flags, "-p", task, "--output-format", "stream-json", "--verbose", "--allowedTools", "Bash Task Agent")
    return place.run("claude", arguments, {**_anthropic(place), **more})


def _codex(place: Place, task: str, more: Mapping[str, str], *command: str) -> subprocess.Popen[str]:
    provider = {"name": "x", "base_url": f"{place.base_url}/v1", "wire_api": "responses", "env_key": "CODEX_API_KEY"}
    settings = {"model_provider": "x", **{f"model_providers.x.{name}": value for name, value in provider.items()}}
    return _codex_with(settings, place, task, more, *command)


def _codex_builtin(place: Place, task: str, more: Mapping[str, str], *command: str) -> subprocess.Popen[str]:
    """With nothing but a base URL: it tries a WebSocket first, and has the server compact its history."""
    return _codex_with({"openai_base_url": f"{place.base_url}/v1"}, place, task, more, *command)


def _codex_with(
    given: Mapping[str, str], place: Place, task: str, more: Mapping[str, str], *command: str
) -> subprocess.Popen[str]:
    settings = {name: json.dumps(value) for name, value in given.items()} | {**more}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "simulator")
    return place.run("codex", ("exec", *command, *flags, *options, task), {"CODEX_API_KEY": place.token})


def _qwen(place: Place, task: str, more: Mapping[str, str]) -> subprocess.Popen[str]:
    environment = {**_openai(place), "OPENAI_MODEL": "simulator", **more}
    return place.run("qwen", ("--auth-type", "openai", "--yolo", task), environment)


def _python(name: str, module: str) -> Start:
    """One of `python_agents`."""

    def start(place: Place, task: str, more: Mapping[str, str]) -> subprocess.Popen[str]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
        environment = {**_anthropic(place), **_openai(place), **more}
        return place.run(sys.executable, (str(Path(__file__).with_name("python_agents.py")), name, task), environment)

    return start


def _opencode(package: str) -> Start:
    def start(place: Place, task: str, more: Mapping[str, str]) -> subprocess.Popen[str]:
        options = {"baseURL": f"{place.base_url}/v1", "apiKey": place.token}
        provider = {"npm": package, "options": options, "models": {"simulator": {}}}
        config = {"provider": {"turnlog": provider}, "model": "turnlog/simulator"}
        environment = {"OPENCODE_CONFIG_CONTENT": json.dumps(config), **more}
        return place.run("opencode", ("run", "--format", "json", task), environment)

    return start


def _described(name: str) -> Callable[[str], Call]:
    return lambda command: call(name, command=command, description="Run it")


def _general(name: str) -> Callable[[str], Call]:
    return lambda task: call(name, description="Look", prompt=task, subagent_type="general-purpose")


def _bash(command: str) -> Call:
    return call("bash", command=command)


def _helper(task: str) -> Call:
    return call("helper", input=task)


# Beside their first turns Claude Code and OpenCode ask for a title.
PROGRAMS: Mapping[str, Program] = {
    "Claude Code": Program(
        _claude,
        _described("Bash"),
        _general("Agent"),
        causes=["root"],
        goes_on=lambda place, task, more: _claude(place, task, more, "--continue"),
    ),
    "claude-agent-sdk": Program(_python("claude-agent-sdk", "claude_agent_sdk"), _described("Bash"), _general("Agent")),
    "Codex": Program(
        _codex,
        lambda command: call("exec_command", cmd=command),
        lambda task: call("multi_agent_v1__spawn_agent", message=task),
        goes_on=lambda place, task, more: _codex(place, task, more, "resume", "--last"),
    ),
    "Codex, built in": Program(
        _codex_builtin,
        lambda command: call("exec_command", cmd=command),
        lambda task: call("multi_agent_v1__spawn_agent", message=task),
        goes_on=lambda place, task, more: _codex_builtin(place, task, more, "resume", "--last"),
    ),
    "OpenCode, Messages": Program(_opencode("@ai-sdk/anthropic"), _described("bash"), causes=["root"]),
    "OpenCode, Responses": Program(_opencode("@ai-sdk/openai"), _described("bash"), causes=["root"]),
    # It may ask once more what of the task is worth remembering.
    "Qwen Code, chat": Program(
        _qwen,
        _described("run_shell_command"),
        _general("agent"),
        "root",
        ["compaction"],
        {"history": "tree"},
    ),
    "anthropic": Program(_python("anthropic", "anthropic"), _bash),
    "anthropic, streamed": Program(_python("anthropic, streamed", "anthropic"), _bash),
    # What its agents call is a conversation of its own, without an id.
    "openai-agents": Program(_python("openai-agents", "agents"), _bash, _helper, "root"),
    "openai-agents, by id": Program(_python("openai-agents, by id", "agents"), _bash, _helper, "root"),
}
