"""The wheel, built from the sdist as the image builds it: what it holds, what it runs, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import zipfile
from pathlib import Path

import pytest
from integration.stand import Stand, until

from e2e.packages import SERVER, Built, Environment, done
from ops.server import ROOT, KeptServer
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

PATIENCE_S = 120


@pytest.fixture
def wheel(built: Built) -> Path:
    return built.wheel


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

    def __init__(self, environment: Environment, engine: str) -> None:
        given = {"TURNLOG_INLINE_MAX_BYTES": "0", "TURNLOG_WORKERS": "1"}
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


def serves(installed: Environment) -> None:
    with SimulatorProcess("--dialect", "sglang") as engine:
        server = Installed(installed, engine.base_url)
        stand = Stand(server.start(), engine.base_url)
        try:
            talk = stand.talk()
            talk.say("Hello")
            before = len(server.started)
            os.kill(server.started[-1], signal.SIGKILL)
            until(lambda: len(server.started) == before + 1, PATIENCE_S)
            talk.say("From the next server")
            assert stand.http.get("/ui").status_code == 200
            [row] = talk.rows()
            assert len(row["messages"]) == 4
            refused = stand.http.get("/export", params={"format": "parquet"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
            assert "turnlog[parquet]" in refused.json()["error"]["message"]
        finally:
            stand.close()
            server.stop()


def test_it_serves_beside_packages_of_the_same_names(beside: tuple[Environment, dict[str, str]]) -> None:
    installed, theirs = beside
    for name in ("turnlog", *SERVER):
        (installed.empty / f"{name}.py").write_text("raise SystemExit('this is of the folder')\n")
    database = {"TURNLOG_DATABASE_URL": f"sqlite+aiosqlite:///{installed.empty / 'turnlog.db'}"}
    installed.turnlog("migrate", **database)
    serves(installed)
    safe = {"PYTHONSAFEPATH": "1"}  # of all processes, also of the demo's server and its engine
    installed.turnlog("verify", **database, **safe)
    done(installed.bin / "python", "-P", ROOT / "ops" / "survives.py", cwd=installed.empty)
    assert "acknowledged turns are stored" in installed.turnlog("demo", "--once", **safe)
    assert "--latency-ms" in installed.turnlog("simulator", "--help")
    report = done(installed.bin / "turnlog", "doctor", "--json", cwd=installed.empty, code=1, **database)
    assert "pyarrow is not installed: exports with format=parquet get 400" in report.stdout
    installed.pip("uninstall", "-y", "turnlog")
    assert not (installed.packages / "turnlog").exists()
    assert {name: (installed.packages / name / "__init__.py").read_text() for name in SERVER} == theirs


@pytest.mark.untimed
def test_the_client_needs_none_of_the_servers_packages(wheel: Path, tmp_path: Path, stand: Stand) -> None:
    """Installed as somebody does who plays rollouts; what it needs comes from the index."""
    alone = Environment(tmp_path)
    alone.pip("install", f"turnlog[numpy] @ {wheel.as_uri()}")
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
    for command in (("serve",), ("migrate",), ("verify",), ("doctor",), ("bench", "--help"), ("demo",)):
        [line] = alone.turnlog(*command, code=1).splitlines()
        assert line.startswith(f"turnlog: turnlog {command[0]} needs the extra turnlog[server]; missing: ")
        assert "sqlalchemy" in line
    installed = {path.name.partition("-")[0].lower() for path in alone.packages.glob("*.dist-info")}
    assert not installed & {"fastapi", "uvicorn", "sqlalchemy", "aiohttp", "pyarrow", "alembic"}
