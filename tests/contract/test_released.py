"""Stores that releases have written, and what was visible of them, before the code of today.

`python -m tests.tools.released --into tests/released/<version>` makes such a folder, once, at a release.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from helpers.databases import Postgres, run_module
from helpers.looking import change

from ops.server import ServerProcess
from ops.simulator.process import SimulatorProcess
from tests.tools.digest import surface
from tests.tools.digest.requests import PLAIN, user
from tests.tools.released import packing, reading, scenario
from tests.tools.released.scenario import CUT, LAST, RUN, STAGED

RELEASES = sorted(folder.name for folder in packing.RELEASED.iterdir() if folder.is_dir())
NEWEST = max(RELEASES, key=lambda version: tuple(map(int, version.split("."))))


class Opened(NamedTuple):
    """A copy of a released store, served by the code of today; what was kept of it."""

    client: httpx.Client
    kept: dict[str, Any]
    folder: Path
    server: ServerProcess


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with SimulatorProcess("--seed", "31", "--weight-version", "6") as made:
        yield made.base_url


@pytest.fixture
def opening(
    tmp_path: Path, engine: str, request: pytest.FixtureRequest
) -> Iterator[Callable[[str, str], contextlib.AbstractContextManager[Opened]]]:
    @contextlib.contextmanager
    def opened(release: str, kind: str) -> Iterator[Opened]:
        store, kept = packing.unpack(packing.RELEASED / release / f"{kind}{packing.END}")
        with contextlib.ExitStack() as stack:
            if kind == "sqlite":
                url = f"sqlite+aiosqlite:///{tmp_path / packing.FILE}"
            else:
                postgres: Postgres = request.getfixturevalue("postgres")
                url = stack.enter_context(postgres.database(template="template1"))
            packing.lay_out(store, tmp_path, url)
            settings = scenario.environment(tmp_path, engine)
            server = ServerProcess(tmp_path, upstreams=[engine], database_url=url, environment=settings)
            migrated = run_module("turnlog.cli", "migrate", environment=server.environment)
            assert migrated.returncode == 0, migrated.stderr
            # A consumer's lease is of a day, and the store is older.
            change(url, "UPDATE groups SET lease_until = 1e11 WHERE lease_until IS NOT NULL")
            stack.callback(server.stop)
            server.start()
            client = stack.enter_context(scenario.Site(tmp_path, server, None, None).client())  # type: ignore[arg-type]
            reading.until_recovered(client)
            yield Opened(client, kept, tmp_path, server)

    return opened


@pytest.mark.parametrize(
    ("kind", "is_whole"),
    [("sqlite", False), pytest.param("sqlite", True, marks=pytest.mark.long), ("postgresql", False)],
)
@pytest.mark.parametrize("release", RELEASES)
def test_a_store_of_a_release_is_read_and_goes_on(release: str, kind: str, is_whole: bool, opening: Any) -> None:
    """`is_whole`: all shapes and formats, which the quick tests leave out."""
    with opening(release, kind) as old:
        now = reading.everything(old.client, is_whole=is_whole)
        kept = {name: value for name, value in old.kept["read"].items() if name in now}
        assert is_whole <= (kept.keys() == old.kept["read"].keys())
        assert "\n".join(reading.differences(kept, now)) == ""
        assert list(reading.differences(old.kept["verified"], reading.verified(old.server.environment))) == []
        _goes_on(old)


def _goes_on(old: Opened) -> None:
    client, kept = old.client, old.kept
    assert reading.behind(client, kept) == kept["behind"]
    for again in kept["again"]:
        reply = client.post(again["path"], json=again["body"], headers=again["headers"])
        assert (reply.text, reply.headers["x-turnlog-replayed"]) == (again["reply"], "true")
    for who, path in (("session", "/sessions/with-token"), ("run", f"/runs/{RUN}")):
        headers = {"authorization": f"Bearer {kept['tokens'][who]}"}
        assert client.get(path, headers=headers).status_code == 200
    for name, history in kept["histories"].items():
        _continues(client, name, history)
    for name in (LAST, STAGED):
        said = client.get(f"/sessions/{name}/messages").json()["messages"]
        _continues(client, name, [one["message"] for one in said])
    _the_feed_goes_on(client)
    _comes_back(old)
    _is_restored(client)
    assert reading.verified(old.server.environment)["problems"] == []


def _continues(client: httpx.Client, name: str, history: list[Any]) -> None:
    """A turn that is matched with all of the stored history."""
    body = {"model": "simulator", "messages": [*history, user("Go on")], "sim": PLAIN}
    reply = client.post(f"/sessions/{name}/v1/chat/completions", json=body)
    assert reply.status_code == 200, (name, reply.text)
    turn = int(reply.headers["x-turnlog-turn"])
    events = reading.lines(client, f"/sessions/{name}/events")
    [committed] = [one for one in events if one["type"] == "TurnCommitted" and one["turn"] == turn]
    assert (committed["base_messages"], committed["new_messages"]) == (len(history), 1), name


def _the_feed_goes_on(client: httpx.Client) -> None:
    """First what is leased, then what is complete; never what was acknowledged."""
    for group in ("leased", "complete"):
        given = reading.lines(client, "/export/groups", consumer="trainer", size="1")
        assert [one["group_id"] for one in given] == [group]
        assert [row["reward"] for row in given[0]["rows"]] == [0, 1]
        body = {"consumer": "trainer", "groups": [group]}
        assert client.post("/export/groups/ack", json=body).json()["acknowledged"] == [group]
    assert reading.lines(client, "/export/groups", consumer="trainer", size="1") == []


def _comes_back(old: Opened) -> None:
    """The file is elsewhere now, which the index of archives must know."""
    [file] = (old.folder / "archives").iterdir()
    change(old.server.environment["TURNLOG_DATABASE_URL"], "UPDATE archived SET file = :here", here=file.as_uri())
    reply = old.client.post("/archives/import", json={"file": file.as_uri()})
    rows = [{key: value for key, value in row.items() if key != "cursor"} for row in old.kept["archived"]]
    assert reply.json() == {"imported": len(rows), "there": 0, "refused": []}
    now = reading.lines(old.client, "/export", run="archive", replay="true")
    assert "\n".join(reading.differences(rows, now)) == ""


def _is_restored(client: httpx.Client) -> None:
    assert client.post(f"/checkpoints/{CUT}/restore").status_code == 200
    messages = client.get("/sessions/restored/messages").json()["messages"]
    assert [one["message"]["content"] for one in messages][0::2] == ["Before"]
    assert client.get("/sessions/later").json()["error"]["code"] == "restored"


@pytest.mark.parametrize("kind", packing.DATABASES)
@pytest.mark.parametrize("release", RELEASES)
def test_a_releases_store_has_something_of_everything(release: str, kind: str, tmp_path: Path) -> None:
    """A row in each table, and each event that the release could write."""
    store, _ = packing.unpack(packing.RELEASED / release / f"{kind}{packing.END}")
    if kind == "sqlite":
        (tmp_path / packing.FILE).write_bytes(store[packing.FILE])
        with contextlib.closing(sqlite3.connect(tmp_path / packing.FILE)) as opened:
            tables = [row[0] for row in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            empty = {table for table in tables if not opened.execute(f"SELECT count(*) FROM {table}").fetchone()[0]}
            logs = ("events", "fleet_events")
            types = {row[0] for log in logs for row in opened.execute(f"SELECT DISTINCT type FROM {log}")}
    else:
        dump = store[packing.DUMP].decode()
        empty = set(re.findall(r"^COPY public\.(\w+) [^\n]*\n\\\.$", dump, re.MULTILINE))
        types = set(re.findall(r"\t([A-Z]\w+)\t\d+\t\d", dump))
    assert {table for table in empty if not table.startswith("search_")} == set()
    listed = surface.read((packing.RELEASED / release / packing.SURFACE).read_text("utf-8"))
    could = {section.removeprefix("event ") for section, line in listed if line.startswith("version ")}
    assert could - types == set()


def test_what_the_newest_release_has_is_still_there(opening: Any) -> None:
    """More may come. What goes or changes warns first, for a minor version and three months (CONTRIBUTING.md)."""
    with opening(NEWEST, "sqlite") as old:
        document, metrics = old.client.get("/openapi.json").json(), old.client.get("/metrics").text
    now = set(surface.visible(document, metrics))
    listed = surface.read((packing.RELEASED / NEWEST / packing.SURFACE).read_text("utf-8"))
    assert [f"{section}: {line}" for section, line in listed if (section, line) not in now] == []
