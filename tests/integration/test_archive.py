"""Archives: rollouts leave as Parquet files and come back, over HTTP and through `kill -9`."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.crash_points import VARIABLE, CrashPoint
from app.features.archive.rows import DROPPED_AT_ONCE
from app.store.object_names import parsed
from integration.cli import answer
from integration.places import Places
from integration.routing import problems
from integration.stand import Stand, Talk, error_of, serving, until
from integration.test_rollouts import close, reward, rollout
from ops.simulator.process import SimulatorProcess

pq = pytest.importorskip("pyarrow.parquet")

SETTINGS = {"TURNLOG_AGENTS": "sessions", "TURNLOG_REPLAY": "routed_experts", "TURNLOG_CLOSED_REPLAY_TTL_S": "off"}
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
    assert [json.loads(line)["group_id"] for line in given.text.splitlines()] == [group_id]
    return talks


def acknowledged(stand: Stand, group_id: str) -> None:
    body = {"consumer": "trainer", "groups": [group_id]}
    assert stand.http.post("/export/groups/ack", json=body).json()["acknowledged"] == [group_id]


def test_what_left_comes_back_to_the_byte(own: Stand, tmp_path: Path) -> None:
    one = ended(own)
    talks = rollout(own)
    reward(own, talks[0], 1.0)
    close(own, talks[0])
    group_id = f"g-{uuid.uuid4().hex[:8]}"
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


def test_followers_and_cursors_go_on(own: Stand, tmp_path: Path) -> None:
    first = ended(own)
    lines = own.http.get("/events").text.splitlines()
    position = json.loads(lines[-1])["position"]
    assert archived(own, tmp_path)["archived"] == 1
    own.server.stop()
    own.server.start()
    second = own.talk()
    second.say("Later")
    answered = own.http.get("/events", params={"after": position})
    assert answered.status_code == 200, answered.text
    assert {one.get("session_id") for one in map(json.loads, answered.text.splitlines())} == {second.id}
    assert [row["session_id"] for row in own.rows()] == [second.id]
    assert first.id != second.id


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


def test_pandas_reads_it(own: Stand, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    talk = ended(own)
    [row] = talk.rows()
    file = archived(own, tmp_path)["file"].removeprefix("file://")
    frame = pandas.read_parquet(file, columns=["session_id", "samples"]).explode("samples")
    assert [list(sample["tokens"]) for sample in frame["samples"]] == [row["tokens"]]


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


def test_an_id_that_is_anothers_refuses_the_file(own: Stand, tmp_path: Path) -> None:
    talk = ended(own)
    file = archived(own, tmp_path)["file"]
    copy = tmp_path / "copy.parquet"
    copy.write_bytes(Path(file.removeprefix("file://")).read_bytes())
    assert imported(own, file)["imported"] == 1
    reward(own, talk, 0.75)
    assert error_of(own.http.post("/archives/import", json={"file": copy.as_uri()})) == (409, "session_exists")
    until(lambda: own.http.delete(talk.path, params={"erase": "true"}).status_code == 204)
    assert error_of(own.http.post("/archives/import", json={"file": copy.as_uri()})) == (409, "session_closed")
    copy.write_bytes(b"PAR1")
    assert error_of(own.http.post("/archives/import", json={"file": copy.as_uri()})) == (400, "invalid_request")


LEAVING: tuple[CrashPoint, ...] = (
    "before_archive_put",
    "after_archive_put",
    "in_archive",
    "after_archived",
    "in_content_dropped",
)
RETURNING: tuple[CrashPoint, ...] = ("in_import", "after_imported")
ERASING: tuple[CrashPoint, ...] = ("after_erasing_begun", "after_archive_rewritten", "after_archive_deleted")


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


@pytest.mark.parametrize("point", LEAVING)
def test_kill_9_while_sessions_leave(own: Stand, tmp_path: Path, point: CrashPoint) -> None:
    talks = [ended(own), ended(own, turns=10 * DROPPED_AT_ONCE // 8), ended(own)]
    before, counts = exported(own), [len(talk.committed()) for talk in talks]
    with killed_at(own, point):
        archived(own, tmp_path)
    there = exported(own)
    assert there.items() <= before.items()
    step = archived(own, tmp_path)
    for file in sorted(tmp_path.iterdir()):
        imported(own, file.as_uri())
    assert step["archived"] == len(there)
    assert exported(own) == before
    assert [len(talk.committed()) for talk in talks] == counts


@pytest.mark.parametrize("point", RETURNING)
def test_kill_9_while_sessions_return(own: Stand, tmp_path: Path, point: CrashPoint) -> None:
    for _ in range(3):
        ended(own)
    before = exported(own)
    file = archived(own, tmp_path)["file"]
    with killed_at(own, point):
        imported(own, file)
    told = imported(own, file)
    assert told["imported"] + told["there"] == 3
    assert told["there"] == (1 if point == "after_imported" else 0)
    assert exported(own) == before


@pytest.mark.parametrize("point", ERASING)
def test_kill_9_while_an_archived_session_is_erased(own: Stand, tmp_path: Path, point: CrashPoint) -> None:
    kept, erased = ended(own), ended(own)
    archived(own, tmp_path)
    with killed_at(own, point):
        for _ in range(100):
            own.http.delete(erased.path, params={"erase": "true"})
    until(lambda: own.http.delete(erased.path, params={"erase": "true"}).status_code == 204)
    assert all(erased.id.encode() not in file.read_bytes() for file in tmp_path.iterdir())
    assert error_of(own.http.get(kept.path)) == (404, "session_archived")
    [file] = tmp_path.iterdir()
    assert imported(own, file.as_uri()) == {"imported": 1, "there": 0}


def test_the_commands(own: Stand, tmp_path: Path, clean_environment: Any) -> None:
    clean_environment(URL=own.server.base_url)
    talk = ended(own)
    told = answer("archive", "--older-than", "0s", "--to", tmp_path.as_uri())
    assert (told["archived"], len(told["files"])) == (1, 1)
    assert answer("import", told["files"][0].removeprefix("file://")) == {"imported": 1, "there": 0}
    assert len(talk.rows()) == 1
