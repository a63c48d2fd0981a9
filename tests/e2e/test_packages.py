"""The packages: built twice they are equal, each installs by one line, and checkers see its types."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from e2e.packages import Built, Environment, done
from ops.guides import script
from ops.server import ROOT

deno = pytest.importorskip("deno", reason="deno, which runs pyright, is not installed")

pytestmark = pytest.mark.long

SCRIPT = """
from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

from openai import AsyncOpenAI, OpenAI

import turnlog as package
from turnlog import (
    AsyncTurnlog,
    Checkpoint,
    Event,
    Excluded,
    Group,
    LeasedGroup,
    ListedGroup,
    ListedSession,
    Row,
    Sample,
    Session,
    State,
    Tree,
    Turnlog,
    UnreadableEvent,
    WaitingGroup,
)

with Turnlog() as turnlog:
    reveal_type(turnlog)
    session = turnlog.create_session(group_id="g", attempt=0, history="tree", metadata={"task": 1})
    reveal_type(session)
    assert_type(session.openai(), OpenAI)
    assert_type(session.fork(1, count=2), list[Session])
    assert_type(session.tree(branches="main"), Tree)
    assert_type(session.state(), State)
    assert_type(session.samples().samples, list[Sample])
    assert_type(session.events(), Iterator[Event])
    for event in session.events():
        if event["type"] == "TurnCommitted":
            assert_type(event["output_tokens"], int)
            event["fork"]  # wrong
    for row in turnlog.export(group_id="g", advantage="grpo"):
        assert_type(row, Row)
        assert_type(row["tokens"], list[int])
        assert_type(row["turns"][0]["finish_reason"], str | None)
        row["token"]  # wrong
    assert_type(list(turnlog.export(explain=True)), list[Row | Excluded])
    assert_type(list(turnlog.export(shape="verl")), list[dict[str, Any]])
    assert_type(list(turnlog.events(type=["TurnCommitted"])), list[Event | UnreadableEvent])
    assert_type(turnlog.hand_out("trainer", size=2), list[LeasedGroup[Row]])
    assert_type(turnlog.hand_out("trainer", explain=True), list[LeasedGroup[Row] | WaitingGroup])
    assert_type(turnlog.sessions(status="open", metadata={"task": 1}), Iterator[ListedSession])
    assert_type(turnlog.groups(), Iterator[ListedGroup])
    assert_type(turnlog.group("g"), Group)
    assert_type(turnlog.checkpoints(), list[Checkpoint])
    turnlog.export(grup_id="g")  # wrong
    turnlog.export(shape="slim")  # wrong
    turnlog.export(limit="5")  # wrong
    turnlog.export(status="done")  # wrong
    turnlog.events(type=["TurnComitted"])  # wrong
    turnlog.sessions(status="idle")  # wrong
    turnlog.sessions(group="g")  # wrong
    turnlog.create_session(history="trees")  # wrong
    turnlog.hand_out("trainer", sise=1)  # wrong
    session.tree(branches="most")  # wrong
    package.Sessions  # wrong


async def asynchronous() -> None:
    async with AsyncTurnlog() as turnlog:
        session = await turnlog.create_session()
        assert_type(session.openai(), AsyncOpenAI)
        assert_type(await session.tree(), Tree)
        assert_type(turnlog.sessions(), AsyncIterator[ListedSession])
        assert_type([row async for row in turnlog.export(limit=1)], list[Row])
        assert_type(await turnlog.hand_out("trainer"), list[LeasedGroup[Row]])
        turnlog.export(limit="5")  # wrong
""".lstrip()
"""A checker must find an error in each line that says `wrong`, and in no other."""

WRONG = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.endswith("# wrong")]


LOOP = ROOT / "docs" / "guides" / "rollout-loop.md"
"""The guide whose script has no type error, strictly checked."""


def mypy(installed: Environment, file: str, code: int) -> str:
    """What mypy prints, with the package of that environment."""
    options = ("--strict", "--cache-dir", installed.empty.parent / "mypy", "--python-executable")
    mypy = Path(sys.executable).with_name("mypy")
    return done(mypy, *options, installed.bin / "python", file, cwd=installed.empty, code=code).stdout


def pyright(installed: Environment) -> str:
    """What pyright prints, run by deno: its package brings no Node.js."""
    spec = find_spec("pyright")
    assert spec is not None
    assert spec.origin is not None
    program = Path(spec.origin).parent / "dist" / "index.js"
    command = (deno.find_deno_bin(), "run", "-A", "--no-remote", "--no-npm", "--unstable-detect-cjs", program)
    options = ("--pythonpath", installed.bin / "python", "script.py")
    quiet = {"DENO_NO_UPDATE_CHECK": "1", "DENO_DIR": str(installed.empty.parent / "deno"), "NO_COLOR": "1"}
    return done(*command, *options, cwd=installed.empty, code=1, **quiet).stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A user's folder beside one that is named as a clone is, without `__init__.py`."""
    made = Environment(tmp_path_factory.mktemp("place"))
    made.pip("install", "--require-hashes", "--no-deps", "-r", ROOT / "ops/deploy/build.lock")
    made.lend()
    (made.empty / "turnlog").mkdir()
    (made.empty / "turnlog" / "README.md").touch()
    (made.empty / "turnlog" / "rollout.py").touch()
    (made.empty / "script.py").write_text(SCRIPT)
    (made.empty / "loop.py").write_text(script(LOOP.read_text()))
    return made


@pytest.mark.parametrize("way", ["editable", "wheel"])
def test_it_is_imported_and_its_types_are_seen(built: Built, place: Environment, way: str) -> None:
    """It is installed in one line, and imported beside a folder of its name. Both checkers see its types; those of the
    wheel, which is built from the sdist, in a guide too.
    """
    installed, what = place, ("-e", built.source) if way == "editable" else (built.wheel,)
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--no-cache-dir", "--force-reinstall")
    installed.pip("install", *options, *what)
    assert installed.python("import turnlog; print(turnlog.Turnlog.__name__)").strip() == "Turnlog"
    assert installed.turnlog("--help")
    if way == "wheel":
        mypy(installed, "loop.py", 0)
    printed = {"mypy": mypy(installed, "script.py", 1), "pyright": pyright(installed)}
    for text in printed.values():
        errors = {int(line) for line in re.findall(r"script\.py:(\d+)(?::\d+)?(?: -|:) error", text)}
        assert sorted(errors) == WRONG, text
    revealed = {
        name: re.findall(r'(?:Revealed t|T)ype (?:is|of "\w+" is) "(.*)"', text) for name, text in printed.items()
    }
    assert revealed == {
        "mypy": ["turnlog.client._sync.client.Turnlog", "turnlog.client._sync.session.Session"],
        "pyright": ["Turnlog", "Session"],
    }


def test_packages_are_built_alike_again(built: Built, tmp_path: Path) -> None:
    """From another folder, with other times of the files, which only their owner may read."""
    source = tmp_path / "elsewhere" / "checkout"
    shutil.copytree(built.source, source)
    for path in source.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
        if path.is_file():
            path.chmod(path.stat().st_mode & 0o700)
    (tmp_path / "again").mkdir()
    again = built.build(source, tmp_path / "again")
    made = [
        [hashlib.sha256(path.read_bytes()).hexdigest() for path in pair] for pair in ((built.sdist, built.wheel), again)
    ]
    assert made[0] == made[1]


def test_the_version_is_the_changelogs() -> None:
    """The newest section is of pyproject.toml's version, and has no date until that is released."""
    [version] = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    sections = re.findall(r"^## \[(.*)\] - (\d{4}-\d\d-\d\d|Unreleased)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    versions, dates = zip(*sections, strict=True)
    assert versions[0] == version
    assert "Unreleased" not in dates[1:]
    assert list(versions) == sorted(versions, key=lambda one: [int(part) for part in one.split(".")], reverse=True)
