"""What only a process of its own shows: signals, a closed pipe, a server that restarts, and what a start imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest

from integration.cli import started
from integration.stand import Stand

PATIENCE_S = 60


@pytest.mark.long
def test_a_log_is_followed_over_restarts_without_a_gap_or_a_repetition(mortal: Stand, tmp_path: Path) -> None:
    talk = mortal.talk()
    talk.say("Before")
    follower = started("tail", "-f", "--json", "--url", mortal.server.base_url, talk.id, folder=tmp_path)
    assert follower.stdout is not None
    seen = [json.loads(follower.stdout.readline()) for _ in talk.events()]
    mortal.server.kill()
    mortal.server.start()
    talk.say("After a kill")
    mortal.server.stop()
    mortal.server.start()
    talk.say("After a stop")
    mortal.http.delete(talk.path, params={"erase": "true"})
    rest, complaints = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0, complaints
    seen += [json.loads(line) for line in rest.splitlines()]
    assert seen == talk.events()
    assert seen[-1]["type"] == "SessionErased"
    assert "continuing after event" in complaints
    assert all(line.startswith("turnlog: ") for line in complaints.splitlines())


def test_ctrl_c_ends_it_without_a_word(mortal: Stand, tmp_path: Path) -> None:
    talk = mortal.talk()
    follower = started("tail", "-f", "--url", mortal.server.base_url, talk.id, folder=tmp_path)
    assert follower.stdout is not None
    assert "SessionCreated" in follower.stdout.readline()
    # Python looks for a signal between its instructions. One that comes behind the last look before a read waits for
    # that to end, unless it is sent again, as a person would.
    for patience_s in (10, PATIENCE_S):
        follower.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            rest, complaints = follower.communicate(timeout=patience_s)
            break
    else:
        follower.kill()
        pytest.fail("it goes on")
    assert (follower.returncode, rest, complaints) == (130, "", "")


@pytest.mark.parametrize("command", [("export",), ("show",)])
def test_a_reader_that_leaves_is_no_error(mortal: Stand, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Its end of the pipe is closed before the command writes."""
    talk = mortal.talk()
    for number in range(3):
        talk.say(f"Hello {number}")
    of_one = [talk.id] if command == ("show",) else []
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        done = started(*command, *of_one, "--url", mortal.server.base_url, folder=tmp_path, stdout=out)
        _, complaints = done.communicate(timeout=PATIENCE_S)
    assert (done.returncode, complaints) == (1, "")


def test_help_imports_nothing_heavy() -> None:
    """It is imported by the commands that need it."""
    heavy = ("httpx", "numpy", "sqlalchemy", "pyarrow", "fastapi", "app", "ops")
    assert loaded("from turnlog.cli.commands import app_of; app_of()", heavy) == "[]"


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (["--version"], ("typer", "pydantic", "rich", "httpx")),
        # A closed port: all that the command needs is imported before it is refused.
        (
            ["sessions", "--url", "http://127.0.0.1:9"],
            ("numpy", "pygments", "turnlog.cli.doctor", "turnlog.cli.export"),
        ),
    ],
)
def test_a_command_imports_what_it_needs(arguments: list[str], heavy: tuple[str, ...]) -> None:
    assert loaded(f"import turnlog.cli; sys.argv[1:] = {arguments}; turnlog.cli.main()", heavy) == "[]"


def loaded(code: str, heavy: tuple[str, ...]) -> str:
    """Which of these modules a process has imported that ran the code; its last line."""
    at_end = f"atexit.register(lambda: print([name for name in {heavy} if name in sys.modules]))"
    code = f"import atexit, sys\n{at_end}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return done.stdout.splitlines()[-1]


def test_completion_knows_the_commands(tmp_path: Path) -> None:
    environment = {"_TURNLOG_COMPLETE": "complete_bash", "COMP_WORDS": "turnlog ba", "COMP_CWORD": "1"}
    done = started(folder=tmp_path, environment=environment)
    assert done.communicate(timeout=PATIENCE_S)[0].split() == ["backup"]


PRESS_TAB = """eval "$(_TURNLOG_COMPLETE=source_bash turnlog)"
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_turnlog_completion turnlog
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(words: str, url: str, shell: str) -> list[str]:
    """What a shell offers for the last word."""
    home = Path(sys.executable).parent
    environment = {"PATH": f"{home}:{os.environ['PATH']}", "TURNLOG_URL": url}
    command = ["bash", "-c", PRESS_TAB, "bash", *words.split(" ")]
    if shell != "bash":
        environment |= {"_TURNLOG_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": words}
        environment["_TYPER_COMPLETE_FISH_ACTION"] = "get-args"
        command = [str(home / "turnlog")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_completes_the_servers_ids(stand: Stand) -> None:
    run, group, name = (f"{kind}-{uuid.uuid4().hex}" for kind in ("run", "group", "session"))
    stand.talk(session_id=name, run=run, group_id=group).say("A run has a turn")
    wanted = {
        f"turnlog reward {name[:20]}": name,
        f"turnlog groups {group[:20]}": group,
        f"turnlog run {run[:20]}": run,
        f"turnlog sessions --run {run[:20]}": run,
        f"turnlog export --session {name[:20]}": name,
    }
    for words, whole in wanted.items():
        assert offered(words, stand.server.base_url, "bash") == [whole]
    read = f"turnlog read {name[:20]}"
    assert f'(("{name}"))' in " ".join(offered(read, stand.server.base_url, "zsh"))
    assert offered(read, stand.server.base_url, "fish") == [name]
    assert [offered(read, url, "bash") for url in ("http://127.0.0.1:9", "no address")] == [[], []]
