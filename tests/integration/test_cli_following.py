"""What only a process of its own shows: signals, a closed pipe, a server that restarts, and how long a start takes."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from integration.cli import started
from integration.stand import Stand, serving
from ops.simulator.process import SimulatorProcess

PATIENCE_S = 60


@pytest.fixture(scope="module")
def own(sglang: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server that a test may stop."""
    with serving(tmp_path_factory.mktemp("followed"), sglang.base_url) as made:
        yield made


@pytest.mark.long
def test_a_log_is_followed_over_restarts_without_a_gap_or_a_repetition(own: Stand, tmp_path: Path) -> None:
    talk = own.talk()
    talk.say("Before")
    follower = started("tail", "-f", "--json", "--url", own.server.base_url, talk.id, folder=tmp_path)
    assert follower.stdout is not None
    seen = [json.loads(follower.stdout.readline()) for _ in talk.events()]
    own.server.kill()
    own.server.start()
    talk.say("After a kill")
    own.server.stop()
    own.server.start()
    talk.say("After a stop")
    own.http.delete(talk.path, params={"erase": "true"})
    rest, complaints = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0, complaints
    seen += [json.loads(line) for line in rest.splitlines()]
    assert seen == talk.events()
    assert seen[-1]["type"] == "SessionErased"
    assert "going on behind event" in complaints
    assert all(line.startswith("turnlog: ") for line in complaints.splitlines())


def test_ctrl_c_ends_it_without_a_word(own: Stand, tmp_path: Path) -> None:
    talk = own.talk()
    follower = started("tail", "-f", "--url", own.server.base_url, talk.id, folder=tmp_path)
    assert follower.stdout is not None
    assert "SessionCreated" in follower.stdout.readline()
    follower.send_signal(signal.SIGINT)
    try:
        rest, complaints = follower.communicate(timeout=PATIENCE_S)
    finally:
        follower.kill()
    assert (follower.returncode, rest, complaints) == (130, "", "")


@pytest.mark.parametrize("command", [("export",), ("show",)])
def test_a_reader_that_leaves_is_no_error(own: Stand, tmp_path: Path, command: tuple[str, ...]) -> None:
    """Its end of the pipe is closed before the command writes."""
    talk = own.talk()
    for number in range(3):
        talk.say(f"Hello {number}")
    of_one = [talk.id] if command == ("show",) else []
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        done = started(*command, *of_one, "--url", own.server.base_url, folder=tmp_path, stdout=out)
        _, complaints = done.communicate(timeout=PATIENCE_S)
    assert (done.returncode, complaints) == (1, "")


def test_help_takes_little_time(tmp_path: Path) -> None:
    """Of a processor, whatever else runs here. What is heavy is imported by the commands that need it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = started("--help", folder=tmp_path)
    assert "doctor" in done.communicate(timeout=PATIENCE_S)[0]
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 4
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
