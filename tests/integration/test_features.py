"""The service without its features: a copy of the code that lacks a folder, and the line that names it."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from fault.hosted import hosted

from app.composition import TABLES, chosen, metadata
from app.settings import FEATURES, Settings
from integration.places import Place
from integration.stand import Api, Stand, user
from ops.server import ROOT, ServerProcess
from ops.simulator.process import SimulatorProcess

CODE = ("app", "workers", "turnlog", "migrations", "alembic.ini")

NEEDED_BY = {
    "gates": ("checkpoints",),
    "groups": ("archive", "checkpoints", "runs", "webhooks"),
    "objects": ("archive",),
}
"""Features whose code imports another's (import-linter has the list)."""


def without(folder: Path, *names: str) -> Path:
    """A copy of the code without these features."""
    for part in CODE:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part)  # with what is compiled
        else:
            shutil.copy(ROOT / part, folder / part)
    named = folder / "app" / "composition.py"
    text = named.read_text()
    for name in names:
        shutil.rmtree(folder / "app" / "features" / name)
    left = ""
    for tuple_of in ("TABLES", "FEATURES"):
        listed = re.search(rf"{tuple_of} = \(([^)]*)\)", text)
        assert listed is not None
        left = "".join(f"{name}, " for name in re.findall(r"\w+", listed[1]) if name not in names)
        text = text.replace(listed[0], f"{tuple_of} = ({left})")
    line = f"from app.features import {left.rstrip(', ')}\n" if left else ""
    text, count = re.subn(r"from app\.features import (\([^)]*\)|.*)\n", line, text)
    assert count == 1
    named.write_text(text)
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with SimulatorProcess() as simulator:
        yield simulator.base_url


SOME = [
    tuple(names.split())
    for names in (
        "annotations archive forks objects otel page rllm run_tokens text",
        "archive budgets checkpoints groups objects page public_url runs session_control webhooks",
        "archive checkpoints forks gates groups live otel resume runs text webhooks",
        "annotations budgets forks live rllm search webhooks",
        "live page resume runs search session_control text",
        "annotations archive checkpoints gates groups objects resume runs search webhooks",
        "budgets checkpoints gates otel rllm session_control",
        "public_url resume run_tokens",
    )
]
"""Features that are away together: each of them once while each other one is there."""


def test_each_is_away_beside_each_other() -> None:
    away = {(one, other) for gone in SOME for one in gone for other in FEATURES if other not in gone}
    needed = {(one, other) for one, needing in NEEDED_BY.items() for other in needing}
    assert away | needed == set(itertools.permutations(FEATURES, 2))
    assert all(other in gone for gone in SOME for one in gone for other in NEEDED_BY.get(one, ()))


@pytest.mark.long
@pytest.mark.parametrize("gone", [*SOME, FEATURES])
def test_the_kernel_works_without(gone: tuple[str, ...], tmp_path: Path, engine: str) -> None:
    """Nor with its tables, which the migration makes all the same."""
    code, file = without(tmp_path / "code", *gone), tmp_path / "turnlog.db"
    url = f"sqlite+aiosqlite:///{file}"
    migrate = [sys.executable, "-m", "alembic", "upgrade", "head"]
    subprocess.run(migrate, cwd=code, env={**os.environ, "TURNLOG_DATABASE_URL": url}, check=True)
    own = {table for name in gone for table in _tables_of(name)}
    with closing(sqlite3.connect(file)) as opened:
        made = {row[0] for row in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        assert made == {*metadata().tables, "alembic_version"}
        for table in own:
            opened.execute(f"DROP TABLE {table}")
    server = ServerProcess(tmp_path, upstreams=[engine], database_url=url, root=code).start()
    try:
        with closing(Stand(server, engine)) as stand:
            _play(stand)
            if gone == FEATURES:
                server.stop()
                server.start()  # what was acknowledged is there
            _look(stand)
    finally:
        server.stop()


def _tables_of(name: str) -> set[str]:
    feature = chosen(Settings(features=(name,)))[name]
    return set(feature.schema.metadata.tables) if feature in TABLES else set()


def test_a_feature_that_fails_after_a_commit_costs_no_reply(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def fails(*_: object) -> None:
        raise ValueError("a fault")

    with Place(tmp_path).database() as url, hosted(url, engine) as server, closing(Api(server.base_url)) as api:
        services = server.services
        services.points.ended[:0] = [fails, lambda turn: told.append(turn.flight.session_id)]
        services.sessions.on_close(fails)
        talk = api.talk()
        talk.say("Hello")
        assert talk.chat([*talk.messages, user("and on")], stream=True).text.endswith("data: [DONE]\n\n")
        httpx.post(f"{engine}/sim/faults", json={"fault": "reset"})
        other = api.talk()
        assert other.chat([user("Hello")]).json()["error"]["code"] == "upstream_unreachable"
        assert told == [talk.id, talk.id, other.id]
        assert api.http.delete(talk.path).status_code == 204
        assert [talk.types().count(of) for of in ("TurnCommitted", "SessionClosed")] == [2, 1]
        assert "turnlog_feature_faults_total 4.0\n" in api.http.get("/metrics").text
        api.http.close()
    assert [record.getMessage() for record in caplog.records if record.exc_info] == [
        f"unexpected error in {__name__}.{fails.__qualname__}, after a commit"
    ] * 4


def _play(api: Stand) -> None:
    linear = api.talk(session_id="linear")
    first = linear.say("Hello", headers={"idempotency-key": "one"})
    again = linear.chat([user("Hello")], headers={"idempotency-key": "one"})
    assert again.headers["x-turnlog-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    linear.say("and on")
    assert api.http.put("/sessions/linear/reward", json={"reward": 1.0}).status_code == 200
    assert api.http.delete("/sessions/linear").status_code == 204
    tree = api.talk(session_id="tree", history="tree")
    tree.say("Hello")
    tree.say("left")
    del tree.messages[2:]
    tree.say("right")
    assert api.http.delete("/sessions/tree").status_code == 204


def _look(api: Stand) -> None:
    assert {row["session_id"] for row in api.rows()} == {"linear", "tree"}
    assert len(api.rows(session_id="tree")) == 2
    assert api.http.delete("/sessions/linear", params={"erase": True}).status_code == 204
    assert api.get("/sessions/linear/state")["status"] == "erased"


def test_a_fault_in_a_turn_ends_it_at_once(tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its claim is released with the reply; nobody has to wait until it is found to be lost."""

    def fails(_: object) -> None:
        raise ValueError("a fault")

    with Place(tmp_path).database() as url, hosted(url, engine) as server, closing(Api(server.base_url)) as api:
        services = server.services
        services.points.claimed.append(fails)
        talk = api.talk()
        assert talk.chat([user("Hello")]).status_code == 500
        assert talk.types() == ["SessionCreated", "TurnOpened", "TurnAbandoned"]
        assert talk.events()[-1]["reason"] == "not_released"
        services.points.claimed.remove(fails)
        talk.say("Hello")
    assert "a fault" in caplog.text


def test_an_unexpected_fault_of_a_route_ends_no_connection(
    tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The 500 is whole, and the client's next request may be on its way already."""

    async def fails(_: object) -> dict[str, Any]:
        raise ValueError("a fault")

    with Place(tmp_path).database() as url, hosted(url, engine) as server, closing(Api(server.base_url)) as api:
        talk = api.talk()
        server.services.session_fields.append(fails)
        with closing(HTTPConnection("127.0.0.1", int(server.base_url.rpartition(":")[2]), timeout=20)) as connection:
            connection.connect()
            connection.auto_open = 0
            for _ in range(3):
                for path, expected in ((talk.path, 500), ("/health", 200)):
                    connection.request("GET", path)
                    reply = connection.getresponse()
                    assert (reply.status, len(reply.read()) > 0) == (expected, True)
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["a fault"] * 3


def test_without_gates_what_was_shut_is_open(tmp_path: Path, engine: str) -> None:
    place = Place(tmp_path)
    with place.database() as url:
        server = ServerProcess(tmp_path, upstreams=[engine], database_url=url)
        others = ",".join(name for name in FEATURES if name != "gates")
        try:
            with closing(Stand(server.start(), engine)) as api:
                assert api.http.post("/fleet/pause").status_code == 200
                assert api.http.post("/adapters/one/resume", json={"version": "7"}).status_code == 200
            server.stop()
            assert httpx.post(f"{engine}/continue_generation", json={}).status_code == 200
            server.environment = {**server.environment, "TURNLOG_FEATURES": others}
            with closing(Stand(server.start(), engine)) as api:
                assert api.talk(session_id="free").say("Hello").status_code == 200
                assert api.get("/ui/api/overview")["gate"]["paused"] is False
                assert api.http.get("/fleet").status_code == 404
            server.stop()
            server.environment = {**server.environment, "TURNLOG_FEATURES": "all"}
            with closing(Stand(server.start(), engine)) as api:
                assert api.get("/fleet")["paused"] is False
                assert api.get("/adapters/one")["version"] is None
        finally:
            server.stop()
