"""One SQLite file, one server; and a file that is taken away under its server."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.databases import run_module
from helpers.looking import value
from integration.stand import Stand, error_of, serving, until, user

from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.server import ServerDidNotStart, ServerProcess
from ops.simulator.process import SimulatorProcess

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the lock beside the file is watched instead"),
]

ONE = "two servers on one SQLite file"
TAKEN = "an SQLite file is deleted or replaced under its server"


@pytest.fixture
def own(engine: SimulatorProcess, tmp_path: Path) -> Iterator[Stand]:
    """A server of the test's own, with worker processes."""
    with serving(tmp_path, engine.base_url, environment={"TURNLOG_WORKERS": "2"}) as made:
        yield made


@pytest.mark.fault(16, ONE)
def test_a_second_server_is_refused(own: Stand, tally: Tally) -> None:
    """As the first one's command would start it; the first one is not disturbed."""
    talk = own.talk()
    acknowledged = [acknowledgement(talk.id, talk.say("Hello"))]
    tally.tried += 1
    with pytest.raises(ServerDidNotStart) as refused:
        ServerProcess(own.server.database_path.parent, environment=dict(own.server.environment)).start()
    [line] = [line for line in str(refused.value).splitlines() if "turnlog:" in line]
    assert f"another process (pid {own.server.pid}) serves" in line
    assert "Traceback" not in str(refused.value)
    acknowledged.append(acknowledgement(talk.id, talk.say("Again")))
    verified(own, acknowledged, tally)


@pytest.mark.fault(16, ONE)
def test_what_needs_a_stopped_server_is_refused(own: Stand, tmp_path: Path, tally: Tally) -> None:
    own.talk().say("Hello")
    copy = str(tmp_path / "copy.db")
    beside = [("turnlog.cli", "backup", copy), ("turnlog.cli", "verify")]
    stopped = [
        ("turnlog.cli", "restore", copy),
        ("turnlog.cli", "replay", "--heads", "--fix"),
        ("alembic", "downgrade", "-1"),
    ]
    for command in (*beside, *stopped):
        done = run_module(*command, environment=own.server.environment)
        tally.tried += 1
        if command in beside:
            assert done.returncode == 0, done.stderr
        else:
            assert done.returncode != 0, command
            assert f"pid {own.server.pid}" in done.stderr, done.stderr
            assert "Traceback" not in done.stderr
    own.talk().say("Hello")
    verified(own)


def opened_by(process: str) -> Iterator[str]:
    """What it has open; a descriptor may be closed while they are read."""
    for handle in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            yield os.readlink(handle)


@pytest.mark.fault(16, ONE)
def test_no_worker_keeps_the_file_of_a_server_that_was_killed(own: Stand, tally: Tally) -> None:
    """Its workers may outlive it for a moment; their descriptors are not the file's."""
    children = Path(f"/proc/{own.server.pid}/task/{own.server.pid}/children").read_text().split()
    assert children
    file = str(own.server.database_path)
    for process in (str(own.server.pid), *children):
        assert (file in opened_by(process)) == (process == str(own.server.pid))
    own.server.kill()
    own.server.start()
    tally.tried += 1
    own.talk().say("Hello")
    verified(own)


def removed(file: Path) -> None:
    for path in file.parent.glob(f"{file.name}*"):
        path.unlink()


def exchanged(file: Path) -> None:
    """As a copy is put back by hand, without a stop."""
    shutil.copyfile(file, file.with_name("copy.db"))
    file.with_name("copy.db").replace(file)


def renamed(file: Path) -> None:
    file.rename(file.with_name("kept.db"))


@pytest.mark.fault(16, TAKEN)
@pytest.mark.parametrize("what", [removed, exchanged, renamed], ids=lambda what: what.__name__)
def test_a_server_ends_when_its_file_is_taken_away(own: Stand, tally: Tally, what: Callable[[Path], None]) -> None:
    """Nothing is acknowledged any more: it would be in a file that nobody finds."""
    talk = own.talk()
    reply = talk.say("Hello")
    tally.tried += 1
    what(own.server.database_path)
    refused = talk.chat([*talk.messages, user("Again")])
    assert error_of(refused) == (503, "store_unavailable")
    pid = own.server.pid
    until(lambda: not is_running(pid))
    said = [line for line in own.server.log_path.read_text().splitlines() if "critical" in line.lower()]
    assert len(said) == 1
    assert str(own.server.database_path) in said[0]
    assert "while this server was running: it writes nothing more, and exits" in said[0]
    if what is renamed:
        kept = own.server.database_path.with_name("kept.db")
        for suffix in ("-wal", "-shm"):
            Path(f"{own.server.database_path}{suffix}").rename(f"{kept}{suffix}")
        url = f"sqlite+aiosqlite:///{kept}"
        assert value(url, "SELECT count(*) FROM events WHERE type = 'TurnCommitted'") == 1
        verified(url, [acknowledgement(talk.id, reply)], tally)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
