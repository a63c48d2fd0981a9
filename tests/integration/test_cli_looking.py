"""`turnlog sessions`, `show`, `tail`, `groups`, `engines`, `pause`, `resume`: before a real server and engine."""

from __future__ import annotations

import io
import json
import re
import sys
import uuid
from collections.abc import Callable

import pytest

from integration.cli import answer, complaint, run
from integration.stand import WEATHER, Stand, user
from turnlog.cli import main


@pytest.fixture
def cli(stand: Stand, clean_environment: Callable[..., None]) -> Stand:
    """The stand whose server the command line finds in the environment."""
    clean_environment(URL=stand.server.base_url)
    return stand


def test_sessions_are_listed_filtered_and_paged(cli: Stand) -> None:
    group = uuid.uuid4().hex
    talks = [cli.talk(group_id=group) for _ in range(5)]
    for number, talk in enumerate(talks):
        cli.http.put(f"{talk.path}/reward", json={"reward": float(number)})
    newest_first = [talk.id for talk in reversed(talks)]
    found = answer("sessions", "--group", group)
    assert [row["session_id"] for row in found["sessions"]] == newest_first
    assert (found["total"], found["next_cursor"]) == (5, None)
    first = answer("sessions", "--group", group, "--limit", "2")
    rest = answer("sessions", "--group", group, "--all", "--cursor", first["next_cursor"])
    assert [row["session_id"] for row in first["sessions"] + rest["sessions"]] == newest_first
    best = answer("sessions", "--group", group, "--min-reward", "3", "--sort", "reward", "--order", "asc")
    assert [row["reward"] for row in best["sessions"]] == [3.0, 4.0]
    shown = run("sessions", "--group", group, "--limit", "2")
    title, *lines = shown.stdout.splitlines()
    assert title.split()[:5] == ["session", "state", "task", "turns", "reward"]
    assert [line.split()[:5] for line in lines] == [
        [newest_first[0], "idle", "–", "0", "4"],
        [newest_first[1], "idle", "–", "0", "3"],
    ]
    assert shown.stderr.startswith("turnlog: 2 of 5; more with --all, or --cursor ")
    # Two tasks of one template and one of another, a session without a turn, and one whose task is erased.
    for talk, what in zip(talks, ("the bug in parse", "the bug in render", "poem", "secret"), strict=False):
        talk.say(what if what == "poem" else f"You are in a repository. Mend {what}")
    stand_says = cli.http.delete(talks[3].path, params={"erase": "true"})
    assert stand_says.status_code == 204
    lines = run("sessions", "--group", group, "--order", "asc").stdout.splitlines()
    assert [re.split(" {2,}", line)[2] for line in lines[1:]] == ["… parse", "… render", "poem", "–", "–"]
    assert answer("sessions", "--group", group)["tasks"][talks[2].id] == "poem"


def test_a_session_is_shown_as_it_is_and_as_it_was(cli: Stand) -> None:
    talk = cli.talk(metadata={"task": "\x1b[31mred"})
    talk.say("One")
    talk.say("Two")
    assert cli.http.post(talk.chat_path, json={"model": "simulator", "messages": "none"}).status_code == 400
    assert talk.chat([*talk.messages[:2], user("Another two")]).status_code == 200
    state = answer("show", talk.id)
    assert [(turn["turn"], turn["live"]) for turn in state["turns"]] == [(1, True), (2, False), (3, True)]
    lines = run("show", talk.id).stdout.splitlines()
    assert lines[0] == f"session {talk.id}: idle, at event {state['last_seq']}"
    assert "metadata: task=\\x1b[31mred" in lines
    turns = [line.split() for line in lines if line.split()[:1] in (["1"], ["2"], ["3"])]
    assert [turn[2] for turn in turns] == ["live", "rolled", "live"]
    assert any("engine ms" in line for line in lines)
    then = run("show", talk.id, "--at", str(state["turns"][0]["seq"])).stdout.splitlines()
    assert then[0].endswith(f"at event {state['turns'][0]['seq']} of {state['last_seq']}")
    assert "rollbacks" not in then
    assert "session_not_found" in complaint("show", "never-seen")


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_an_output_that_cannot_hold_every_character_ends_no_command(
    cli: Stand, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    group = f"北京 – {uuid.uuid4().hex}"
    talk = cli.talk(group_id=group, metadata={"task": "\U0001f600 – …"}, history="tree")
    talk.say("Grüße aus 北京")
    commands = [["--help"], ["sessions"], ["groups"], *([name, talk.id] for name in ("show", "tree", "tail"))]
    commands += [["groups", group], ["show", talk.id, "--json"]]
    for command in commands:
        output = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "argv", ["turnlog", *command])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 0, command
    output.seek(0)
    assert json.loads(output.read())["config"]["group_id"] == group


def test_forks_are_made_and_shown(cli: Stand) -> None:
    talk = cli.talk()
    talk.say("One")
    made = answer("fork", talk.id, "--turn", "1", "--count", "2", "--metadata", '{"try": 1}', "--key", talk.id)[
        "sessions"
    ]
    assert len(made) == 2
    printed = run("fork", talk.id, "--turn", "1", "--count", "2", "--metadata", '{"try": 1}', "--key", talk.id)
    assert [line.split() for line in printed.stdout.splitlines()[1:]] == [
        [one["session_id"], one["base_url"]] for one in made
    ]
    shown = run("show", made[0]["session_id"]).stdout.splitlines()
    assert f"forked from {talk.id} after turn 1: its turns are context" in shown
    assert "not_found" in complaint("fork", talk.id, "--turn", "2")
    assert "--metadata is not a JSON object" in complaint("fork", talk.id, "--turn", "1", "--metadata", "[]", code=2)


def test_a_groups_rewards(cli: Stand) -> None:
    group = f"g/{uuid.uuid4().hex}"
    for attempt in range(2):
        talk = cli.talk(group_id=group, attempt=attempt)
        cli.http.put(f"{talk.path}/reward", json={"reward": 1.0})
        cli.http.delete(talk.path)
    found = answer("groups", group)
    assert (found["complete"], found["statistics"]["zero_variance"]) == (True, True)
    lines = run("groups", group).stdout.splitlines()
    assert lines[0] == f"group {group}: complete"
    assert lines[1] == "rewards: count 2, mean 1, sample std 0, min 1, max 1"
    assert "all rewards are equal: the group's advantages are 0" in lines
    assert group in [one["group_id"] for one in answer("groups", "--limit", "500")["groups"]]
    assert any(group in line for line in run("groups", "--limit", "500").stdout.splitlines())
    cli.talk(group_id=group, run="cli", attempt=0, group_size=2)
    shown = run("groups", group, "--run", "cli").stdout.splitlines()
    assert shown[0] == f"group {group} of run cli: not complete, 1 of 2 attempts have arrived"
    assert [one["missing_attempts"] for one in answer("groups", "--run", "cli")["groups"]] == [[1]]


def test_engines_are_added_drained_and_removed(cli: Stand) -> None:
    engine = "http://127.0.0.1:9"
    assert answer("engines", "add", f"{engine}/v1")["url"] == engine
    assert {one["url"]: one["state"] for one in answer("engines", "list")["engines"]}[engine] == "serving"
    assert run("engines", "drain", engine).stdout.splitlines()[1].split()[:3] == [engine, "–", "draining"]
    assert engine in run("engines", "list").stdout
    assert answer("engines", "remove", engine) == {"url": engine, "state": "removed"}
    assert "not_found" in complaint("engines", "remove", engine)
    assert "invalid_request" in complaint("engines", "add", "nonsense")


def test_an_adapter_and_the_fleet_are_paused_and_go_on(cli: Stand) -> None:
    adapter = f"lora/{uuid.uuid4().hex}"
    assert answer("pause", adapter, "--lease-s", "60")["paused"] is True
    assert cli.http.get(f"/adapters/{adapter}").json()["paused"] is True
    assert answer("resume", adapter, "--version", "7")["version"] == "7"
    lines = run("pause", "--fleet").stdout.splitlines()
    try:
        assert lines[0] == "the fleet: paused, opens by itself in 10 min"
        assert [line.split()[1] for line in lines[3:]] == ["yes"]
    finally:
        assert run("resume", "--fleet").stdout.splitlines()[0] == "the fleet: open"


def test_a_tree_is_drawn(cli: Stand) -> None:
    talk = cli.talk(history="tree")
    talk.say("One", sim={"weight_version": "7"})
    first, second = list(talk.messages), [*talk.messages, user("Instead")]
    talk.say("Two", sim={"weight_version": "7"})
    quoted = talk.messages[-1]
    talk.messages = second
    assert talk.add(user("On")).status_code == 200
    talk.say("Deeper")
    assert talk.chat([*first, user("Third")]).status_code == 200
    assert talk.chat([user("So far"), quoted, user("Go on")]).status_code == 200
    title, columns, *lines = run("tree", talk.id).stdout.splitlines()
    assert title == f"session {talk.id}: 6 turns, 4 branches, main branch 3"
    assert columns.split() == [
        *("turn", "branch", "cause", "loss", "tokens", "output", "finish", "weights", "agent", "title", "note")
    ]
    found = {turn["turn"]: turn for turn in answer("tree", talk.id)["turns"]}
    assert [line[: len("│ ├─3 ")].rstrip() for line in lines] == ["├─1", "│ ├─3", "│ │ 4", "│ ├─5", "│ 2", "└─6"]
    assert lines[-1].rstrip().endswith("carries turn 2")
    titles = [branch["title"] for branch in answer("tree", talk.id)["branches"]]
    assert titles == ["One", "Instead", "Third", "So far"]
    assert all(one in "".join(lines) for one in titles)
    assert lines[0].split()[1:5] == ["0", "start", "0", str(found[1]["tokens"])]
    assert "not in branches=main" in run("tree", talk.id, "--branches", "main").stdout
    assert "session_not_found" in complaint("tree", "never-seen")
    assert run("tree", cli.talk().id).stdout.endswith(": 0 turns, 0 branches\n")


def test_two_rollouts_are_aligned(cli: Stand) -> None:
    """In two columns, as wide as the terminal; what is the same is a line."""
    sims = [
        {"calls": [{"name": "bash", "arguments": {"command": one}}]} for one in ("ls", "cat \x1b[31ma", "pytest -q")
    ]
    ids = []
    for mine in (sims, [sims[0], *sims[2:]]):
        talk = cli.talk()
        for sim in (*mine, {"text": f"Done in {len(mine)}."}):
            talk.say("Go on.", tools=[WEATHER], sim=sim)
        ids.append(talk.id)
    assert cli.http.put(f"/sessions/{ids[0]}/reward", json={"reward": 1, "components": {"tests": 1}}).status_code == 200
    assert cli.http.put(f"/sessions/{ids[0]}/annotations/quality", json={"value": "good"}).status_code == 200
    difference = f"Step 2: {ids[0]} calls `bash: cat \x1b[31ma` in addition"
    shown = run("diff", *ids, code=1).stdout
    assert "\x1b" not in shown
    heads, rows = shown.splitlines()[:3], [line.split() for line in shown.splitlines()[4:]]
    assert heads == [
        f"{ids[0]}: open, 4 turns, reward 1 (tests=1.0), quality=good",
        f"{ids[1]}: open, 3 turns",
        difference.replace("\x1b", "\\x1b") + ".",
    ]
    assert rows == [
        ["1", "1", "step", "is", "the", "same"],
        ["-", "2", "bash:", "cat", "\\x1b[31ma"],
        ["→", "Go", "on."],
        ["3", "1", "step", "is", "the", "same"],
        ["≠", "4", *["Done", "in", "3.", "Done", "in", "2."]],
    ]
    assert [line.split() for line in run("diff", "--all", *ids, code=1).stdout.splitlines()[4:6]] == [
        ["task", *["→", "Go", "on.", "→", "Go", "on."]],
        ["1", *["bash:", "ls", "bash:", "ls"]],
    ]
    found = answer("diff", *ids, code=1)
    assert (found["difference"], [one["reward"] and one["reward"]["reward"] for one in found["rollouts"]]) == (
        difference,
        [1.0, None],
    )
    turns = [[cell and cell["turn"] for cell in row["cells"]] for row in found["rows"]]
    assert turns == [[0, 0], [1, 1], [2, None], [3, 2], [4, 3]]
    assert [row["same"] for row in found["rows"]] == [True, True, False, True, False]
    assert run("diff", ids[0], f"{ids[0]}@0").stdout.splitlines()[2] == "No difference."
    assert complaint("diff", ids[0], f"{ids[0]}@x", code=2) == f"turnlog: {ids[0]}@x: the branch must be a number"


def test_an_engine_that_does_not_take_an_order_is_told_and_fails_the_command(cli: Stand) -> None:
    dead = "http://127.0.0.1:9"
    run("engines", "add", dead)
    try:
        result = run("pause", "--fleet", code=1)
        assert any(line.split()[:2] == [dead, "no"] for line in result.stdout.splitlines())
        assert result.stderr.startswith("turnlog: 502 engines_failed: ")
        assert answer("resume", "--fleet", code=1)["engines"][dead]["ok"] is False
    finally:
        run("engines", "remove", dead)
        run("resume", "--fleet")
