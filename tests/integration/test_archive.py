"""Archives: rollouts leave as Parquet files and come back, over HTTP and through `kill -9`."""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zstandard

from app.crash_points import VARIABLE, CrashPoint
from app.features.archive.rows import DROPPED_AT_ONCE
from app.features.objects.names import parsed
from integration.cli import answer
from integration.places import Places, in_turn
from integration.routing import problems
from integration.stand import Stand, Talk, error_of, serving, until
from integration.test_rollouts import close, reward, rollout
from ops.simulator.process import SimulatorProcess

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SETTINGS = {
    "TURNLOG_AGENTS": "sessions",
    "TURNLOG_REPLAY": "routed_experts",
    "TURNLOG_CLOSED_REPLAY_TTL_S": "off",
    "TURNLOG_FILE_ROOT": tempfile.gettempdir(),
}
ROUTED: dict[str, Any] = {"sim": {"experts": {"layers": 4, "top_k": 4}}, "return_routed_experts": True}


@pytest.fixture
def own(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    """A server and its store, for one test."""
    with serving(places.new("archive"), sglang.base_url, environment=SETTINGS) as made:
        yield made
        assert problems(made) == []


def archived(stand: Stand, to: Path, **body: Any) -> dict[str, Any]:
    given = {"to": to.as_uri(), "older_than_s": 0, **body}
    response = stand.http.post("/archives", json=given)
    assert response.status_code == 200, response.text
    step: dict[str, Any] = response.json()
    return step


def imported(stand: Stand, file: str) -> dict[str, Any]:
    response = stand.http.post("/archives/import", json={"file": file})
    assert response.status_code == 200, response.text
    told: dict[str, Any] = response.json()
    assert told.pop("refused") == []
    return told


def exported(stand: Stand) -> dict[str, bytes]:
    """The lines of an export by session, without the places where they stand in it."""
    response = stand.http.get("/export", params={"replay": "true", "advantage": "grpo", "columns": "values"})
    assert response.status_code == 200, response.text
    lines = (re.sub(rb'"cursor":"[^"]*",?', b"", line) for line in response.content.splitlines())
    return {json.loads(line)["session_id"]: line for line in lines}


def ended(stand: Stand, turns: int = 2, **body: Any) -> Talk:
    """A session with payloads and a reward, closed."""
    talk = stand.talk(metadata={"task": "sum"}, **body)
    for number in range(turns):
        talk.say(f"Question {number}", **ROUTED)
        talk.column(number + 1, "values", [0.25] * talk.committed()[-1]["output_tokens"])
    talk.annotate("judge", {"passed": True}, writer="judge")
    reward(stand, talk, 0.5, components={"exact": 1.0})
    close(stand, talk)
    return talk


def grouped(stand: Stand, group_id: str) -> list[Talk]:
    """A group of two rollouts that the feed has been told of."""
    talks = [ended(stand, group_id=group_id) for _ in range(2)]
    given = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 100})
    assert [json.loads(line)["group_id"] for line in given.content.splitlines()] == [group_id]
    return talks


def acknowledged(stand: Stand, group_id: str) -> None:
    body = {"consumer": "trainer", "groups": [group_id]}
    assert stand.http.post("/export/groups/ack", json=body).json()["acknowledged"] == [group_id]


def test_an_erased_run_leaves_its_files(own: Stand, tmp_path: Path) -> None:
    left, stays = ended(own, run="exp-1"), ended(own, run="exp-2")
    archived(own, tmp_path)
    here = own.talk(run="exp-1")
    path = "/runs/exp-1"
    until(lambda: own.http.delete(path, params={"erase": "true"}).status_code == 204)
    assert error_of(own.http.get(left.path)) == (404, "session_closed")
    assert error_of(own.http.get(stays.path)) == (404, "session_archived")
    [file] = tmp_path.glob("*.parquet")
    assert [row["session_id"] for row in pq.read_table(file).to_pylist()].count(left.id) == 0
    assert here.types()[-1] == "SessionErased"
    assert error_of(own.http.get(path)) == (404, "not_found")


def test_what_left_comes_back_to_the_byte(own: Stand, tmp_path: Path) -> None:
    one = ended(own)
    group_id = f"g-{uuid.uuid4().hex[:8]}"
    talks = rollout(own, group_id=group_id)  # The agents' sessions name no group.
    reward(own, talks[0], 1.0)
    close(own, talks[0])
    in_group = grouped(own, group_id)
    acknowledged(own, group_id)
    open_talk = own.talk()
    open_talk.say("Still here")
    before, events = exported(own), {talk.id: talk.events() for talk in [one, *talks, *in_group]}
    step = archived(own, tmp_path)
    assert (step["archived"], step["left"], step["after"]) == (6, 0, None)
    assert exported(own).keys() == {open_talk.id}
    for talk in (one, talks[1]):
        for refused in (
            own.http.get(talk.path),
            own.http.get(f"{talk.path}/events"),
            own.http.put(f"{talk.path}/reward", json={"reward": 1.0}),
            own.http.delete(talk.path),
            talk.chat([{"role": "user", "content": "Third"}]),
        ):
            assert error_of(refused) == (404, "session_archived")
            assert step["file"] in refused.json()["error"]["message"]
    assert error_of(own.http.post("/sessions", json={"session_id": one.id})) == (409, "session_closed")
    assert error_of(own.http.post("/sessions", json={"parent_session_id": one.id})) == (404, "session_closed")
    assert archived(own, tmp_path)["archived"] == 0
    assert imported(own, step["file"]) == {"imported": 6, "there": 0}
    assert exported(own) == before
    assert {talk_id: own.known(talk_id).events() for talk_id in events} == events
    assert imported(own, step["file"]) == {"imported": 0, "there": 6}
    asked = own.http.get("/export/groups", params={"consumer": "another", "size": 100})
    assert asked.text == "", "the group was acknowledged"
    again = archived(own, tmp_path)
    assert again["archived"] == 6
    assert imported(own, again["file"])["imported"] == 6
    assert exported(own) == before


def test_payloads_in_objects_leave_with_their_session(
    sglang: SimulatorProcess, places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file has their bytes, and the bucket has them no more; what comes back is in the database."""
    bucket = tmp_path / "bucket"
    monkeypatch.setenv("TURNLOG_PAYLOADS", bucket.as_uri())  # also for `problems`
    settings = {**SETTINGS, "TURNLOG_PAYLOADS": bucket.as_uri(), "TURNLOG_PAYLOADS_KEEP_S": "0"}
    experts = {"layers": 48, "top_k": 4, "experts": 128}

    def objects() -> list[str]:
        names = (str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file())
        return [name for name in names if parsed(name) is not None]

    with serving(places.new("archive"), sglang.base_url, environment=settings) as stand:
        talk = stand.talk()
        talk.say("Question", sim={"experts": experts, "completion_tokens": 200}, return_routed_experts=True)
        reward(stand, talk, 0.5)
        close(stand, talk)
        assert len(objects()) == 1
        before = exported(stand)
        step = archived(stand, tmp_path / "archive")
        assert step["archived"] == 1
        until(lambda: not objects())
        assert imported(stand, step["file"]) == {"imported": 1, "there": 0}
        assert exported(stand) == before
        assert objects() == []
        assert problems(stand) == []


def test_what_stays(own: Stand, tmp_path: Path) -> None:
    """No reward, open, in a checkpoint, not acknowledged, another of its group or rollout not ended, too young."""
    unrewarded = own.talk()
    unrewarded.say("Hello")
    close(own, unrewarded)
    root, _ = (talks := rollout(own, agents=("one",)))
    reward(own, root, 1.0)
    group_id = f"g-{uuid.uuid4().hex[:8]}"
    grouped(own, group_id)
    assert archived(own, tmp_path)["archived"] == 0
    assert error_of(own.http.post("/archives", json={"to": "ftp://x", "older_than_s": 0})) == (400, "invalid_request")
    close(own, root)
    assert own.http.post("/checkpoints", json={"name": "cut"}).status_code == 200
    assert archived(own, tmp_path)["archived"] == 0
    assert own.http.delete("/checkpoints/cut").status_code == 204
    assert archived(own, tmp_path, older_than_s=3600)["archived"] == 0
    assert archived(own, tmp_path)["archived"] == len(talks)
    acknowledged(own, group_id)
    late = ended(own, group_id=group_id)
    assert archived(own, tmp_path, older_than_s=3600)["archived"] == 0
    assert archived(own, tmp_path)["archived"] == 3
    assert error_of(own.http.get(late.path)) == (404, "session_archived")


def test_what_a_run_has_acknowledged_leaves_and_no_other_runs(own: Stand, tmp_path: Path) -> None:
    """Of groups of one id; a replaced rollout, which has no reward, and an evaluation hold their group up no more."""
    group_id = f"g-{uuid.uuid4().hex[:8]}"
    left = ended(own, group_id=group_id, run="b")
    replaced = own.talk(group_id=group_id, run="a", attempt=0)
    replaced.say("Hello")
    judged = own.talk(group_id=group_id, run="a", evaluation=True)
    gone = ended(own, group_id=group_id, run="a", attempt=0)
    given = own.http.get("/export/groups", params={"consumer": "trainer", "run": "*", "size": 9}).text
    assert {json.loads(line)["run"] for line in given.splitlines()} == {"a", "b"}
    body = {"consumer": "trainer", "groups": [group_id], "run": "a"}
    assert own.http.post("/export/groups/ack", json=body).json()["acknowledged"] == [group_id]
    step = archived(own, tmp_path)
    assert (step["archived"], error_of(own.http.get(gone.path))) == (1, (404, "session_archived"))
    assert error_of(own.http.get(left.path)) == (404, "session_closed")
    assert {own.http.get(one.path).status_code for one in (replaced, judged)} == {200}
    imported(own, step["file"])
    assert {one["session_id"] for one in own.get("/sessions", run="a")["sessions"]} == {
        *(one.id for one in (replaced, judged, gone))
    }
    assert own.get(f"/groups/{group_id}", run="a")["complete"] is True
    assert own.http.get("/export/groups", params={"consumer": "trainer", "run": "a"}).text == ""


def test_steps_and_rows_for_other_tools(own: Stand, tmp_path: Path) -> None:
    talks = [ended(own) for _ in range(3)]
    rows = {row["session_id"]: row for row in own.rows()}
    files, after = [], None
    for _ in range(3):
        step = archived(own, tmp_path, limit=1, after=after)
        files.append(step["file"].removeprefix("file://"))
        after = step["after"]
    assert archived(own, tmp_path, limit=1, after=after)["archived"] == 0
    assert {one.name for one in tmp_path.iterdir()} == {Path(file).name for file in files}
    for talk, file in zip(talks, files, strict=True):
        [row] = pq.read_table(file).to_pylist()
        assert (row["session_id"], row["reward"], json.loads(row["metadata"])) == (talk.id, 0.5, {"task": "sum"})
        [sample] = row["samples"]
        assert sample["tokens"] == rows[talk.id]["tokens"]
        assert sample["loss_mask"] == rows[talk.id]["loss_mask"]
        assert row["events_rows"][0]["type"] == "SessionCreated"


def test_an_archived_session_is_erased(own: Stand, tmp_path: Path) -> None:
    kept, erased = ended(own), rollout(own)
    reward(own, erased[0], 1.0)
    close(own, erased[0])
    step = archived(own, tmp_path)
    assert imported(own, step["file"])["imported"] == 4
    again = archived(own, tmp_path)
    assert again["archived"] == 4
    until(lambda: own.http.delete(erased[0].path, params={"erase": "true"}).status_code == 204)
    bodies = [file.read_bytes() for file in tmp_path.iterdir()]
    assert len(bodies) == 2
    assert not any(talk.id.encode() in body for talk in erased for body in bodies)
    assert own.http.delete(erased[1].path, params={"erase": "true"}).status_code == 204
    assert error_of(own.http.get(erased[0].path)) == (404, "session_closed")
    assert error_of(own.http.post("/sessions", json={"session_id": erased[0].id})) == (409, "session_closed")
    assert error_of(own.http.post("/archives/import", json={"file": again["file"]})) == (404, "not_found")
    moved = own.http.get(kept.path).json()["error"]["message"].rpartition(" ")[2]
    assert imported(own, moved) == {"imported": 1, "there": 0}
    assert len(kept.rows()) == 1
    until(lambda: own.http.delete(kept.path, params={"erase": "true"}).status_code == 204)
    assert list(tmp_path.iterdir()) == []


def refused(stand: Stand, file: str) -> dict[str, Any]:
    """What an import says, without the words of its refusals."""
    told: dict[str, Any] = stand.http.post("/archives/import", json={"file": file}).json()
    assert all(one["reason"] for one in told["refused"])
    return {**told, "refused": {one["session_id"] for one in told["refused"]}}


def test_only_the_file_that_the_index_names_brings_a_session_back(own: Stand, tmp_path: Path) -> None:
    """An older file would bring an older reward; another session of it comes back all the same."""
    talk, other = ended(own), ended(own)
    first = archived(own, tmp_path)["file"]
    assert imported(own, first)["imported"] == 2
    reward(own, talk, 0.75)
    assert refused(own, first) == {"imported": 0, "there": 2, "refused": set()}
    second = archived(own, tmp_path, limit=1)["file"]
    assert error_of(own.http.get(talk.path if second in own.http.get(talk.path).text else other.path))[0] == 404
    newest = archived(own, tmp_path)["file"]
    assert {second, newest} != {first}
    assert refused(own, first) == {"imported": 0, "there": 0, "refused": {talk.id, other.id}}
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(Path(first.removeprefix("file://")).read_bytes())
    assert error_of(own.http.post("/archives/import", json={"file": copy.as_uri()})) == (400, "invalid_request")
    assert imported(own, second)["imported"] == imported(own, newest)["imported"] == 1
    assert [row["reward"] for row in talk.rows()] == [0.75]


def test_an_erased_session_is_refused_and_its_neighbour_comes_back(own: Stand, tmp_path: Path) -> None:
    erased, kept = ended(own), ended(own)
    file = Path(archived(own, tmp_path)["file"].removeprefix("file://"))
    before = file.read_bytes()
    until(lambda: own.http.delete(erased.path, params={"erase": "true"}).status_code == 204)
    moved = Path(own.http.get(kept.path).json()["error"]["message"].rpartition(" ")[2].removeprefix("file://"))
    moved.write_bytes(before)  # as a backup of the file would
    assert refused(own, moved.as_uri()) == {"imported": 1, "there": 0, "refused": {erased.id}}


DAMAGE = (
    "update blobs set data = X'00' where kind = 'metadata' and session_id = ?",
    "update turns set exchange = X'00' where session_id = ?",
    "update chunks set data = X'00' where session_id = ? and tombstoned_by is null",
)


def test_a_damaged_rollout_is_left_and_told_of(sglang: SimulatorProcess, tmp_path: Path) -> None:
    with serving(tmp_path / "damaged", sglang.base_url, environment=SETTINGS) as stand:
        good, *bad = [ended(stand) for _ in range(len(DAMAGE) + 1)]
        with contextlib.closing(sqlite3.connect(stand.server.database_path)) as connection, connection:
            for talk, damage in zip(bad, DAMAGE, strict=True):
                assert connection.execute(damage, (talk.id,)).rowcount
        step = archived(stand, tmp_path / "archive")
        assert (step["archived"], step["left"]) == (1, len(bad))
        assert good.rows() == []
        told = stand.server.log_path.read_text()
        assert [talk.id for talk in bad if talk.id not in told] == []
        assert archived(stand, tmp_path / "archive")["left"] == len(bad)


OUTSIDE = ("/etc", "/", "/etc/cron.d", "{root}/../other", "{root}x", "{root}/link", "{root}/a/../../b", "{root}/\0")


@pytest.mark.threat("server-side files named by a request")
def test_a_requests_folder_lies_below_the_file_root(sglang: SimulatorProcess, places: Places, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to("/etc")
    (root / "turnlog-1-0.parquet").symlink_to("/etc/passwd")

    def refuses(stand: Stand, url: str, *words: str) -> None:
        bodies = (
            ("/archives", {"to": url, "older_than_s": 0}),
            ("/archives/import", {"file": f"{url}/turnlog-1-0.parquet"}),
        )
        for path, body in bodies:
            answer = stand.http.post(path, json=body)
            assert error_of(answer) == (400, "invalid_request"), url
            assert any(word in answer.text for word in words)

    environment = {**SETTINGS, "TURNLOG_FILE_ROOT": str(root)}
    with serving(places.new("rooted"), sglang.base_url, environment=environment) as stand:
        ended(stand)
        for folder in OUTSIDE:
            refuses(stand, "file://" + folder.format(root=root), "TURNLOG_FILE_ROOT", "path")
        linked = stand.http.post("/archives/import", json={"file": f"file://{root}/turnlog-1-0.parquet"})
        assert error_of(linked)[0] == 400
        assert imported(stand, archived(stand, root / "inside")["file"])["imported"] == 1
    with serving(places.new("rootless"), sglang.base_url, environment={**SETTINGS, "TURNLOG_FILE_ROOT": ""}) as stand:
        refuses(stand, root.as_uri(), "TURNLOG_FILE_ROOT")


Change = Callable[[dict[str, Any]], object]
HOSTILE: dict[str, Change] = {
    "id": lambda row: row.update(session_id="../victim", rollout_id="../victim"),
    "dots": lambda row: row.update(session_id="..", rollout_id=".."),
    "another root": lambda row: row.update(rollout_id="another"),
    "NaN date": lambda row: row.update(created_at=math.nan),
    "endless date": lambda row: row.update(closed_at=math.inf),
    "far date": lambda row: row.update(updated_at=1e18),
    "NaN reward": lambda row: row.update(reward=math.nan),
    "no date": lambda row: row.update(closed_at=None),
    "open": lambda row: row.update(status="open"),
    "claims": lambda row: row.update(open_turns=1),
    "version": lambda row: row.update(version=row["version"] + 1),
    "large number": lambda row: row.update(turns=2**40),
    "NUL": lambda row: row.update(group_id="a\0b"),
    "NaN event": lambda row: row["events_rows"][0].update(at=math.nan),
    "no event": lambda row: row["events_rows"][1].update(data='{"turn": NaN}'),
    "a type": lambda row: row["events_rows"][1].update(type="Unknown"),
    "no events": lambda row: row.update(events_rows=None),
    "another run": lambda row: row.update(run="b"),
    "another group": lambda row: row.update(feed=FEED),
    "content": lambda row: row["turns_rows"][0].update(exchange=zstandard.compress(b"\0" * (300 << 20))),
    "blob": lambda row: row["blobs_rows"][0].update(data=b"\0"),
    "chunk": lambda row: row["chunks_rows"][0].update(data=zstandard.compress(b"\0" * (2 << 20))),
    "twice": lambda row: row["turns_rows"].append(row["turns_rows"][0]),
    "long name": lambda row: row["annotation_columns_rows"][0].update(name="n" * 65),
}
FEED = {
    "run": "default",
    "group_id": "g",
    "sessions": 1,
    "erased": 0,
    "unfinished": 0,
    "arrived": 1,
    "measured": False,
    "handed_out": 0,
}


def test_hostile_rows_of_a_file_are_refused_alone(own: Stand, tmp_path: Path) -> None:
    """Of a file that the index names; a neighbour comes back beside them."""
    good, *bad = [ended(own, turns=1) for _ in range(len(HOSTILE) + 1)]
    file = Path(archived(own, tmp_path)["file"].removeprefix("file://"))
    original, table = file.read_bytes(), pq.read_table(file)
    rows = {row["session_id"]: row for row in table.to_pylist()}
    for talk, change in zip(bad, HOSTILE.values(), strict=True):
        change(rows[talk.id])
    rewrite(file, list(rows.values()), table.schema)
    told = refused(own, file.as_uri())
    assert (told["imported"], told["there"], len(told["refused"])) == (1, 0, len(HOSTILE)), told
    assert [row["session_id"] for row in own.rows()] == [good.id]
    file.write_bytes(original)
    assert imported(own, file.as_uri()) == {"imported": len(HOSTILE), "there": 1}


def rewrite(file: Path, changed: list[dict[str, Any]], schema: Any, **options: Any) -> None:
    settings = {"use_dictionary": False, "write_page_checksum": True, "compression": "zstd", **options}
    pq.write_table(pa.Table.from_pylist(changed, schema), file, **settings)


def peak_of(stand: Stand) -> int:
    """Bytes of the server's memory at its highest."""
    status = Path(f"/proc/{stand.server.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) << 10


def test_a_file_that_unpacks_to_too_much_is_refused_before_it_is(own: Stand, tmp_path: Path) -> None:
    ended(own)
    file = Path(archived(own, tmp_path)["file"].removeprefix("file://"))
    table = pq.read_table(file)
    [row] = table.to_pylist()
    event = row["events_rows"][0]
    large = {**row, "events_rows": [{**event, "data": event["data"] + " " * (100 << 20)}]}
    memory = peak_of(own)
    for changed, options in ((large, {}), (row, {"use_dictionary": True})):
        rewrite(file, [changed], table.schema, **options)
        assert error_of(own.http.post("/archives/import", json={"file": file.as_uri()})) == (400, "invalid_request")
    assert peak_of(own) < memory + (100 << 20)
    rewrite(file, [row], table.schema.remove_metadata())
    assert error_of(own.http.post("/archives/import", json={"file": file.as_uri()})) == (400, "invalid_request")
    file.write_bytes(b"PAR1")
    assert error_of(own.http.post("/archives/import", json={"file": file.as_uri()})) == (400, "invalid_request")


POINTS: tuple[CrashPoint, ...] = (
    *("before_archive_put", "after_archive_put", "in_archive", "after_archived", "in_content_dropped"),
    *("in_import", "after_imported", "after_erasing_begun", "after_archive_rewritten", "after_archive_deleted"),
)


@contextlib.contextmanager
def killed_at(stand: Stand, point: CrashPoint) -> Iterator[None]:
    """The server is killed while what is inside waits for it, and started again."""
    stand.server.stop()
    stand.server.environment[VARIABLE] = f"{point}:1"
    stand.server.start()
    with contextlib.suppress(httpx.TransportError):
        yield
    assert stand.server.wait() == -9
    del stand.server.environment[VARIABLE]
    stand.server.start()


@pytest.mark.long
@in_turn(POINTS)
def test_kill_9(own: Stand, tmp_path: Path, point: CrashPoint) -> None:
    """While sessions leave, while they return, or while one that left is erased."""
    talks = [ended(own), ended(own, turns=10 * DROPPED_AT_ONCE // 8), ended(own)]
    before, counts = exported(own), [len(talk.committed()) for talk in talks]
    at = POINTS.index(point)
    file = "" if at < 5 else archived(own, tmp_path)["file"]
    erasing = {"url": talks[0].path, "params": {"erase": "true"}}
    with killed_at(own, point):
        for _ in range(100):
            if at < 5:
                archived(own, tmp_path)
            elif at < 7:
                imported(own, file)
            else:
                own.http.delete(**erasing)
    if at >= 7:
        until(lambda: own.http.delete(**erasing).status_code == 204)
        assert all(talks[0].id.encode() not in one.read_bytes() for one in tmp_path.iterdir())
        assert error_of(own.http.get(talks[1].path)) == (404, "session_archived")
        [left] = tmp_path.iterdir()
        assert imported(own, left.as_uri()) == {"imported": 2, "there": 0}
        return
    if at < 5:
        there = exported(own)
        assert there.items() <= before.items()
        assert archived(own, tmp_path)["archived"] == len(there)
        for one in sorted(tmp_path.iterdir()):
            refused(own, one.as_uri())
    else:
        told = imported(own, file)
        assert (told["imported"], told["there"]) == ((2, 1) if point == "after_imported" else (3, 0))
    assert exported(own) == before
    assert [len(talk.committed()) for talk in talks] == counts


def test_the_commands(own: Stand, tmp_path: Path, clean_environment: Any) -> None:
    clean_environment(URL=own.server.base_url)
    talk = ended(own)
    told = answer("archive", "--older-than", "0s", "--to", tmp_path.as_uri())
    assert (told["archived"], len(told["files"])) == (1, 1)
    assert answer("import", told["files"][0].removeprefix("file://")) == {"imported": 1, "there": 0, "refused": []}
    assert len(talk.rows()) == 1


def test_followers_learn_of_the_erasure_of_an_archived_session(own: Stand, tmp_path: Path) -> None:
    talks = rollout(own)
    reward(own, talks[0], 1.0, components={"secret": 1.0})
    close(own, talks[0])
    neighbour = ended(own)
    cursor = own.http.get("/export", params={"explain": "true"}).headers["x-turnlog-next-cursor"]
    position = json.loads(own.http.get("/events").content.splitlines()[-1])["position"]
    archived(own, tmp_path)
    until(lambda: own.http.delete(talks[0].path, params={"erase": "true"}).status_code == 204)
    erased = {talk.id for talk in talks}

    def events() -> list[dict[str, Any]]:
        return [json.loads(line) for line in own.http.get("/events", params={"after": position}).content.splitlines()]

    def told() -> set[str]:
        return {line["session_id"] for line in events() if line.get("type") == "SessionErased"}

    until(lambda: told() == erased)  # An event is read once no older transaction runs.
    lines = events()
    assert "secret" not in str(lines)
    window = own.http.get("/export", params={"explain": "true", "cursor": cursor}).text.splitlines()
    assert {one["session_id"]: one["excluded"] for one in map(json.loads, window)} == dict.fromkeys(erased, "erased")
    assert talks[0].events()[-1]["type"] == "SessionErased"
    assert error_of(own.http.get(neighbour.path)) == (404, "session_archived")
