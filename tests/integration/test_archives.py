"""Archives: a closed session's rows leave the database, and whoever asks for the session finds it as before."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import httpx
import pyarrow.parquet as pq
import pytest

from app.sessions.projections import examined
from app.store.engine import Database
from app.store.projections import Examined
from integration.places import Places
from integration.routing import BOTH
from integration.stand import Stand, Talk, serving, until
from ops.simulator.process import SimulatorProcess
from ops.verify import verify_url

CONTENT = ("events", "turns", "blobs", "chunks", "refused_replies")


class Yard(NamedTuple):
    """A server with archives in a folder, on SQLite or PostgreSQL."""

    stand: Stand
    folder: Path

    def archive(self, **body: Any) -> dict[str, int]:
        """Archive all that may be; the totals."""
        totals, after = {"archived": 0, "left": 0, "bytes": 0}, None
        while True:
            reply = self.stand.http.post("/archives", json={**body, "after": after})
            assert reply.status_code == 200, reply.text
            step = reply.json()
            totals = {name: totals[name] + step[name] for name in totals}
            after = step["after"]
            if after is None:
                return totals

    def objects(self, text: str) -> list[Path]:
        """The objects that hold a text."""
        return [path for path in self.folder.rglob("*.parquet") if text in str(pq.read_table(path).to_pylist())]

    def export(self, **parameters: Any) -> bytes:
        reply = self.stand.http.get("/export", params=parameters)
        assert reply.status_code == 200, reply.text
        return reply.content

    def talk(self, *texts: str, close: bool = True, **body: Any) -> Talk:
        talk = self.stand.talk(**body)
        for text in texts:
            talk.say(text)
        if close:
            assert self.stand.http.delete(talk.path).status_code == 204
        return talk

    def rows_of(self, talk: Talk) -> dict[str, int]:
        """How many rows of a session each table of the database has."""
        path = self.stand.url.rpartition("///")[2]
        with sqlite3.connect(f"file:/{path.lstrip('/')}?mode=ro", uri=True) as database:
            return {
                table: database.execute(f"SELECT count(*) FROM {table} WHERE session_id = ?", [talk.id]).fetchone()[0]
                for table in CONTENT
            }

    def restore(self, talk: Talk) -> bool:
        reply = self.stand.http.post("/archives/restore", json={"session_id": talk.id})
        assert reply.status_code == 200, reply.text
        return bool(reply.json()["restored"])


@pytest.fixture(scope="module")
def yard(sglang: SimulatorProcess, places: Places, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Yard]:
    folder = tmp_path_factory.mktemp("bucket")
    environment = {**BOTH, "TURNLOG_PAYLOADS": f"file://{folder}"}
    with serving(places.new("archives"), sglang.base_url, environment=environment) as made:
        yield Yard(made, folder)


def lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_what_is_archived_is_exported_as_before(yard: Yard) -> None:
    group = uuid.uuid4().hex
    talks = [yard.talk("Hello", "And then?", group_id=group, attempt=number) for number in range(3)]
    open_one = yard.talk("Hello", close=False, group_id=group)
    tree = yard.talk("Once", "more", history="tree", group_id=group)
    for talk in talks:
        yard.stand.http.put(f"{talk.path}/reward", json={"reward": 0.5})
    queries: list[dict[str, Any]] = [
        {"group_id": group},
        {"group_id": group, "replay": "true", "format": "msgpack"},
        {"group_id": group, "shape": "atropos", "explain": "true"},
        {"group_id": group, "advantage": "grpo", "format": "parquet"},
        {"session_id": talks[1].id, "explain": "true"},
    ]
    cursor = json.loads(yard.export(**queries[0]).splitlines()[1])["cursor"]
    queries.append({"group_id": group, "cursor": cursor})
    before = [yard.export(**query) for query in queries]
    nodes = tree.tree()
    logs = {talk.id: talk.events() for talk in (*talks, tree)}
    assert yard.archive()["archived"] >= 4
    after = [yard.export(**query) for query in queries]
    assert [one for one, other in zip(before, after, strict=True) if one == other] == before
    assert {session_id: yard.stand.known(session_id).events() for session_id in logs} == logs
    assert tree.tree() == nodes
    assert open_one.say("Still here?").status_code == 200
    assert yard.archive()["archived"] == 0


def test_archived_sessions_are_listed_by_their_metadata(yard: Yard) -> None:
    mark = uuid.uuid4().hex
    talks = [yard.talk("Hello", metadata={"mark": mark, "number": number}) for number in range(3)]
    yard.archive()
    open_one = yard.talk("Hello", close=False, metadata={"mark": mark, "number": 1})

    def listed(*metadata: str) -> list[str]:
        reply = yard.stand.http.get("/sessions", params={"metadata": metadata})
        assert reply.status_code == 200, reply.text
        return [one["session_id"] for one in reply.json()["sessions"]]

    assert listed(f"mark={mark}") == [open_one.id, *(talk.id for talk in reversed(talks))]
    assert listed(f"mark={mark}", "number=1") == [open_one.id, talks[1].id]


def test_a_position_of_all_events_outlives_the_archive(yard: Yard) -> None:
    [end] = lines(yard.stand.http.get("/events", params={"after": "end"}))
    talk = yard.talk("Hello", "And then?")
    other = yard.talk("Hello", close=False)
    found = lines(yard.stand.http.get("/events", params={"after": end["position"]}))
    own = [line for line in found if line["session_id"] == talk.id]
    yard.archive()
    again = lines(yard.stand.http.get("/events", params={"after": end["position"]}))
    assert sorted((one["session_id"], one["seq"]) for one in again) == sorted(
        (one["session_id"], one["seq"]) for one in found
    )
    together = [line for line in again if line["session_id"] == talk.id]
    assert [{**line, "position": None} for line in together] == [{**line, "position": None} for line in own]
    for at, line in enumerate(together[:-1]):
        rest = lines(yard.stand.http.get("/events", params={"after": line["position"], "session_id": talk.id}))
        assert [one["seq"] for one in rest if "seq" in one] == [one["seq"] for one in together[at + 1 :]]
    last = lines(yard.stand.http.get("/events", params={"after": own[-1]["position"]}))
    assert {line.get("session_id") for line in last} <= {other.id, None}
    kinds = {"after": end["position"], "type": "SessionClosed", "limit": 1}
    assert [one["session_id"] for one in lines(yard.stand.http.get("/events", params=kinds))] == [talk.id]


def test_a_reader_of_all_events_misses_none_that_comes_back(yard: Yard) -> None:
    """It passed the places of the first events while they were in the archive."""
    [end] = lines(yard.stand.http.get("/events", params={"after": "end"}))
    talk = yard.talk("Hello", close=False)
    other = yard.talk("Hello", close=False)
    yard.stand.http.delete(talk.path)
    yard.archive()
    [first] = lines(yard.stand.http.get("/events", params={"after": end["position"], "limit": 1}))
    assert first["session_id"] == other.id
    yard.restore(talk)
    rest = lines(yard.stand.http.get("/events", params={"after": first["position"]}))
    numbers = {line["seq"] for line in rest if line.get("session_id") == talk.id}
    assert numbers == {event["seq"] for event in talk.events()}


@pytest.mark.parametrize("change", ["reward", "note", "erase", "fork", "restore"])
def test_a_change_brings_it_back(yard: Yard, change: str) -> None:
    word = uuid.uuid4().hex
    talk = yard.talk(word, "And then?")
    before = yard.export(session_id=talk.id, replay="true")
    yard.archive()
    assert [len(yard.objects(word)), len(yard.objects(talk.id))] == [1, 2]
    match change:
        case "reward":
            assert yard.stand.http.put(f"{talk.path}/reward", json={"reward": 0.25}).status_code == 200
            assert [row["reward"] for row in talk.rows()] == [0.25]
            assert yard.archive()["archived"] == 1
            assert [row["reward"] for row in talk.rows()] == [0.25]
        case "note":
            assert yard.stand.http.put(f"{talk.path}/note", json={"tags": [word]}).status_code == 200
            assert [row["tags"] for row in talk.rows()] == [[word]]
            assert yard.archive()["archived"] == 1
            assert [row["tags"] for row in talk.rows()] == [[word]]
            [listed] = yard.stand.http.get("/sessions", params={"tag": word}).json()["sessions"]
            assert listed["session_id"] == talk.id
        case "fork":
            reply = yard.stand.http.post(f"{talk.path}/fork", json={"turn": 1})
            assert reply.status_code == 200, reply.text
            fork = yard.stand.known(reply.json()["sessions"][0]["session_id"])
            assert fork.rows()[0]["tokens"] == talk.rows()[0]["tokens"][: len(fork.rows()[0]["tokens"])]
        case "restore":
            assert [yard.restore(talk), yard.restore(talk)] == [True, False]
            assert yard.export(session_id=talk.id, replay="true") == before
        case "erase":
            erase = {"erase": "true"}
            first = yard.stand.http.delete(talk.path, params=erase).status_code
            assert first in (202, 204)
            until(lambda: yard.stand.http.delete(talk.path, params=erase).status_code == 204)
            assert yard.objects(word) == yard.objects(talk.id) == []
            assert talk.rows(explain="true")[0]["excluded"] == "erased"


def test_what_a_checkpoint_needs_is_not_archived(yard: Yard) -> None:
    kept, changed, later = yard.talk("Hello"), yard.talk("Hello", close=False), None
    name = uuid.uuid4().hex
    assert yard.stand.http.post("/checkpoints", json={"name": name}).status_code == 200
    yard.stand.http.delete(changed.path)
    later = yard.talk("Hello")
    before = talk_rows(kept)
    yard.archive()
    named = {line["session_id"] for line in archived(yard)}
    assert kept.id in named
    assert later.id in named
    assert changed.id not in named
    assert yard.stand.http.post(f"/checkpoints/{name}/restore").status_code == 200
    assert talk_rows(kept) == before
    assert changed.say("And then?").status_code == 200
    assert later.rows() == []
    for one in yard.stand.http.get("/checkpoints").json()["checkpoints"]:
        yard.stand.http.delete(f"/checkpoints/{one['name']}")


def archived(yard: Yard) -> list[dict[str, Any]]:
    """What DuckDB reads of the archives as they lie."""
    found = duckdb.sql(f"SELECT session_id, status FROM '{yard.folder}/archive/sessions/*.parquet'")
    return [{"session_id": row[0], "status": row[1]} for row in found.fetchall()]


def talk_rows(talk: Talk) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "cursor"} for row in talk.rows()]


def test_a_folder_has_no_urls(yard: Yard) -> None:
    response = yard.stand.http.get("/export", params={"replay": "urls"})
    assert (response.status_code, "folder" in response.json()["error"]["message"]) == (400, True)


def test_it_is_read_as_it_lies(yard: Yard) -> None:
    talk = yard.talk("Hello", "And then?")
    [row] = talk.rows()
    yard.archive()
    samples = f"'{yard.folder}/archive/samples/*.parquet'"
    where = f"WHERE session_id = '{talk.id}'"
    [[tokens, mask]] = duckdb.sql(f"SELECT tokens, loss_mask FROM {samples} {where}").fetchall()
    assert (tokens, [int(one) for one in mask]) == (row["tokens"], row["loss_mask"])
    [[count]] = duckdb.sql(f"SELECT sum(len(tokens)) FROM {samples} {where}").fetchall()
    assert count == len(row["tokens"])
    types = f"SELECT e.type FROM '{yard.folder}/archive/sessions/*.parquet', UNNEST(events_rows) AS t(e) {where}"
    assert [one for [one] in duckdb.sql(types).fetchall()] == talk.types()


async def unsound(url: str) -> list[Examined]:
    """The sessions whose heads are not what their logs say."""
    database = Database(url)
    try:
        return [one async for one in examined(database) if not one.sound]
    finally:
        await database.close()


def test_nothing_is_left_and_nothing_is_damaged(yard: Yard, clean_environment: Callable[..., None]) -> None:
    talk = yard.talk("Hello")
    yard.archive()
    if yard.stand.url.startswith("sqlite"):
        assert yard.rows_of(talk) == dict.fromkeys(CONTENT, 0)
    clean_environment(PAYLOADS=f"file://{yard.folder}")
    assert asyncio.run(unsound(yard.stand.url)) == []
    report = asyncio.run(verify_url(yard.stand.url))
    assert (report.problems, report.archived > 0, report.events > 0) == ([], True, True)
