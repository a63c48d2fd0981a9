"""`turnlog read`, `watch`, `open`, `create`, `reward`, `close`: before a real server and engine."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import termios
import uuid
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest

from integration.cli import answer, complaint, run, started
from integration.interrupting import latency
from integration.stand import HOURS, WEATHER, Stand, Talk, user

PATIENCE_S = 60
LONG = "\n".join(f"line {number}" for number in range(1, 31))


@pytest.fixture
def cli(stand: Stand, clean_environment: Callable[..., None]) -> Stand:
    clean_environment(URL=stand.server.base_url)
    return stand


def journey(stand: Stand) -> Talk:
    """A session that calls a tool, is refused a reply, goes back a turn, is rewarded and closed."""
    talk = stand.talk(group_id="read", attempt=3)
    talk.messages = [{"role": "system", "content": "Be brief."}]
    call = {"name": "look", "arguments": json.dumps({"command": "pytest -q", "why": "first\nthen"})}
    sim = {"text": "I look.", "reasoning": "Where is it?", "calls": [call]}
    reply = talk.say("What is in \x1b[31m\u202ethe file?", tools=[WEATHER], sim=sim).json()
    called = reply["choices"][0]["message"]["tool_calls"][0]["id"]
    assert stand.sim.post("/sim/faults", json={"fault": "not_json"}).status_code == 200
    result = {"role": "tool", "tool_call_id": called, "content": f"Error: none\n{LONG}"}
    assert talk.chat([*talk.messages, result]).status_code == 502
    before = list(talk.messages)
    talk.add(result, sim={"text": "Not this."})
    talk.messages = before
    other = {**result, "content": "red"}
    talk.add(other, sim={"text": "It is red.", "finish_reason": "length"})
    assert stand.http.put(f"{talk.path}/reward", json={"reward": -0.5}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    return talk


def test_a_conversation_is_read_as_it_happened(cli: Stand) -> None:
    talk = journey(cli)
    text = run("read", talk.id).stdout
    lines = [(line[:20].strip(), line[20:]) for line in text.splitlines()[1:]]
    told = [said for _, said in lines]
    assert text.startswith("created ")
    assert text.splitlines()[0].endswith("group_id=read attempt=3")
    assert [margin.split()[1] for margin, _ in lines if margin.startswith("turn")] == ["1", "3", "4"]
    in_order = [
        "Be brief.",
        "What is in \\x1b[31m\\u202ethe file?",
        "│ Where is it?",
        "I look.",
        "look: pytest -q, why first then",
        "turn 2 failed: upstream_invalid",
        "Error: none",
        "… 24 lines",
        "line 30",
        "Not this.",
        "rolled back to turn 1: discarded 3",
        "continues after turn 1",
        "It is red.",
        "[length]",
        "reward -0.5",
        "closed",
    ]
    rest = iter(told)
    assert [wanted for wanted in in_order if not any(said.startswith(wanted) for said in rest)] == []
    assert sum(margin.endswith(" tok") for margin, _ in lines) == 3


def test_agents_stand_under_the_call_that_began_them(cli: Stand) -> None:
    """An agent whose task a call has, one that has another text, a compaction; results name their calls."""
    talk = cli.talk(history="tree")
    tasks = [("task", {"prompt": "Read the tests.\nSay what fails."}), ("look", {"command": "ls"})]
    calls = [{"name": name, "arguments": json.dumps(given)} for name, given in tasks]
    reply = talk.say("Mend it.", tools=[WEATHER], sim={"text": "", "calls": calls}).json()
    given = [call["id"] for call in reply["choices"][0]["message"]["tool_calls"]]
    main = list(talk.messages)
    for number, text in enumerate(("Read the tests.\nSay what fails.", "Another text")):
        talk.messages = []
        explorer = {"x-turnlog-agent-id": f"explorer-{number}"}
        talk.say(text, headers=explorer, sim={"text": "I look."})
        talk.say("Go on.", headers=explorer, sim={"text": "parse fails."})
    talk.messages = main
    results = [{"role": "tool", "tool_call_id": one, "content": f"result {one}"} for one in given]
    talk.add(*reversed(results), sim={"text": "Mended."})
    talk.messages = [user("So far:"), talk.messages[-1]]
    talk.say("Go on.", sim={"text": "Done."})
    assert talk.annotate("quality", {"good": True}, turn=6, writer="anna").status_code == 200
    assert talk.annotate("note", "seen").status_code == 200
    talk.column(6, "advantage", [0.5] * talk.committed()[-2]["output_tokens"])
    assert cli.http.delete(f"{talk.path}/annotations/note").status_code == 204
    lines = run("read", talk.id).stdout.splitlines()
    assert [line for line in lines if "begins" in line or "continues" in line] == [
        f"{' ' * 24}explorer-0 begins, called by turn 1 (task), branch 1 (agent)",
        f"{' ' * 24}explorer-1 begins, called by turn 1 (look), branch 2 (agent)",
        f"{' ' * 20}continues after turn 1, branch 3 (drift)",
        f"{' ' * 20}continues from a compaction, with the reply of turn 6, branch 4 (compaction)",
    ]
    assert [line.find("turn") for line in lines if line.strip().startswith("turn") and "·" in line] == [
        0,
        *[4] * 4,
        0,
        0,
    ]
    told = [line[20:] for line in lines]
    at = told.index(f"result {given[1]}")
    assert told[at - 1 : at + 3] == ["look: ls", f"result {given[1]}", "task: Read the tests. …", f"result {given[0]}"]
    assert told[-4:] == [
        'turn 6: quality = {"good": true}, says anna',
        "note = seen",
        f"turn 6: advantage = {talk.committed()[-2]['output_tokens']} numbers",
        "note = removed",
    ]


def test_one_turn_whole_and_for_programs(cli: Stand) -> None:
    talk = journey(cli)
    whole = run("read", talk.id, "--turn", "3", "--tools").stdout
    assert all(f"line {number}\n" in whole for number in range(1, 31))
    assert "Be brief." not in whole
    assert "look:\n" + " " * 22 + "command: pytest -q\n" in run("read", talk.id, "--tools").stdout
    assert complaint("read", talk.id, "--turn", "9") == f"turnlog: session {talk.id} has no turn 9"
    assert "session_not_found" in complaint("read", "never-seen")
    documents = [json.loads(line) for line in run("read", talk.id, "--json").stdout.splitlines()]
    assert [one["type"] for one in documents if one["type"] == "TurnRejected"] == ["TurnRejected"]
    turns = [one for one in documents if one["type"] == "TurnCommitted"]
    assert [[message["message"]["role"] for message in one["messages"]] for one in turns] == [
        ["system", "user", "assistant"],
        ["tool", "assistant"],
        ["tool", "assistant"],
    ]


def test_a_session_is_created_rewarded_and_closed(cli: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    name = uuid.uuid4().hex
    fields = ("--group", "g", "--attempt", "0", "--metadata", '{"task": 7}', "--history", "tree", "--evaluation")
    created = answer("create", name, *fields, "--limits", '{"turns": 5}')
    assert created == answer("create", name, *fields, "--limits", '{"turns": 5}')
    given = cli.get(f"/sessions/{name}")["session"]
    chosen = {"group_id": "g", "attempt": 0, "metadata": {"task": 7}, "history": "tree", "evaluation": True}
    assert chosen.items() <= given.items()
    assert given["limits"]["turns"] == 5
    assert f"OPENAI_BASE_URL={created['url']}/v1" in run("create", name, *fields, "--limits", '{"turns": 5}').stdout
    assert "session_exists" in complaint("create", name)
    assert "--params is not a JSON object" in complaint("create", "--params", "1", code=2)
    assert "'odd' is not one of" in run("create", "--retain", "odd", code=2).stderr
    run("reward", name, "-1.5", "--component", "tests=-2", "--component", "style=0.5")
    assert "expected NAME=NUMBER" in complaint("reward", name, "1", "--component", "tests", code=2)
    assert run("annotate", name, "note", "seen").stderr.startswith("turnlog: note written in event ")
    assert run("close", name).stderr == f"turnlog: session {name} is closed\n"
    assert run("close", name).stderr == f"turnlog: session {name} is closed already\n"
    state = answer("show", name)
    assert (state["status"], state["note"]) == ("closed", "seen")
    assert (state["reward"]["reward"], state["reward"]["components"]) == (-1.5, {"tests": -2, "style": 0.5})
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    [address] = run("open", name).stdout.splitlines()
    assert [address] == opened == [f"{cli.server.base_url}/ui#/session/{name}"]
    assert answer("open", name) == {"url": address}
    assert opened == [address]


def test_sessions_in_flight_are_watched_on_a_terminal(cli: Stand, tmp_path: Path) -> None:
    talk = cli.talk()
    latency(cli, HOURS)
    turn = cli.meanwhile(talk.chat, [user("Think.")])
    cli.until_generating(talk)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 160, 0, 0))
    watching = started("watch", "--url", cli.server.base_url, folder=tmp_path, stdout=theirs)
    os.close(theirs)
    shown = b""
    while talk.id.encode() not in shown:
        shown += os.read(ours, 4096)
    assert b"running" in shown + os.read(ours, 4096)
    watching.send_signal(signal.SIGINT)
    _, complaints = watching.communicate(timeout=PATIENCE_S)
    os.close(ours)
    assert (watching.returncode, complaints) == (130, "")
    assert cli.http.delete(talk.path).status_code == 204
    assert turn.result().status_code == 404
