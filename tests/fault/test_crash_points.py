"""`kill -9` at every named point: what was acknowledged stays, and the first retry ends with exactly one of everything.

On SQLite the process is started again, on PostgreSQL a second one, which has run all the while, goes on at once. Each
case of the table is a story, which is told up to the request that the kill interrupts, and goes on with whoever serves
then. What differs between the databases is how a dead process's store is taken over: some points of a turn are tried on
both, the rest on one of them. The simulation (`test_simulation.py`) kills processes of both at any await.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from helpers.databases import Postgres, SqliteTemplate
from integration.stand import Stand, Talk, until, user

from app.crash_points import POINTS, VARIABLE, CrashPoint
from fault.forking import ForkedServer
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

BOTH = ("sqlite", "postgresql")

ELSEWHERE: dict[str, tuple[CrashPoint, ...]] = {
    "fault/test_fleet_faults.py": ("after_gate_shut", "before_gate_opened"),
    "fault/test_objects.py": ("before_put", "after_put", "after_copied", "after_object_deleted"),
    "integration/test_archive.py": (
        *("before_archive_put", "after_archive_put", "in_archive", "after_archived", "in_content_dropped"),
        *("after_erasing_begun", "after_archive_rewritten", "after_archive_deleted", "in_import", "after_imported"),
    ),
    "integration/test_webhooks.py": ("after_engine_died", "after_webhook_sent", "in_webhook_moved"),
}
"""Points that need more than one server, engine and store, and who tries them."""

LARGE: dict[str, Any] = {
    "experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1},
    "completion_tokens": 1500,
}
"""More than 2 MB of ids that cannot be narrowed: chunks that are staged, a reply that leaves in pieces."""

BRIEF: dict[str, Any] = {"completion_tokens": 5, "reasoning": False}

Story = Generator[Callable[[], object], Stand, None]
"""Yields the request that the kill interrupts; is sent the stand of whoever serves afterwards."""


@dataclass(frozen=True)
class Case:
    """A story whose process dies when it has come by `point` so often.

    Of a turn there are `generations` in the end: 1 where the crash was before the engine call or after the commit, when
    it has `landed`. With `of_text` its session captures text alone, of the vendor. `restarts`: only a start finishes
    what was begun, on PostgreSQL too.
    """

    tell: Callable[[Site, Stand, Case, Tally], Story]
    point: CrashPoint
    times: int = 1
    generations: int = 2
    landed: bool = False
    sim: dict[str, Any] | None = None
    fault: str | None = None
    of_text: bool = False
    restarts: bool = False

    def __str__(self) -> str:
        kind = "-large" if self.sim else "-text" if self.of_text else ""
        return f"{self.tell.__name__}-{self.point}-{self.times}{kind}"


@dataclass
class Site:
    """One store, whose server is killed; on PostgreSQL `other` serves it as well. `acknowledged` is of one case."""

    url: str
    engine: SimulatorProcess
    vendor: SimulatorProcess
    server: ForkedServer
    other: ForkedServer | None = None
    acknowledged: list[Acknowledged] = field(default_factory=list)
    killed: float = 0.0

    @contextlib.contextmanager
    def stand(self, server: ForkedServer, case: Case) -> Iterator[Stand]:
        made = Stand(server, (self.vendor if case.of_text else self.engine).base_url)
        yield made
        made.close()

    def after(self, case: Case) -> ForkedServer:
        """Who serves the store now."""
        return self.other if self.other is not None and not case.restarts else self.server.start()

    def acknowledge(self, talk: Talk, reply: httpx.Response) -> httpx.Response:
        """The client has seen this 200."""
        assert reply.status_code == 200, reply.text
        self.acknowledged.append(acknowledgement(talk.id, reply))
        return reply

    def say(self, talk: Talk, text: str, **fields: Any) -> httpx.Response:
        return self.acknowledge(talk, talk.say(text, **fields))


@pytest.fixture(scope="module")
def vendor() -> Iterator[SimulatorProcess]:
    with SimulatorProcess("--dialect", "openai") as upstream:
        yield upstream


@pytest.fixture(scope="module", params=BOTH)
def site(
    request: pytest.FixtureRequest,
    engine: SimulatorProcess,
    vendor: SimulatorProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("crash-points")
    upstreams = json.dumps({"vendor": {"url": vendor.base_url, "model": "large"}})
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            template: SqliteTemplate = request.getfixturevalue("sqlite_template")
            url = template.copy(folder / "turnlog.db")
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            url = stack.enter_context(postgres.database())
        servers = [ForkedServer(folder, url, [engine.base_url], TURNLOG_TEXT_UPSTREAMS=upstreams) for _ in range(2)]
        made = Site(url, engine, vendor, servers[0])
        if request.param == "postgresql":
            made.other = servers[1].start()
            stack.callback(made.other.stop)
        stack.callback(made.server.stop)
        yield made


def turn(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """The session's second turn, whose point its first may have come by as well."""
    fields = {"sim": case.sim, "return_routed_experts": True} if case.sim else {}
    key = {"idempotency-key": f"second {case.point}"}
    of_text = {"capture": "text", "upstream": "vendor", "params": None} if case.of_text else {}
    talk = stand.talk(group_id="crash", **{"params": {"top_logprobs": 3}, **of_text})
    site.say(talk, "First")
    if case.fault:
        assert stand.sim.post("/sim/faults", json={"fault": case.fault}).status_code == 200
    sent = [*talk.messages, user("Second")]
    stand = yield lambda: talk.chat(sent, headers=key, **fields)
    again = stand.known(talk.id)
    reply = site.acknowledge(again, again.chat(sent, headers=key, **fields))
    tally.recovered(monotonic() - site.killed)
    assert ("x-turnlog-replayed" in reply.headers) is case.landed
    assert again.chat(sent, headers=key, **fields).content == reply.content
    generations = stand.stats()["started"] if case.of_text else again.generations()
    assert generations == 1 + case.generations
    tally.doubled += len(again.committed()) - 2
    assert [record["response"] for record in again.state()["records"]][1] == reply.json()
    again.messages = [*sent, reply.json()["choices"][0]["message"]]
    site.say(again, "Third")
    rows = again.rows(top_k=1)
    assert len(rows) == (not case.of_text)
    for row in rows:
        assert [token >= 0 for [token] in row["top_ids"]] == [mask == 1 for mask in row["sampled_mask"]]


def limit_reached(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    talk = stand.talk(limits={"tokens": 8 if case.point == "in_spent" else 5})
    site.say(talk, "First", sim=BRIEF)
    sent = [*talk.messages, user("Second")]
    stand = yield lambda: talk.chat(sent, sim=BRIEF)
    again = stand.known(talk.id)
    assert again.chat(sent, sim=BRIEF).status_code == 409
    assert again.types().count("LimitReached") == 1
    [row] = again.rows()
    assert (row["limit"], again.state()["session"]["budgets"][0]["left"]) == ("tokens", {"tokens": 0})


def creation(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    body = {"session_id": f"created-{case.point}", "metadata": {"task": 7}, "group_id": "crash"}
    site.say(stand.talk(), "I was here before")
    stand = yield lambda: stand.http.post("/sessions", json=body)
    assert stand.http.post("/sessions", json=body).status_code == 200
    talk = stand.known(str(body["session_id"]))
    assert talk.types() == ["SessionCreated"]
    site.say(talk, "First")


def three_forks(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """Killed at the second of three new sessions: those that there are are whole, and a retry makes the rest."""
    group, headers = f"forks-{case.point}", {"idempotency-key": f"fork {case.point}"}
    body = {"turn": 1, "count": 3, "group_id": group}
    talk = stand.talk()
    site.say(talk, "First", sim=LARGE, return_routed_experts=True)
    stand = yield lambda: stand.http.post(f"{talk.path}/fork", json=body, headers=headers)
    [tokens] = (row["tokens"] for row in stand.known(talk.id).rows())
    made = {row["session_id"]: row["tokens"] for row in stand.rows(group_id=group)}
    assert list(made.values()) == [tokens] * (2 if case.point == "after_fork" else 1)
    again = stand.http.post(f"{talk.path}/fork", json=body, headers=headers)
    assert again.status_code == 200, again.text
    ids = [one["session_id"] for one in again.json()["sessions"]]
    assert set(made) < set(ids) == {row["session_id"] for row in stand.rows(group_id=group)}
    fork = stand.known(ids[2])
    fork.messages = talk.messages
    site.say(fork, "Second")


def word(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """Its reward, a note, its finish, its close: there whole or not at all, and asked for again it is there."""
    what = case.point.partition("_")[2]
    method, path, body, kind = {
        "reward": ("PUT", "/reward", {"reward": 0.5}, "RewardAssigned"),
        "annotation": ("PUT", "/annotations/note", {"value": "Seen"}, "AnnotationWritten"),
        "finish": ("POST", "/finish", {"producer_finished": True}, "SessionFinished"),
        "close": ("DELETE", "", None, "SessionClosed"),
    }[what]
    talk = stand.talk(group_id="crash")
    site.say(talk, "First")
    stand = yield lambda: stand.http.request(method, talk.path + path, json=body)
    again = stand.known(talk.id)
    assert again.types().count(kind) == case.point.startswith("after")
    done = stand.http.request(method, talk.path + path, json=body).status_code
    assert done == (200 if body else 404 if case.point == "after_close" else 204)
    [row] = again.rows()
    closed = what == "close"
    assert (row["final"], len(row["turns"]), again.types().count("SessionClosed")) == (closed, 1, closed)
    assert row["reward"] == (0.5 if what == "reward" else None)
    assert row["note"] == ("Seen" if what == "annotation" else None)


def erasure(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """It is taken up again where it was broken off, and then nothing of the content is left in the files."""
    talk = stand.talk()
    site.say(stand.talk(), "I stay")
    talk.say("To be forgotten", sim=LARGE, return_routed_experts=True)
    reward = {"reward": 0.5, "components": {f"forgotten-{talk.id}": 1.0}}
    assert stand.http.put(f"{talk.path}/reward", json=reward).status_code == 200
    talk.noted(note=f"forgotten-{talk.id}", tags=["forgotten"])
    talk.column(1, "values", [0.25] * talk.committed()[0]["output_tokens"])
    frames = stored_frames(site.url, talk)
    stand = yield lambda: stand.http.delete(talk.path, params={"erase": "true"})
    again = stand.known(talk.id)
    erased = stand.http.delete(talk.path, params={"erase": "true"})
    assert erased.status_code == 204, erased.text
    assert [frame for frame in frames if in_files(site.url, frame)] == []
    types = again.types()
    assert (types.count("SessionClosed"), types.count("SessionErased")) == (1, 1)
    assert again.rows() == []
    assert "forgotten" not in stand.http.get(f"{talk.path}/events").text
    assert stand.http.post("/sessions", json={"session_id": talk.id}).status_code == 409


def runs_erasure(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """Begun to be erased, a run is erased by whoever serves next, and its name is free; its followers are told."""
    run = f"run-{case}"
    talks = [stand.talk(run=run) for _ in range(3)]
    for talk in talks:
        talk.say("To be forgotten", sim=LARGE, return_routed_experts=True)
        talk.noted(note=f"forgotten-{talk.id}")
    child = stand.talk(parent_session_id=talks[0].id)
    site.say(stand.talk(), "I stay")
    assert stand.http.put(f"/runs/{run}", json={"note": f"forgotten-{run}"}).status_code == 200
    frames = [frame for talk in talks for frame in stored_frames(site.url, talk)]
    stand = yield lambda: stand.http.delete(f"/runs/{run}", params={"erase": "true"})
    if case.point == "in_run_ended":
        assert stand.http.delete(f"/runs/{run}", params={"erase": "true"}).status_code == 204
    until(lambda: stand.http.get(f"/runs/{run}").status_code == 404)
    assert [frame for frame in [*frames, f"forgotten-{run}".encode()] if in_files(site.url, frame)] == []
    for talk in (*talks, child):
        types = stand.known(talk.id).types()
        assert (types.count("SessionClosed"), types.count("SessionErased")) == (1, 1)
    site.say(stand.talk(run=run), "Anew")
    assert stand.get(f"/runs/{run}")["sessions"] == {"open": 1, "closed": 0, "erased": 0}


def rollouts_close(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """Killed between the root's close and its children's: the next start closes them, and the group is complete."""
    group = f"close-{case.point}"
    root, children = a_rollout(site, stand, group)
    assert stand.http.put(f"{root.path}/reward", json={"reward": 0.5}).status_code == 200
    stand = yield lambda: stand.http.delete(root.path)
    assert stand.known(root.id).types()[-1] == "SessionClosed"
    until(lambda: all(stand.known(child).types()[-1] == "SessionClosed" for child in children))
    assert [stand.known(child).types().count("SessionClosed") for child in children] == [1, 1]
    told = stand.get(f"/groups/{group}")
    assert (told["complete"], [one["session_id"] for one in told["attempts"]]) == (True, [root.id])
    given = {row["session_id"]: (row["final"], row["reward"]) for row in stand.rows(group_id=group)}
    assert given == dict.fromkeys([root.id, *children], (True, 0.5))


def rollouts_reward(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """Killed between the root's reward and its children's: the next start gives it to them."""
    group, reward = f"reward-{case.point}", {"reward": 0.5, "components": {"tests": 0.5}}
    root, children = a_rollout(site, stand, group)
    assert stand.http.delete(root.path).status_code == 204
    stand = yield lambda: stand.http.put(f"{root.path}/reward", json=reward)
    until(lambda: stand.get(f"/groups/{group}")["complete"])
    rows = stand.rows(group_id=group)
    assert {row["session_id"] for row in rows} == {root.id, *children}
    assert [(row["reward"], row["reward_components"]) for row in rows] == [(0.5, {"tests": 0.5})] * 3
    assert stand.http.put(f"{root.path}/reward", json=reward).status_code == 200
    assert [stand.known(child).types().count("RewardAssigned") for child in children] == [1, 1]


def a_rollout(site: Site, stand: Stand, group: str) -> tuple[Talk, list[str]]:
    """A root and the sessions of two of its agents, a turn in each."""
    root = stand.talk(session_id=f"root-{group}", group_id=group)
    site.say(root, "First")
    children = [stand.talk(session_id=f"{root.id}:{name}", parent_session_id=root.id) for name in ("one", "two")]
    for child in children:
        site.say(child, "First")
    return root, [child.id for child in children]


def cut(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """A checkpoint is there whole or not at all."""
    name, talk = f"cut-{case.point}", stand.talk()
    site.say(talk, "One")
    stand = yield lambda: stand.http.post("/checkpoints", json={"name": name})
    again = stand.http.post("/checkpoints", json={"name": name})
    assert again.status_code == (409 if case.point == "after_checkpoint" else 200), again.text
    known = stand.known(talk.id)
    known.messages = talk.messages
    known.say("Two")
    assert stand.http.post(f"/checkpoints/{name}/restore").status_code == 200
    [row] = known.rows()
    assert len(row["turns"]) == 1


def restore(site: Site, stand: Stand, case: Case, tally: Tally) -> Story:
    """Either it never was, or it is finished by whoever serves next; and it can be undone."""
    name = str(case)
    acked, leased, later = groups = [f"{name}-{kind}" for kind in ("acked", "leased", "later")]

    def finish(talk: Talk, value: float) -> None:
        assert stand.http.put(f"{talk.path}/reward", json={"reward": value}).status_code == 200
        assert stand.http.delete(talk.path).status_code == 204

    def session(group_id: str) -> Talk:
        talk = stand.talk(group_id=group_id)
        site.say(talk, "One")
        return talk

    finish(session(acked), 1.0)
    contents(stand, acked)
    stand.http.post("/export/groups/ack", json={"consumer": "trainer", "groups": [acked]})
    open_ones = [session(leased) for _ in range(3)]
    at_cut = contents(stand, *groups)
    assert stand.http.post("/checkpoints", json={"name": name}).status_code == 200
    another = stand.talk(run=f"other-{case.point}")
    site.say(another, "One")
    cursor = stand.http.get("/export", params={"run": f"other-{case.point}"}).headers["x-turnlog-cursor"]
    for talk in open_ones:
        site.say(talk, "Two")
        finish(talk, 2.0)
    finish(session(later), 1.0)
    before = contents(stand, *groups)
    assert before[1] == sorted([later, leased])
    stand = yield lambda: stand.http.post(f"/checkpoints/{name}/restore")
    theirs = stand.known(another.id)
    theirs.messages = another.messages
    theirs.say("Two")
    assert "SessionRestored" not in theirs.types()
    of_other = {"run": f"other-{case.point}", "cursor": cursor}
    assert stand.http.get("/export", params=of_other).status_code == 200
    until(lambda: stand.get("/fleet")["held_for"] is None)
    kept = next(one["name"] for one in stand.get("/checkpoints")["checkpoints"] if one["restores"] == name)
    assert contents(stand, *groups) == at_cut
    assert stand.http.post(f"/checkpoints/{kept}/restore").status_code == 200
    assert contents(stand, *groups) == before


def contents(stand: Stand, *group_ids: str) -> tuple[dict[str, Any], list[str]]:
    """What a trainer has of some groups: rows by session, and the groups that it is given again."""
    rows: dict[str, Any] = {}
    for group_id in group_ids:
        for row in stand.rows(group_id=group_id):
            known = {name: row[name] for name in ("tokens", "loss_mask", "logprobs", "reward", "final", "status")}
            rows.setdefault(row["session_id"], []).append(known)
    response = stand.http.get("/export/groups", params={"consumer": "trainer", "size": 1000})
    assert response.status_code == 200, response.text
    given = [json.loads(line)["group_id"] for line in response.content.splitlines()]
    return rows, sorted(set(given) & set(group_ids))


TAKEN_OVER = (
    *(Case(turn, point, 2, 1) for point in ("in_claim", "before_engine")),
    *(Case(turn, point, 2) for point in ("after_engine", "in_commit")),
    Case(turn, "in_commit", 2, sim=LARGE),
    Case(turn, "after_commit", 2, 1, landed=True),
    Case(turn, "in_release", fault="not_json"),
)

OTHERS = (
    *(Case(turn, point, 2, 1) for point in ("before_claim", "after_claim")),
    *(Case(turn, point, 2) for point in ("after_judged", "before_commit")),
    *(Case(turn, "after_staged", times, sim=LARGE) for times in (1, 2)),
    Case(turn, "during_reply", 2, 1, landed=True, sim=LARGE),
    *(Case(turn, point, fault="status_500") for point in ("before_release", "after_release")),
    Case(turn, "in_commit", 2, of_text=True),
    Case(turn, "after_commit", 2, 1, landed=True, of_text=True),
    Case(turn, "in_release", fault="not_json", of_text=True),
    Case(limit_reached, "in_spent", 2),
    Case(limit_reached, "in_limit_noted"),
    *(Case(creation, point, 2) for point in ("before_create", "in_create", "after_create")),
    *(Case(three_forks, point, 2) for point in ("in_fork", "after_fork")),
    *(Case(word, point) for point in ("in_reward", "after_reward", "after_annotation", "in_annotation")),
    *(Case(word, point) for point in ("in_finish", "after_finish", "in_close", "after_close")),
    *(Case(erasure, point) for point in ("in_close", "after_tombstones", "after_freed")),
    *(Case(erasure, point) for point in ("in_erase", "after_components", "after_erase")),
    *(
        Case(runs_erasure, point)
        for point in ("in_run_ended", "after_run_ended", "in_close", "in_erase", "in_run_erased")
    ),
    Case(runs_erasure, "after_erase", 2),
    *(Case(rollouts_close, point, restarts=True) for point in ("after_close", "after_child_closed")),
    *(Case(rollouts_reward, point, restarts=True) for point in ("after_reward", "after_reward_shared")),
    *(Case(cut, point) for point in ("in_checkpoint", "after_checkpoint")),
    *(Case(restore, point) for point in ("after_held", "in_restore", "after_session_restored")),
    *(Case(restore, point) for point in ("after_groups_restored", "in_restore_finished", "after_restore_finished")),
    Case(restore, "in_checkpoint", 2),
)

CASES = [*((database, case) for case in TAKEN_OVER for database in BOTH), *zip(cycle(BOTH), OTHERS, strict=False)]


@pytest.mark.fault(2, "kill -9 at a crash point")
@pytest.mark.parametrize(("site", "case"), CASES, indirect=["site"], ids=str)
def test_what_a_kill_leaves(site: Site, case: Case, tally: Tally) -> None:
    site.acknowledged = []
    with site.stand(site.server.start(**{VARIABLE: f"{case.point}:{case.times}"}), case) as stand:
        assert stand.sim.post("/sim/reset").status_code == 200
        story = case.tell(site, stand, case, tally)
        interrupted = next(story)
        with pytest.raises(httpx.TransportError):
            interrupted()
        tally.tried += 1
    assert site.server.ended() == -signal.SIGKILL
    site.killed = monotonic()
    verified(site.url)
    with site.stand(site.after(case), case) as stand, contextlib.suppress(StopIteration):
        story.send(stand)
    verified(site.url, site.acknowledged, tally)
    site.server.stop()


def test_every_point_is_tried() -> None:
    assert {case.point for _, case in CASES} | {point for points in ELSEWHERE.values() for point in points} == set(
        POINTS
    )


def stored_frames(url: str, talk: Talk) -> list[bytes]:
    """The beginning of everything that SQLite's files hold of a session's content.

    Dead rows on PostgreSQL are left to its vacuum.
    """
    if not url.startswith("sqlite"):
        return []
    with contextlib.closing(sqlite3.connect(url.removeprefix("sqlite+aiosqlite:///"))) as connection:
        columns = (("tokens", "turns"), ("exchange", "turns"), ("data", "chunks"))
        query = " UNION ".join(
            f"SELECT {name} FROM {table} WHERE session_id = :sid AND {name} IS NOT NULL" for name, table in columns
        )
        rows = connection.execute(query, {"sid": talk.id}).fetchall()
    frames = [frame[:64] for (frame,) in rows]
    assert len(frames) > 3
    frames.append(f"forgotten-{talk.id}".encode())
    assert all(in_files(url, frame) for frame in frames)
    return frames


def in_files(url: str, content: bytes) -> bool:
    path = Path(url.removeprefix("sqlite+aiosqlite:///"))
    return any(content in file.read_bytes() for file in path.parent.glob(f"{path.name}*"))
