"""`kill -9` at every named point: what was acknowledged stays, and the first retry ends with exactly one of everything.

On SQLite the process is started again, on PostgreSQL a second one, which has run all the while, goes on at once.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from time import monotonic
from typing import Any

import httpx
import pytest
from helpers.databases import Postgres, SqliteTemplate
from integration.routing import asks_for_all, is_of_the_decode
from integration.stand import Stand, Talk, until, user

from app.crash_points import POINTS, VARIABLE, CrashPoint
from fault.forking import ForkedServer
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

TITLE = "kill -9 at a crash point"
BOTH = ("sqlite", "postgresql")

OF_PAUSES: tuple[CrashPoint, ...] = ("after_gate_shut", "before_gate_opened")
"""Tried in `test_fleet_faults`: they need several processes and engines."""

OF_CHECKPOINTS: tuple[CrashPoint, ...] = (
    "in_checkpoint",
    "after_checkpoint",
    "after_held",
    "in_restore",
    "after_session_restored",
    "after_groups_restored",
    "in_restore_finished",
    "after_restore_finished",
)
"""Tried in `test_checkpoint_crashes`."""

OF_OBJECTS: tuple[CrashPoint, ...] = ("before_put", "after_put", "after_copied", "after_object_deleted")
"""Tried in `test_objects`."""

OF_ARCHIVES: tuple[CrashPoint, ...] = (
    "before_archive_put",
    "after_archive_put",
    "in_archive",
    "after_archived",
    "in_content_dropped",
    "after_erasing_begun",
    "after_archive_rewritten",
    "after_archive_deleted",
    "in_import",
    "after_imported",
)
"""Tried in `integration/test_archive.py`."""

OF_WEBHOOKS: tuple[CrashPoint, ...] = ("after_engine_died", "after_webhook_sent", "in_webhook_moved")
"""Tried in `integration/test_webhooks.py`."""

LARGE: dict[str, Any] = {
    "experts": {"layers": 48, "top_k": 8, "experts": 2**31 - 1},
    "completion_tokens": 1500,
}
"""More than 2 MB of ids that cannot be narrowed: chunks that are staged, a reply that leaves in pieces."""


@dataclass
class Site:
    """One store, whose server is killed; on PostgreSQL `other` serves it as well."""

    url: str
    engine: SimulatorProcess
    server: ForkedServer
    other: ForkedServer | None = None
    acknowledged: list[Acknowledged] = field(default_factory=list)

    @contextlib.contextmanager
    def armed(self, point: CrashPoint, times: int, engine: SimulatorProcess | None = None) -> Iterator[Stand]:
        """The server, which ends when it has come by `point` so often. `engine`: to look into, if not its own."""
        self.server.start(**{VARIABLE: f"{point}:{times}"})
        stand = Stand(self.server, (engine or self.engine).base_url)
        assert stand.sim.post("/sim/reset").status_code == 200
        yield stand
        stand.close()
        assert self.server.ended() == -signal.SIGKILL
        verified(self.url)

    @contextlib.contextmanager
    def after(self, engine: SimulatorProcess | None = None) -> Iterator[Stand]:
        """Who serves the store now."""
        stand = Stand(self.other or self.server.start(), (engine or self.engine).base_url)
        yield stand
        stand.close()
        self.server.stop()

    @contextlib.contextmanager
    def restarted(self) -> Iterator[Stand]:
        """The server that was killed, on PostgreSQL too."""
        stand = Stand(self.server.start(), self.engine.base_url)
        yield stand
        stand.close()
        self.server.stop()

    def acknowledge(self, talk: Talk, reply: httpx.Response) -> None:
        """The client has seen this 200."""
        self.acknowledged.append(acknowledgement(talk.id, reply))


def on_one_of_both(name: str, values: Sequence[Any], ids: Callable[[Any], str] = str) -> pytest.MarkDecorator:
    """Every other value on SQLite, the rest on PostgreSQL. Turns, creations, forks and rollouts, which try each kind of
    point, run on both: there what differs is how a dead process's store is taken over.
    """
    pairs = zip(cycle(BOTH), values, strict=False)
    rows = [pytest.param(database, value, id=f"{database}-{ids(value)}") for database, value in pairs]
    return pytest.mark.parametrize(("site", name), rows, indirect=["site"])


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
    with contextlib.ExitStack() as stack:
        if request.param == "sqlite":
            template: SqliteTemplate = request.getfixturevalue("sqlite_template")
            url = template.copy(folder / "turnlog.db")
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            url = stack.enter_context(postgres.database())
        made = Site(url, engine, _server(folder, url, engine, vendor))
        if request.param == "postgresql":
            made.other = _server(folder, url, engine, vendor).start()
            stack.callback(made.other.stop)
        stack.callback(made.server.stop)
        yield made


def _server(folder: Path, url: str, engine: SimulatorProcess, vendor: SimulatorProcess) -> ForkedServer:
    upstreams = json.dumps({"vendor": {"url": vendor.base_url, "model": "large"}})
    settings = {"TURNLOG_TEXT_UPSTREAMS": upstreams}
    return ForkedServer(folder, url, [engine.base_url], **settings)


@dataclass(frozen=True)
class TurnCase:
    """The session's second turn dies at `point`, which its first may have come by as well.

    `generations` of it there are in the end: 1 where the crash was before the engine call or after the commit. With
    `of_text` the session captures text alone, of the vendor.
    """

    point: CrashPoint
    times: int
    generations: int
    landed: bool = False
    sim: dict[str, Any] | None = None
    fault: str | None = None
    of_text: bool = False


TURNS = (
    TurnCase("before_claim", 2, 1),
    TurnCase("in_claim", 2, 1),
    TurnCase("after_claim", 2, 1),
    TurnCase("before_engine", 2, 1),
    TurnCase("after_engine", 2, 2),
    TurnCase("after_judged", 2, 2),
    TurnCase("after_staged", 1, 2, sim=LARGE),
    TurnCase("after_staged", 2, 2, sim=LARGE),
    TurnCase("before_commit", 2, 2),
    TurnCase("in_commit", 2, 2),
    TurnCase("in_commit", 2, 2, sim=LARGE),
    TurnCase("after_commit", 2, 1, landed=True),
    TurnCase("during_reply", 2, 1, landed=True, sim=LARGE),
    TurnCase("before_release", 1, 2, fault="status_500"),
    TurnCase("in_release", 1, 2, fault="not_json"),
    TurnCase("after_release", 1, 2, fault="status_500"),
    TurnCase("before_engine", 2, 1, of_text=True),
    TurnCase("after_engine", 2, 2, of_text=True),
    TurnCase("after_judged", 2, 2, of_text=True),
    TurnCase("in_commit", 2, 2, of_text=True),
    TurnCase("after_commit", 2, 1, landed=True, of_text=True),
    TurnCase("in_release", 1, 2, fault="not_json", of_text=True),
)


def _name(case: TurnCase) -> str:
    return f"{case.point}-{case.times}{'-large' if case.sim else '-text' if case.of_text else ''}"


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("case", TURNS, ids=_name)
def test_a_turn(site: Site, vendor: SimulatorProcess, tally: Tally, case: TurnCase) -> None:
    fields = {"sim": case.sim, "return_routed_experts": True} if case.sim else {}
    key = {"idempotency-key": f"second {case.point}"}
    generator = vendor if case.of_text else site.engine
    of_text = {"capture": "text", "upstream": "vendor", "params": None}
    with site.armed(case.point, case.times, generator) as stand:
        talk = stand.talk(group_id="crash", **{"params": {"top_logprobs": 3}, **(of_text if case.of_text else {})})
        site.acknowledge(talk, talk.say("First"))
        if case.fault:
            assert stand.sim.post("/sim/faults", json={"fault": case.fault}).status_code == 200
        sent = [*talk.messages, user("Second")]
        with pytest.raises(httpx.TransportError):
            talk.chat(sent, headers=key, **fields)
        tally.tried += 1
    killed = monotonic()
    with site.after(generator) as stand:
        again = stand.known(talk.id)
        reply = again.chat(sent, headers=key, **fields)
        tally.recovered(monotonic() - killed)
        assert reply.status_code == 200, reply.text
        assert ("x-turnlog-replayed" in reply.headers) is case.landed
        site.acknowledge(again, reply)
        assert again.chat(sent, headers=key, **fields).content == reply.content
        generations = stand.stats()["started"] if case.of_text else again.generations()
        assert generations == 1 + case.generations
        tally.doubled += len(again.committed()) - 2
        assert [record["response"] for record in again.state()["records"]][1] == reply.json()
        again.messages = [*sent, reply.json()["choices"][0]["message"]]
        site.acknowledge(again, again.say("Third"))
        rows = again.rows(top_k=1)
        assert len(rows) == (not case.of_text)
        for row in rows:
            assert [token >= 0 for [token] in row["top_ids"]] == [mask == 1 for mask in row["sampled_mask"]]
        verified(site.url, site.acknowledged[-3:], tally)


RETAINED = (
    TurnCase("before_commit", 3, 2),
    TurnCase("in_commit", 3, 2),
    TurnCase("after_commit", 3, 1, landed=True),
)
"""The commit of the third turn drops what the first one's payloads had but its own rows."""


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("case", RETAINED, ids=_name)
def test_a_turn_of_a_session_that_retains_sampled_rows(site: Site, tally: Tally, case: TurnCase) -> None:
    key = {"idempotency-key": f"retained {case.point}"}
    with site.armed(case.point, case.times) as stand:
        talk = stand.talk(retain="sampled", rollback_window=1)
        replies = [talk.say(f"Turn {turn}", **asks_for_all(turn)) for turn in (1, 2)]
        sent = [*talk.messages, user("Turn 3")]
        with pytest.raises(httpx.TransportError):
            talk.chat(sent, headers=key, **asks_for_all(3))
        tally.tried += 1
    with site.after() as stand:
        again = stand.known(talk.id)
        replies.append(again.chat(sent, headers=key, **asks_for_all(3)))
        assert replies[-1].status_code == 200, replies[-1].text
        assert ("x-turnlog-replayed" in replies[-1].headers) is case.landed
        again.messages = [*sent, replies[-1].json()["choices"][0]["message"]]
        replies.append(again.say("Turn 4", **asks_for_all(4)))
        for reply in replies:
            site.acknowledge(again, reply)
        assert again.generations() == 3 + case.generations
        tally.doubled += len(again.committed()) - 4
        assert [event["own"] for event in again.events() if event["type"] == "BlobsTombstoned"] == [[1], [2]]
        [row] = again.rows(replay="true", routing="sampled")
        assert row["routing_differs"] > 0
        assert is_of_the_decode(row, replies)
        verified(site.url, site.acknowledged[-4:], tally)


LIMITED = (
    *(TurnCase(point, 2, 1) for point in ("before_claim", "in_claim", "after_claim", "before_engine")),
    *(TurnCase(point, 2, 2) for point in ("after_engine", "before_commit", "in_commit", "in_spent")),
    TurnCase("after_commit", 2, 1, landed=True),
    TurnCase("in_release", 1, 2, fault="not_json"),
)


@pytest.mark.fault(2, TITLE)
@on_one_of_both("case", LIMITED, _name)
def test_a_turn_that_has_reserved_what_is_left(site: Site, tally: Tally, case: TurnCase) -> None:
    """Of a rollout. What it had reserved is there for its retry and for the others of the rollout."""
    fields: dict[str, Any] = {"sim": {"completion_tokens": 5, "reasoning": False}}
    key = {"idempotency-key": f"limited {case.point}"}
    with site.armed(case.point, case.times) as stand:
        root = stand.talk(limits={"tokens": 20}, history="tree")
        talk = stand.talk(parent_session_id=root.id, history="tree")
        site.acknowledge(talk, talk.say("First", **fields))
        if case.fault:
            assert stand.sim.post("/sim/faults", json={"fault": case.fault}).status_code == 200
        sent = [*talk.messages, user("Second")]
        with pytest.raises(httpx.TransportError):
            talk.chat(sent, headers=key, **fields)
        tally.tried += 1
    with site.after() as stand:
        site.acknowledge(stand.known(root.id), stand.known(root.id).say("Another", **fields))
        again = stand.known(talk.id)
        reply = again.chat(sent, headers=key, **fields)
        assert reply.status_code == 200, reply.text
        assert ("x-turnlog-replayed" in reply.headers) is case.landed
        site.acknowledge(again, reply)
        assert again.generations() == 1 + case.generations
        [told] = again.state()["session"]["budgets"]
        assert (told["used"]["tokens"], told["left"], told["in_flight"]["tokens"]) == (15, {"tokens": 5}, 0)
        verified(site.url, site.acknowledged[-3:], tally)


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("point", ["in_spent", "in_limit_noted"])
def test_a_limit_that_ends_something(site: Site, tally: Tally, point: CrashPoint) -> None:
    fields: dict[str, Any] = {"sim": {"completion_tokens": 5, "reasoning": False}}
    with site.armed(point, 2 if point == "in_spent" else 1) as stand:
        talk = stand.talk(limits={"tokens": 8 if point == "in_spent" else 5})
        site.acknowledge(talk, talk.say("First", **fields))
        sent = [*talk.messages, user("Second")]
        with pytest.raises(httpx.TransportError):
            talk.chat(sent, **fields)
        tally.tried += 1
    with site.after() as stand:
        again = stand.known(talk.id)
        assert again.chat(sent, **fields).status_code == 409
        assert again.types().count("LimitReached") == 1
        [row] = again.rows()
        assert (row["limit"], again.state()["session"]["budgets"][0]["left"]) == ("tokens", {"tokens": 0})
        verified(site.url, site.acknowledged[-1:], tally)


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("point", ["before_create", "in_create", "after_create"])
def test_a_creation(site: Site, tally: Tally, point: CrashPoint) -> None:
    body = {"session_id": f"created-{point}", "metadata": {"task": 7}, "group_id": "crash"}
    with site.armed(point, 2) as stand:
        neighbour = stand.talk()
        site.acknowledge(neighbour, neighbour.say("I was here before"))
        with pytest.raises(httpx.TransportError):
            stand.http.post("/sessions", json=body)
        tally.tried += 1
    with site.after() as stand:
        assert stand.http.post("/sessions", json=body).status_code == 200
        talk = stand.known(body["session_id"])
        assert talk.types() == ["SessionCreated"]
        site.acknowledge(talk, talk.say("First"))
        verified(site.url, site.acknowledged[-2:], tally)


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("point", ["in_fork", "after_fork"])
def test_a_fork(site: Site, tally: Tally, point: CrashPoint) -> None:
    """Killed at the second of three new sessions: those that there are are whole, and a retry makes the rest."""
    group, headers = f"forks-{point}", {"idempotency-key": f"fork {point}"}
    body = {"turn": 1, "count": 3, "group_id": group}
    with site.armed(point, 2) as stand:
        talk = stand.talk()
        site.acknowledge(talk, talk.say("First", sim=LARGE, return_routed_experts=True))
        with pytest.raises(httpx.TransportError):
            stand.http.post(f"{talk.path}/fork", json=body, headers=headers)
        tally.tried += 1
    with site.after() as stand:
        [tokens] = (row["tokens"] for row in stand.known(talk.id).rows())
        made = {row["session_id"]: row["tokens"] for row in stand.rows(group_id=group)}
        assert list(made.values()) == [tokens] * (2 if point == "after_fork" else 1)
        again = stand.http.post(f"{talk.path}/fork", json=body, headers=headers)
        assert again.status_code == 200, again.text
        ids = [one["session_id"] for one in again.json()["sessions"]]
        assert set(made) < set(ids) == {row["session_id"] for row in stand.rows(group_id=group)}
        fork = stand.known(ids[2])
        fork.messages = talk.messages
        site.acknowledge(fork, fork.say("Second"))
        verified(site.url, site.acknowledged[-2:], tally)


@pytest.mark.fault(2, TITLE)
@on_one_of_both(
    "point",
    [
        *("in_reward", "after_reward", "after_annotation", "in_annotation"),
        *("in_finish", "after_finish", "in_close", "after_close"),
    ],
)
def test_a_word_about_a_session(site: Site, tally: Tally, point: CrashPoint) -> None:
    """Its reward, a note, its finish, its close: there whole or not at all, and asked for again it is there."""
    what = point.partition("_")[2]
    path, body, kind = {
        "reward": ("/reward", {"reward": 0.5}, "RewardAssigned"),
        "annotation": ("/annotations/note", {"value": "Seen"}, "AnnotationWritten"),
        "finish": ("/finish", {"producer_finished": True}, "SessionFinished"),
        "close": ("", None, "SessionClosed"),
    }[what]
    with site.armed(point, 1) as stand:
        talk = stand.talk(group_id="crash")
        site.acknowledge(talk, talk.say("First"))
        method, path = {"close": "DELETE", "finish": "POST"}.get(what, "PUT"), talk.path + path
        with pytest.raises(httpx.TransportError):
            stand.http.request(method, path, json=body)
        tally.tried += 1
    with site.after() as stand:
        again = stand.known(talk.id)
        assert again.types().count(kind) == point.startswith("after")
        done = stand.http.request(method, path, json=body).status_code
        assert done == (200 if body else 404 if point == "after_close" else 204)
        [row] = again.rows()
        assert (row["final"], len(row["turns"]), again.types().count("SessionClosed")) == (
            what == "close",
            1,
            what == "close",
        )
        assert row["reward"] == (0.5 if what == "reward" else None)
        assert row["note"] == ("Seen" if what == "annotation" else None)
        verified(site.url, site.acknowledged[-1:], tally)


@pytest.mark.fault(2, TITLE)
@on_one_of_both("point", ["in_annotation", "after_annotation"])
def test_a_column_that_is_replaced(site: Site, tally: Tally, point: CrashPoint) -> None:
    """The earlier column or the new one, whole; asked for again it is the new one."""
    with site.armed(point, 2) as stand:
        talk = stand.talk()
        site.acknowledge(talk, talk.say("First", sim={"completion_tokens": 3}))
        path = f"{talk.path}/turns/1/annotations/values"
        first, second = ({"values": [value, None, 2.5], "over": "output"} for value in (0.25, 0.5))
        assert stand.http.put(path, json=first).status_code == 200
        with pytest.raises(httpx.TransportError):
            stand.http.put(path, json=second)
        tally.tried += 1
    with site.after() as stand:
        there = second if point == "after_annotation" else first
        assert stand.get(path)["values"] == there["values"]
        for _ in range(2):
            [row] = stand.rows(session_id=talk.id, columns="values")
            assert row["columns"]["values"][-3:] == [there["values"][0], 0.0, 2.5]
            assert row["column_masks"]["values"] == [0] * row["prompt_length"] + [1, 0, 1]
            assert stand.http.put(path, json=second).status_code == 200
            there = second
        verified(site.url, site.acknowledged[-1:], tally)


@pytest.mark.fault(2, TITLE)
@on_one_of_both(
    "point",
    [
        "in_close",
        "after_close",
        "after_tombstones",
        "after_freed",
        "in_erase",
        "after_components",
        "after_erase",
    ],
)
def test_an_erasure(site: Site, tally: Tally, point: CrashPoint) -> None:
    """It is taken up again where it was broken off, and then nothing of the content is left in the files."""
    with site.armed(point, 1) as stand:
        talk, neighbour = stand.talk(), stand.talk()
        site.acknowledge(neighbour, neighbour.say("I stay"))
        talk.say("To be forgotten", sim=LARGE, return_routed_experts=True)
        reward = {"reward": 0.5, "components": {f"forgotten-{talk.id}": 1.0}}
        assert stand.http.put(f"{talk.path}/reward", json=reward).status_code == 200
        talk.noted(note=f"forgotten-{talk.id}", tags=["forgotten"])
        column = {"values": [0.25] * talk.committed()[0]["output_tokens"], "over": "output"}
        assert stand.http.put(f"{talk.path}/turns/1/annotations/values", json=column).status_code == 200
        frames = stored_frames(site.url, talk)
        with pytest.raises(httpx.TransportError):
            stand.http.delete(talk.path, params={"erase": "true"})
        tally.tried += 1
    with site.after() as stand:
        again = stand.known(talk.id)
        erased = stand.http.delete(talk.path, params={"erase": "true"})
        assert erased.status_code == 204, erased.text
        types = again.types()
        assert (types.count("SessionClosed"), types.count("SessionErased")) == (1, 1)
        assert again.rows() == []
        assert "forgotten" not in stand.http.get(f"{talk.path}/events").text
        assert stand.http.post("/sessions", json={"session_id": talk.id}).status_code == 409
        verified(site.url, site.acknowledged[-1:], tally)
    assert [frame for frame in frames if in_files(site.url, frame)] == []


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("point", ["after_close", "after_child_closed"])
def test_a_rollouts_close(site: Site, tally: Tally, point: CrashPoint) -> None:
    """Killed between the root's close and its children's: the next start closes them, and the group is complete."""
    with site.armed(point, 1) as stand:
        root, children = a_rollout(stand, site, f"close-{point}")
        assert stand.http.put(f"{root.path}/reward", json={"reward": 0.5}).status_code == 200
        with pytest.raises(httpx.TransportError):
            stand.http.delete(root.path)
        tally.tried += 1
    with site.restarted() as stand:
        assert [stand.known(root.id).types()[-1]] == ["SessionClosed"]
        until(lambda: all(stand.known(child).types()[-1] == "SessionClosed" for child in children))
        assert [stand.known(child).types().count("SessionClosed") for child in children] == [1, 1]
        group = stand.http.get(f"/groups/close-{point}").json()
        assert (group["complete"], [one["session_id"] for one in group["attempts"]]) == (True, [root.id])
        given = {row["session_id"]: (row["final"], row["reward"]) for row in stand.rows(group_id=f"close-{point}")}
        assert given == dict.fromkeys([root.id, *children], (True, 0.5))
        verified(site.url, site.acknowledged[-3:], tally)


@pytest.mark.fault(2, TITLE)
@pytest.mark.parametrize("point", ["after_reward", "after_reward_shared"])
def test_a_rollouts_reward(site: Site, tally: Tally, point: CrashPoint) -> None:
    """Killed between the root's reward and its children's: the next start gives it to them."""
    group = f"reward-{point}"
    with site.armed(point, 1) as stand:
        root, children = a_rollout(stand, site, group)
        assert stand.http.delete(root.path).status_code == 204
        with pytest.raises(httpx.TransportError):
            stand.http.put(f"{root.path}/reward", json={"reward": 0.5, "components": {"tests": 0.5}})
        tally.tried += 1
    with site.restarted() as stand:
        until(lambda: stand.http.get(f"/groups/{group}").json()["complete"])
        rows = stand.rows(group_id=group)
        assert {row["session_id"] for row in rows} == {root.id, *children}
        assert [(row["reward"], row["reward_components"]) for row in rows] == [(0.5, {"tests": 0.5})] * 3
        again = stand.http.put(f"{root.path}/reward", json={"reward": 0.5, "components": {"tests": 0.5}})
        assert again.status_code == 200
        assert [stand.known(child).types().count("RewardAssigned") for child in children] == [1, 1]
        verified(site.url, site.acknowledged[-3:], tally)


def a_rollout(stand: Stand, site: Site, group: str) -> tuple[Talk, list[str]]:
    """A root and the sessions of two of its agents, a turn in each."""
    root = stand.talk(session_id=f"root-{group}", group_id=group)
    site.acknowledge(root, root.say("First"))
    children = [stand.talk(session_id=f"{root.id}:{name}", parent_session_id=root.id) for name in ("one", "two")]
    for child in children:
        site.acknowledge(child, child.say("First"))
    return root, [child.id for child in children]


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


def test_every_point_is_tried() -> None:
    tests = (
        test_a_creation,
        test_a_fork,
        test_a_limit_that_ends_something,
        test_a_word_about_a_session,
        test_an_erasure,
        test_a_rollouts_close,
        test_a_rollouts_reward,
        test_a_limit_that_ends_something,
    )
    marked = [mark for test in tests for mark in test.pytestmark]
    rows = [row for mark in marked if mark.name == "parametrize" for row in mark.args[1]]
    named = {row if isinstance(row, str) else row.values[1] for row in rows}
    elsewhere = {*OF_PAUSES, *OF_CHECKPOINTS, *OF_OBJECTS, *OF_ARCHIVES, *OF_WEBHOOKS}
    assert named | {case.point for case in TURNS} | elsewhere == set(POINTS)
