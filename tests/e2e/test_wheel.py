"""The wheel, built from the sdist as the image builds it: what it holds, what it runs, and what it leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from helpers.kept_server import KeptServer
from integration.stand import Stand, until

from ops.server import ROOT
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

PATIENCE_S = 120
SERVER = ("app", "workers", "ops", "migrations")
"""Names that other packages have as well."""

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python")


def done(*command: str | Path, cwd: Path, code: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TURNLOG_", "PYTHON"))}
    run = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    return run


class Environment:
    """A virtual environment of its own, and an empty folder to run in."""

    def __init__(self, folder: Path) -> None:
        self.empty = folder / "empty"
        self.empty.mkdir(parents=True)
        self.bin = folder / "venv" / "bin"
        done(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
        [self.packages] = (folder / "venv" / "lib").glob("*/site-packages")

    def pip(self, *arguments: str | Path) -> None:
        done(*PIP, self.bin / "python", *arguments, cwd=self.empty)

    def turnlog(self, *arguments: str | Path, code: int = 0, **environment: str) -> str:
        run = done(self.bin / "turnlog", *arguments, cwd=self.empty, code=code, **environment)
        return run.stderr if code else run.stdout

    def python(self, code: str) -> str:
        return done(self.bin / "python", "-c", code, cwd=self.empty).stdout

    def lend(self, *without: str) -> None:
        """The packages of these tests, but for Turnlog itself and what is to be missing."""
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.lower().startswith(("turnlog", "_turnlog", "pip", *without)):
                (self.packages / entry.name).symlink_to(entry)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by what build.lock pins, from the sdist, and that from a copy without a history."""
    folder = tmp_path_factory.mktemp("wheel")
    source, builder = folder / "source", Environment(folder / "builder")
    for name in ("turnlog", *SERVER):
        shutil.copytree(ROOT / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    builder.pip("install", "--require-hashes", "--no-deps", "-r", ROOT / "ops/deploy/build.lock")
    done(builder.bin / "hatchling", "build", "-t", "sdist", "-d", folder, cwd=source)
    [packed] = folder.glob("turnlog-*.tar.gz")
    builder.pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, packed)
    [made] = folder.glob("turnlog-*.whl")
    return made


def foreign(folder: Path) -> Path:
    """A wheel of somebody else's, with packages of our names that nobody may import."""
    made, information = folder / "foreign-1-py3-none-any.whl", "foreign-1.dist-info"
    files = {f"{name}/__init__.py": f"raise SystemExit('this is a foreign {name}')\n" for name in SERVER}
    files[f"{information}/METADATA"] = "Metadata-Version: 2.1\nName: foreign\nVersion: 1\n"
    files[f"{information}/WHEEL"] = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{information}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{information}/RECORD"))
    with zipfile.ZipFile(made, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return made


def test_it_holds_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"turnlog"}
    tracked = [path for name in SERVER for path in (ROOT / name).rglob("*") if path.is_file()]
    wanted = {f"turnlog/_server/{path.relative_to(ROOT)}" for path in tracked if "__pycache__" not in path.parts}
    assert wanted | {"turnlog/py.typed"} <= set(names)
    assert not [name for name in names if name.endswith(".pyc")]


class Installed(KeptServer):
    """`turnlog serve` of the wheel, in an empty folder; every reply goes to a worker process."""

    def __init__(self, environment: Environment, engine: str, **variables: str) -> None:
        given = {"TURNLOG_INLINE_MAX_BYTES": "0", "TURNLOG_WORKERS": "1", **variables}
        super().__init__(environment.empty, upstreams=[engine], environment=given, root=environment.empty)
        self._command = [str(environment.bin / "turnlog"), "serve", "--port", str(self.port)]


@pytest.fixture
def beside(wheel: Path, tmp_path: Path) -> tuple[Environment, dict[str, str]]:
    """Installed after packages of the same names, without pyarrow; and what those packages hold."""
    made = Environment(tmp_path)
    made.lend("pyarrow")
    made.pip("install", "--no-index", "--no-deps", foreign(tmp_path))
    theirs = {name: (made.packages / name / "__init__.py").read_text() for name in SERVER}
    made.pip("install", "--no-index", "--no-deps", wheel)
    return made, theirs


@pytest.mark.parametrize("variables", [{}, {"PYTHONSAFEPATH": "1"}], ids=["plain", "safe path"])
def test_it_serves_beside_packages_of_the_same_names(
    beside: tuple[Environment, dict[str, str]], variables: dict[str, str]
) -> None:
    installed, theirs = beside
    for name in ("turnlog", *SERVER):
        (installed.empty / f"{name}.py").write_text("raise SystemExit('this is of the folder')\n")
    database = {"TURNLOG_DATABASE_URL": f"sqlite+aiosqlite:///{installed.empty / 'turnlog.db'}", **variables}
    installed.turnlog("migrate", **database)
    with SimulatorProcess("--dialect", "sglang") as engine:
        server = Installed(installed, engine.base_url, **variables)
        stand = Stand(server.start(), engine.base_url)
        try:
            talk = stand.talk()
            talk.say("Hello")
            until(lambda: server.spare is not None, PATIENCE_S)
            os.kill(server.started[-1], signal.SIGKILL)
            until(lambda: len(server.started) == 2, PATIENCE_S)
            talk.say("From its spare")
            assert stand.http.get("/ui").status_code == 200
            [row] = talk.rows()
            assert len(row["messages"]) == 4
            refused = stand.http.get("/export", params={"format": "parquet"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
            assert "turnlog[parquet]" in refused.json()["error"]["message"]
        finally:
            stand.close()
            server.stop()
    installed.turnlog("verify", **database)
    report = done(installed.bin / "turnlog", "doctor", "--json", cwd=installed.empty, code=1, **database)
    assert "without pyarrow format=parquet is 400" in report.stdout
    installed.pip("uninstall", "-y", "turnlog")
    assert not (installed.packages / "turnlog").exists()
    assert {name: (installed.packages / name / "__init__.py").read_text() for name in SERVER} == theirs


@pytest.mark.untimed
def test_the_client_needs_none_of_the_servers_packages(wheel: Path, tmp_path: Path, stand: Stand) -> None:
    """Installed as somebody does who plays rollouts; what it needs comes from the index."""
    alone = Environment(tmp_path)
    alone.pip("install", wheel)
    talk = stand.talk()
    talk.say("Hello")
    code = f"""
from turnlog import Turnlog
with Turnlog({stand.server.base_url!r}) as turnlog:
    session = turnlog.attach({talk.id!r})
    print([event["type"] for event in session.events()] == {talk.types()!r})
    print(len(session.samples().samples), len(list(turnlog.export(session_id=session.id))))
"""
    assert alone.python(code).split() == ["True", "1", "1"]
    assert talk.id in alone.turnlog("show", talk.id, "--url", stand.server.base_url)
    forked = json.loads(alone.turnlog("fork", talk.id, "--turn", "1", "--json", "--url", stand.server.base_url))
    assert len(forked["sessions"]) == 1
    for command in (("serve",), ("migrate",), ("verify",), ("doctor",), ("bench", "--help")):
        [line] = alone.turnlog(*command, code=1).splitlines()
        assert line.startswith(f"turnlog: turnlog {command[0]} needs the extra turnlog[server]; missing: ")
        assert "sqlalchemy" in line
    installed = {path.name.partition("-")[0].lower() for path in alone.packages.glob("*.dist-info")}
    assert not installed & {"fastapi", "uvicorn", "sqlalchemy", "aiohttp", "pyarrow", "alembic"}
