"""A bucket that is slow, fails, is full or goes away; `kill -9` around the upload, copy and deletion of an object."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any

import httpx
import pytest
from helpers.buckets import TestBucket, Weather
from helpers.databases import Postgres, SqliteTemplate
from integration.patient import answered
from integration.stand import Stand, Talk, until, user

from app.crash_points import VARIABLE, CrashPoint
from app.errors import PayloadsUnavailable, StoreFull
from app.features.objects.bucket import Bucket
from app.features.objects.names import folder_of
from fault.forking import ForkedServer
from fault.table import Tally
from fault.verified import acknowledgement, verified
from ops.simulator.process import SimulatorProcess
from ops.verify import Acknowledged

pytestmark = pytest.mark.long

AGENTS, TURNS = 6, 2
WITHIN_S = 240.0
ROUTED: dict[str, Any] = {
    "sim": {"experts": {"layers": 8, "top_k": 8, "experts": 2**31 - 1}, "completion_tokens": 100},
    "return_routed_experts": True,
}
"""Rows that nothing makes small."""
BOTH = pytest.mark.parametrize(
    "database", ["sqlite", pytest.param("postgresql", marks=pytest.mark.untimed)], indirect=True
)
WEATHERS: tuple[Weather, ...] = ("slow", "failing", "gone", "full")
POINTS: tuple[CrashPoint, ...] = ("before_put", "after_put", "in_commit", "after_commit")


class Site:
    """A store with its bucket and its server, and what clients were told."""

    def __init__(self, bucket: TestBucket, server: ForkedServer, engine: SimulatorProcess, url: str) -> None:
        self.bucket = bucket
        self.server = server
        self.engine = engine
        self.url = url
        self.acknowledged: list[Acknowledged] = []
        self.talks: list[Talk] = []

    @contextlib.contextmanager
    def serving(self, **settings: str) -> Iterator[Stand]:
        stand = Stand(self.server.start(**settings), self.engine.base_url)
        try:
            yield stand
        finally:
            stand.close()

    def crowd(self, stand: Stand, turns: int = TURNS) -> None:
        """Agents whose turns each end with a 200, however often they must be asked for."""
        with ThreadPoolExecutor(AGENTS) as pool:
            self.talks += list(pool.map(lambda _: self._agent(stand, turns), range(AGENTS)))

    def _agent(self, stand: Stand, turns: int) -> Talk:
        talk = stand.talk()
        for number in range(turns):
            talk.messages = [*talk.messages, user(f"Question {number}")]
            body = talk.body(talk.messages, **ROUTED)
            reply = answered(stand, talk, body, WITHIN_S, f"{talk.id} {number}")
            self.acknowledged.append(acknowledgement(talk.id, reply))
            talk.messages = [*talk.messages, reply.json()["choices"][0]["message"]]
        return talk

    def erase(self, stand: Stand, session_id: str) -> None:
        until(lambda: self.is_erased(stand, session_id), WITHIN_S)

    def is_erased(self, stand: Stand, session_id: str) -> bool:
        response = httpx.delete(f"{stand.base_url}/sessions/{session_id}", params={"erase": "true"}, timeout=60)
        assert response.status_code in (202, 204, 503), response.text
        return response.status_code == 204

    def verified(self, stand: Stand, tally: Tally) -> None:
        """Every turn that was acknowledged is there, and every live chunk can be read: no reference dangles."""
        verified(self.url, self.acknowledged, tally)
        tally.doubled += sum(len(stand.known(talk.id).committed()) for talk in self.talks) - len(self.acknowledged)

    def ends_empty(self, stand: Stand) -> None:
        """Erase one session, of which nothing is left then, and all others: nothing at all is left."""
        first, *others = self.talks
        self.erase(stand, first.id)
        assert self.left_of(first.id) == []
        with ThreadPoolExecutor(AGENTS) as pool:
            list(pool.map(lambda talk: self.erase(stand, talk.id), others))
        assert self.bucket.objects() == {}

    def left_of(self, session_id: str) -> list[str]:
        return [name for name in self.bucket.objects() if name.startswith(folder_of(session_id))]


@pytest.fixture
def database(request: pytest.FixtureRequest) -> str:
    """SQLite; tests with a parameter of this name also run on PostgreSQL."""
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    database: str,
    engine: SimulatorProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        if database == "sqlite":
            template: SqliteTemplate = request.getfixturevalue("sqlite_template")
            url = template.copy(tmp_path / "turnlog.db")
        else:
            postgres: Postgres = request.getfixturevalue("postgres")
            url = stack.enter_context(postgres.database())
        bucket = TestBucket()
        stack.callback(bucket.close)
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)  # for `verified` in this process
        settings = {**bucket.environment, "TURNLOG_PAYLOADS_KEEP_S": "0", "TURNLOG_LEASE_S": "2"}
        server = ForkedServer(tmp_path, url, [engine.base_url], **settings)
        stack.callback(server.stop)
        yield Site(bucket, server, engine, url)


@pytest.mark.fault(17, "a bucket that is slow, fails, is full or is gone")
@pytest.mark.parametrize(
    ("lasts_s", "slow_s", "timeout_s"),
    [(1.5, 0.5, 1.0), pytest.param(60.0, 2.0, 10.0, marks=pytest.mark.untimed, id="a minute")],
)
@BOTH
def test_no_turn_is_lost(site: Site, tally: Tally, lasts_s: float, slow_s: float, timeout_s: float) -> None:
    """Turns wait, or get a 503 and are taken again; every 200 can be read afterwards, and erased. A slow bucket holds
    turns up, and stops none."""
    site.bucket.slow_s = slow_s
    with site.serving(TURNLOG_PAYLOADS_TIMEOUT_S=str(timeout_s)) as stand:
        for weather in WEATHERS:
            site.bucket.weather = weather
            ends = Timer(lasts_s, setattr, (site.bucket, "weather", "fair"))
            ends.start()
            tally.tried += 1
            site.crowd(stand)
            went_through = ends.is_alive()
            ends.join()
            assert went_through or weather != "slow" or lasts_s < 60
        site.verified(stand, tally)
        site.ends_empty(stand)


def test_a_full_bucket_is_told_from_one_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = TestBucket()
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    opened = Bucket(bucket.environment["TURNLOG_PAYLOADS"], 2.0)
    for weather, error in (("full", StoreFull), ("gone", PayloadsUnavailable)):
        bucket.weather = weather
        with pytest.raises(error):
            asyncio.run(opened.put("s/1-1.x.3", b"abc"))
    bucket.close()


@pytest.mark.fault(18, "kill -9 around an object")
@pytest.mark.parametrize("point", POINTS)
@BOTH
def test_a_turn(site: Site, tally: Tally, point: CrashPoint) -> None:
    """What the dead process put into the bucket and did not commit is deleted."""
    with site.serving() as stand:
        site.crowd(stand, 1)
    with site.serving(**{VARIABLE: f"{point}:2"}) as stand, ThreadPoolExecutor(1) as pool:
        crowd = pool.submit(site.crowd, stand)
        site.server.ended()
        tally.tried += 1
        site.server.start()
        crowd.result()
        site.verified(stand, tally)
        site.ends_empty(stand)


@pytest.mark.fault(18, "kill -9 around an object")
@BOTH
def test_a_deletion(site: Site, tally: Tally) -> None:
    with site.serving() as stand:
        site.crowd(stand, 1)
    victim = site.talks[0]
    with site.serving(**{VARIABLE: "after_object_deleted:1"}) as stand:
        with contextlib.suppress(httpx.TransportError):
            site.is_erased(stand, victim.id)
        site.server.ended()
        tally.tried += 1
        site.server.start()
        site.erase(stand, victim.id)
        assert site.left_of(victim.id) == []
        kept = [one for one in site.acknowledged if one.session_id != victim.id]
        verified(site.url, kept, tally)
        site.ends_empty(stand)


@pytest.mark.fault(18, "kill -9 around an object")
@pytest.mark.parametrize("point", ["after_copied", "in_fork", "after_fork"])
@BOTH
def test_a_fork(site: Site, tally: Tally, point: CrashPoint) -> None:
    """A fork has its own objects; what a fork that came to nothing has copied is deleted."""
    with site.serving(**{VARIABLE: f"{point}:1"}) as stand:
        site.crowd(stand, 1)
        source = site.talks[0]

        def fork() -> list[str]:
            response = stand.http.post(f"{source.path}/fork", json={"turn": 1}, headers={"idempotency-key": "fork"})
            assert response.status_code == 200, response.text
            return [made["session_id"] for made in response.json()["sessions"]]

        with contextlib.suppress(httpx.TransportError):
            fork()
        site.server.ended()
        tally.tried += 1
        site.server.start()
        [made] = fork()
        site.erase(stand, source.id)
        assert len(site.left_of(made)) == 1
        kept = [one for one in site.acknowledged if one.session_id != source.id]
        verified(site.url, kept, tally)
        assert len(stand.known(made).rows(replay="true")[0]["routed_experts"]) > 1000
        site.talks.append(stand.known(made))
        site.ends_empty(stand)


@pytest.mark.fault(19, "an object is deleted behind the server's back")
@BOTH
def test_a_lost_object(site: Site, tally: Tally) -> None:
    """Its sessions say so, and only they; their turns go on."""
    with site.serving() as stand:
        site.crowd(stand, 2)
        lost = max(site.bucket.objects())
        site.bucket.lose(lost)
        tally.tried += 1
        rows = stand.rows(replay=True, explain=True)
        assert {row["session_id"] for row in rows} == {talk.id for talk in site.talks}
        excluded = [row for row in rows if row.get("excluded")]
        assert 0 < len(excluded) < len(rows)
        site.crowd(stand, 1)
        tally.acknowledged += len(site.acknowledged)
        site.ends_empty(stand)


@pytest.mark.fault(20, "an erasure in a bucket that keeps versions, or beside an upload")
@BOTH
def test_versions_are_erased_too(site: Site, tally: Tally) -> None:
    site.bucket.keep_versions()
    with site.serving() as stand:
        site.crowd(stand, 2)
        tally.tried += 1
        site.verified(stand, tally)
        assert site.bucket.versions()
        site.ends_empty(stand)
        assert site.bucket.versions() == []


@pytest.mark.fault(20, "an erasure in a bucket that keeps versions, or beside an upload")
@BOTH
def test_an_erasure_waits_for_an_upload(site: Site, tally: Tally) -> None:
    with site.serving() as stand, ThreadPoolExecutor(1) as pool:
        talk = stand.talk()
        site.bucket.held = f"/{talk.id}/"
        turn = pool.submit(talk.chat, [user("Question")], **ROUTED)
        assert site.bucket.reached.wait(WITHIN_S)
        tally.tried += 1
        assert not site.is_erased(stand, talk.id)
        site.bucket.released.set()
        assert turn.result().status_code == 404
        site.erase(stand, talk.id)
        assert site.bucket.objects() == {}
