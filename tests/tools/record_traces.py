"""`PATH=.programs/node_modules/.bin:$PATH python -m tests.tools.record_traces NAME...`: records the traces in
`ops/bench/peers/traces` anew.

A program works on a small task with its real shell, behind Turnlog and the simulator, which says what the task needs. A
trace is what the engine was sent, as chat: Claude Code's Messages and Codex' Responses as Turnlog renders them. Of the
texts that come with the program, prompts and descriptions of tools, only the lengths are kept. `--python` is the
interpreter that has the package of a Python program.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from ops.bench.peers.traces import FOLDER, WORDS
from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from tests.e2e.programs import PROGRAMS, RUN_S, Call, Place, Program, call

WORK = Path("/tmp/cart")
"""The working folder, whose name is in what a program sends."""

TASK = "The test of cart.py fails. Find out why, mend it, and show that the test passes."
FILES = {
    "cart.py": '''\
"""Prices of a shopping cart, in cents."""

RATES = {"books": 7, "food": 7, "tools": 19, "toys": 19}


def net(items):
    return sum(price * count for _, price, count in items)


def tax(items):
    """Each item's tax is rounded to whole cents."""
    return sum(price * count * RATES[kind] // 100 for kind, price, count in items)


def total(items, discount=0):
    """`discount` is in percent of the net price, before tax."""
    reduced = [(kind, price * (100 - discount), count) for kind, price, count in items]
    return net(reduced) + tax(reduced)
''',
    "test_cart.py": """\
from cart import net, tax, total

ITEMS = [("books", 1250, 2), ("food", 399, 5), ("toys", 2499, 1), ("tools", 899, 3)]

assert net(ITEMS) == 9691, net(ITEMS)
assert tax(ITEMS) == 1300, tax(ITEMS)
assert total(ITEMS) == 10991, total(ITEMS)
assert total(ITEMS, discount=10) == 9886, total(ITEMS, discount=10)
print("all hold")
""",
    "NOTES.md": "".join(
        f"- Release {number}: prices of supplier {number % 7} in cents, rate {number * 13 % 19} checked by hand.\n"
        for number in range(60)
    ),
}
STEPS: Sequence[tuple[str, str]] = (
    ("I begin with what is here, before I change anything.", "ls"),
    ("The module under test comes first; its functions are few.", "cat cart.py"),
    ("Now what the test wants of it.", "cat test_cart.py"),
    ("I run the test, to see which of its lines does not hold.", "python3 test_cart.py"),
    ("Perhaps the notes say how a discount was meant.", "cat NOTES.md"),
    ("Where else is the total used?", "grep -n total *.py"),
    (
        "A price of 100 becomes 9000 with a discount of 10: the percentage is never divided by 100. I divide it.",
        "sed -i 's|price \\* (100 - discount)|price * (100 - discount) // 100|' cart.py; grep -n reduced cart.py",
    ),
    ("Once more the test.", "python3 test_cart.py"),
    (
        "It is not quite there: one value is off. I look at each part alone.",
        "python3 -c 'import cart; print(cart.RATES)'",
    ),
    ("I look at the whole file as it is now.", "cat cart.py"),
)
LAST = "The discount was never divided by 100. It is now, the rest of the module is as it was."

MINI = """
import sys
import yaml
from minisweagent.agents.default import DefaultAgent
from minisweagent.config import get_config_path
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
config = yaml.safe_load(get_config_path("mini").read_text())
agent = {name: config["agent"][name] for name in ("system_template", "instance_template")}
model = LitellmModel(**{**config["model"], "model_name": "openai/simulator", "cost_tracking": "ignore_errors"})
DefaultAgent(model, LocalEnvironment(), **agent, step_limit=12).run(sys.argv[1])
"""


def python_program(python: str, *arguments: str) -> Program:
    """A Python program whose tool for commands is `bash`."""

    def start(place: Place, task: str, more: Mapping[str, str]) -> subprocess.Popen[str]:
        environment = {"OPENAI_BASE_URL": f"{place.base_url}/v1", "OPENAI_API_KEY": place.token}
        quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
        return place.run(python, (*arguments, task), {**environment, **quiet})

    return Program(start, lambda command: call("bash", command=command))


def programs(python: str) -> Mapping[str, Program]:
    script = Path(__file__).parents[1] / "e2e" / "python_agents.py"
    return {
        "claude-code": PROGRAMS["Claude Code"],
        "codex": PROGRAMS["Codex"],
        "opencode": PROGRAMS["OpenCode, Responses"],
        "openai-agents": python_program(python, str(script), "openai-agents"),
        "mini-swe-agent": python_program(python, "-c", MINI),
    }


def record(program: Program) -> list[dict[str, Any]]:
    """The engine's requests and replies of one run, in order."""
    shutil.rmtree(WORK, ignore_errors=True)
    WORK.mkdir()
    for name, text in FILES.items():
        (WORK / name).write_text(text)
    with tempfile.TemporaryDirectory() as folder, SimulatorProcess("--reasoning", "0") as engine:
        for number, (text, command) in enumerate(STEPS):
            # The result of each command ends with the number of the next step, which the call does not spell out.
            before = f"step {100 + number}" if number else TASK[:30]
            shell = program.shell(f"{command}; echo step $(({number} + 101))")
            plan(engine.base_url, before, text, [shell])
        plan(engine.base_url, f"step {100 + len(STEPS)}", LAST, [])
        with ServerProcess(Path(folder), upstreams=[engine.base_url]).migrate() as server:
            session = httpx.post(f"{server.base_url}/sessions", json={"history": "tree"}).json()["session_id"]
            process = program.start(Place(f"{server.base_url}/sessions/{session}", WORK), TASK, {})
            output, _ = process.communicate(timeout=RUN_S)
            records: list[dict[str, Any]] = httpx.get(f"{server.base_url}/sessions/{session}").json()["records"]
    print(f"{len(records)} turns, status {process.returncode}", output[-500:] if len(records) < len(STEPS) else "")
    return records


def plan(engine: str, when: str, text: str, calls: Sequence[Call]) -> None:
    sim: dict[str, Any] = {"text": text, "reasoning": False}
    sim |= {"calls": calls} if calls else {"tool_calls": False}
    httpx.post(f"{engine}/sim/replies", json={"when": when, "sim": sim, "count": 9}).raise_for_status()


def trace(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The tools; of each turn what is new in its request, and the reply."""
    turns: list[dict[str, Any]] = []
    known: list[Any] = []
    for turn in records:
        messages, reply = turn["request"]["messages"], turn["response"]["choices"][0]["message"]
        new = [stripped(message) for message in messages[len(known) :]]
        known = [*messages, reply]
        said = {name: reply[name] for name in ("content", "tool_calls") if reply.get(name)}
        turns.append({"messages": new, "reply": said})
    tools = [words_only(tool) for tool in records[0]["request"].get("tools", [])]
    return numbered({"tools": tools, "turns": turns})


def stripped(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without the program's own texts."""
    if message["role"] == "tool":
        return {name: message[name] for name in ("role", "tool_call_id", "content")}
    content = message["content"]
    parts = [content] if isinstance(content, str) else [part["text"] for part in content]
    text = "".join(parts)
    before, task, after = text.partition(TASK)
    return {"role": message["role"], "content": [{WORDS: len(before)}, task, {WORDS: len(after)}]}


def words_only(value: Any, name: str = "") -> Any:
    """A tool with the lengths of its descriptions."""
    if isinstance(value, dict):
        return {key: words_only(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [words_only(item) for item in value]
    return {WORDS: len(value)} if name == "description" and isinstance(value, str) else value


def numbered(value: dict[str, Any]) -> dict[str, Any]:
    """With calls named by their order, in place of random ids."""
    text = json.dumps(value)
    calls = [made["id"] for turn in value["turns"] for made in turn["reply"].get("tool_calls", ())]
    for number, random in enumerate(calls):
        text = text.replace(random, f"call_{number}")
    renamed: dict[str, Any] = json.loads(text)
    return renamed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.record_traces", description=__doc__)
    parser.add_argument("--python", default="python3")
    parser.add_argument("names", nargs="+", choices=programs(""))
    given = parser.parse_args()
    for name in given.names:
        made = trace(record(programs(given.python)[name]))
        (FOLDER / f"{name}.json").write_text(json.dumps(made, ensure_ascii=False, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
