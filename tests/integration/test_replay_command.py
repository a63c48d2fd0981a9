"""`turnlog replay SESSION`: the past of a session, as the server reported it then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from integration.filled import execute, replay
from integration.stand import Stand, Talk, standing, user

Environment = Callable[..., None]
Lines = Callable[[], list[str]]


class Diary:
    """What the server said of a session after each step, by version."""

    def __init__(self, talk: Talk) -> None:
        self.talk = talk
        self.pages: dict[int, dict[str, Any]] = {}

    def write(self) -> None:
        state = self.talk.state()
        told = state["metadata"]
        self.pages[told["version"]] = {
            "status": told["status"],
            "live": len(state["records"]),
            "tokens": len(told["accumulated_token_ids"]),
            "finish_reasons": [r["response"]["choices"][0]["finish_reason"] for r in state["records"]],
            "reward": told["reward"],
        }


def replayed(said: Lines, session_id: str, *options: str) -> dict[str, Any]:
    assert replay([session_id, "--json", *options]) == 0
    (line,) = said()
    found: dict[str, Any] = json.loads(line)
    return found


def page_of(state: dict[str, Any]) -> dict[str, Any]:
    live = [turn for turn in state["turns"] if turn["live"]]
    return {
        "status": state["status"],
        "live": len(live),
        "tokens": live[-1]["tokens"] if live else 0,
        "finish_reasons": [turn["finish_reason"] for turn in live],
        "reward": state["reward"] and state["reward"]["reward"],
    }


@pytest.fixture(params=["sqlite", "postgresql"])
def store_of_stand(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'stand' / 'turnlog.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


def converse(stand: Stand) -> Diary:
    """A talk with a retry that rolls back, rewards and an end; the server is asked after each step."""
    diary = Diary(stand.talk(group_id="g", metadata={"task": 1}))
    talk = diary.talk
    diary.write()
    for text in ("one", "two"):
        talk.say(text)
        diary.write()
    assert talk.chat([*talk.messages[:2], user("two, again")]).status_code == 200
    diary.write()
    for body in ({"reward": 0.5, "turn": 1}, {"reward": 1.0, "components": {"style": 0.25}}):
        assert stand.http.put(f"{talk.path}/reward", json=body).status_code == 200
        diary.write()
    return diary


@pytest.mark.long
def test_each_fold_is_what_the_server_reported_then(
    store_of_stand: str, said: Lines, tmp_path: Path, clean_environment: Environment
) -> None:
    clean_environment(DATABASE_URL=store_of_stand)
    with standing(tmp_path / "stand", environment={"TURNLOG_DATABASE_URL": store_of_stand}) as stand:
        diary = converse(stand)
        talk = diary.talk
        assert len(diary.pages) == 6
        for version, page in diary.pages.items():
            state = replayed(said, talk.id, "--seq", str(version))
            assert state["version"] == version
            assert page_of(state) == page
        assert stand.http.delete(talk.path).status_code == 204
        events = talk.events()
        last = replayed(said, talk.id, "--events")
        assert (last["status"], last["version"], last["events"]) == ("closed", events[-1]["seq"], events)
        assert last["closed_at"] == events[-1]["at"]
        assert [(turn["turn"], turn["parent"], turn["live"]) for turn in last["turns"]] == [
            (1, 0, True),
            (2, 1, False),
            (3, 1, True),
        ]
        assert last["turn_rewards"] == {"1": {"reward": 0.5, "components": {}}}
        held = engine = None
        for event in events:
            state = replayed(said, talk.id, "--seq", str(event["seq"]))
            if event["type"] == "AffinityBound":
                engine = event["engine"]
            elif event["type"] != "RolledBack":
                held = event["seq"] if event["type"] == "TurnOpened" else None
            assert (state["open_turn"] or {}).get("fence") == held
            assert (state["affinity"] or {}).get("engine") == engine
        assert engine is not None
        assert replay(["--heads"]) == 0
        assert said() == []


def one_line(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert replay(arguments) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("replay: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_what_is_not_there_is_one_line(filled: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nobody" in one_line(["nobody"], 1, capsys)
    assert "ends with event 10" in one_line(["talked", "--seq", "11"], 1, capsys)


def test_a_log_is_folded_up_to_its_damage(filled: str, said: Lines, capsys: pytest.CaptureFixture[str]) -> None:
    execute(filled, "UPDATE events SET type = 'FromTheFuture' WHERE session_id = 'talked' AND seq = 5")
    assert replayed(said, "talked", "--seq", "4")["version"] == 4
    assert "FromTheFuture" in one_line(["talked", "--seq", "5"], 1, capsys)
    execute(filled, "DELETE FROM events WHERE session_id = 'talked' AND seq = 1")
    assert "does not begin with SessionCreated" in one_line(["talked", "--seq", "1"], 1, capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["s", "--heads"], ["s", "--fix"], ["--heads", "--seq", "1"], ["s", "--seq", "x"]),
        *(["s", "--seq=0"], ["s", f"--seq={10**30}"], ["s", f"--seq={-(2**63)}"]),
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert replay(arguments) == 2


def test_a_store_that_cannot_be_looked_at(
    tmp_path: Path, empty_url: str, clean_environment: Environment, capsys: pytest.CaptureFixture[str]
) -> None:
    clean_environment(DATABASE_URL=f"sqlite+aiosqlite:///{tmp_path / 'mistyped' / 'turnlog.db'}")
    assert "does not exist" in one_line(["--heads"], 2, capsys)
    assert not (tmp_path / "mistyped").exists()
    clean_environment(DATABASE_URL="mysql://host/name")
    assert "DATABASE_URL" in one_line(["s"], 2, capsys)
    if empty_url.startswith("sqlite"):
        execute(empty_url, "CREATE TABLE other (id INTEGER)")
    clean_environment(DATABASE_URL=empty_url)
    assert "revision none" in one_line(["s"], 2, capsys)
