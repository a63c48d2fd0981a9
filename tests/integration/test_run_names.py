"""Names of sessions are a run's: two trainers that call their sessions alike never meet."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.domain.names import first_id
from integration.guarded import Guarded
from integration.places import Places
from integration.stand import CHAT, Stand, error_of, serving, user
from integration.test_archive import archived, imported
from integration.test_checkpoints import make
from integration.test_names import TOLD, Named
from ops.simulator.process import SimulatorProcess

RUN = "x-turnlog-run"
AGENT = "x-turnlog-agent-id"
PARENT = "x-turnlog-parent-session-id"
MISMATCH = (409, "run_mismatch")


class Trainer(Named):
    """A client of a run that names its sessions in headers alone; `run` None: it names none."""

    def __init__(self, stand: Stand, run: str | None, name: str) -> None:
        super().__init__(stand)
        self.name, self.path = name, f"/sessions/{name}"
        self.of_run = {} if run is None else {RUN: run}

    def ask(self, text: str = "Hello", path: str = CHAT, **headers: str) -> httpx.Response:
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.chat(text, path, self.of_run | given)

    def session(self, text: str = "Hello", path: str = CHAT, **headers: str) -> str:
        """The id of the session that a turn went to."""
        response = self.ask(text, path, **headers)
        assert response.status_code == 200, response.text
        return str(response.headers.get(TOLD, self.name))

    def end(self) -> dict[str, Any]:
        response = self.stand.http.post("/finish_session", params={"session_id": self.name}, headers=self.of_run)
        assert response.status_code == 200, response.text
        return dict(response.json())


@pytest.fixture
def own(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    environment = {
        "TURNLOG_AGENTS": "sessions",
        "TURNLOG_FILE_ROOT": tempfile.gettempdir(),
        "TURNLOG_WITHOUT_SESSION": "record",
    }
    with serving(places.new("runs"), sglang.base_url, environment=environment) as made:
        yield made


def pair(stand: Stand) -> tuple[Trainer, Trainer]:
    name = Named(stand).name
    return Trainer(stand, None, name), Trainer(stand, "exp-1", name)


def runs_of(stand: Stand, *session_ids: str) -> list[str]:
    return [stand.get(f"/sessions/{one}")["session"]["run"] for one in session_ids]


def listed(stand: Stand, name: str) -> list[tuple[str, int, str]]:
    """Run, generation and status of each session of the name."""
    rows = stand.get("/sessions", name=name)["sessions"]
    return sorted((one["run"], one["generation"], one["status"]) for one in rows)


def test_two_runs_use_one_name(own: Stand) -> None:
    """Each has its own sessions, agents and generations; to end one's leaves the other's."""
    plain, one = pair(own)
    other = Trainer(own, "exp-2", plain.name)
    ids = [trainer.session() for trainer in (plain, one, other)]
    assert [trainer.session("More") for trainer in (plain, one, other)] == ids
    assert (ids[0], len(set(ids)), len(ids[1])) == (plain.name, 3, 32)
    assert runs_of(own, *ids) == ["default", "exp-1", "exp-2"]
    assert Trainer(own, "default", plain.name).session("Again") == plain.name
    agent = one.session("Sub", **{AGENT: "a"})
    assert (agent, runs_of(own, agent)) == (f"{ids[1]}:a", ["exp-1"])
    assert one.end() == {"session_id": ids[1], "name": one.name, "generation": 1}
    later = one.session("Next")
    assert (plain.session("Still"), other.session("Still")) == (plain.name, ids[2])
    assert plain.end()["session_id"] == plain.name
    assert one.session("Still") == later
    assert listed(own, one.name) == [
        ("default", 1, "closed"),
        ("exp-1", 1, "closed"),
        ("exp-1", 2, "open"),
        ("exp-2", 1, "open"),
    ]
    own.server.kill()
    own.server.start()
    assert (one.session("After"), other.session("After")) == (later, ids[2])


def test_a_path_and_an_id_lead_to_their_session(own: Stand) -> None:
    """With the header a path's name is that run's too. The id that a reply told needs no header."""
    plain, one = pair(own)
    plain.session()
    first = one.session()
    one.end()
    second = one.session()
    for headers, expected in (({}, plain.name), ({RUN: "exp-1"}, second), ({RUN: "default"}, plain.name)):
        assert own.http.get(one.path, headers=headers).json()["session_id"] == expected
    late = own.http.put(f"{one.path}/reward", params={"generation": 1}, headers=one.of_run, json={"reward": 1.0})
    assert late.json()["session_id"] == first
    assert one.session("By path", one.path + CHAT) == one.name  # No reply tells a client the id in its path.
    assert len(own.known(second).committed()) == 2
    assert one.session("Gym's", f"/ng-rollout/{one.name}{CHAT}") == second
    by_id = [Trainer(own, run, second) for run in (None, "exp-1")]
    assert [trainer.session("By id") for trainer in by_id] == [second, second]
    one.end()
    assert [error_of(trainer.ask("By id")) for trainer in by_id] == [(404, "session_closed")] * 2
    assert listed(own, second) == []


def test_a_run_that_is_not_the_sessions_is_refused(own: Stand) -> None:
    made, chosen = own.talk(run="exp-1"), own.talk(run="exp-1", session_id=Named(own).name)
    assert Trainer(own, None, made.id).session() == made.id
    assert Trainer(own, "exp-1", chosen.id).session() == chosen.id
    theirs = Trainer(own, "exp-2", made.id)
    wrong = [theirs.ask(), Trainer(own, None, chosen.id).ask(), Trainer(own, "default", chosen.id).ask()]
    wrong += [theirs.ask(path=f"{talk.path}{CHAT}") for talk in (made, chosen)]
    wrong += [own.http.get(f"{talk.path}/events", headers=theirs.of_run) for talk in (made, chosen)]
    wrong += [own.http.post("/sessions", json={"run": "exp-1"}, headers=theirs.of_run)]
    wrong += [Trainer(own, "exp-2", "child").ask(**{PARENT: made.id})]
    wrong += [
        own.http.post("/finish_session", params={"session_id": name}, headers=headers)
        for name, headers in ((chosen.id, {}), (chosen.id, {RUN: "default"}), (made.id, theirs.of_run))
    ]
    assert [error_of(response) for response in wrong] == [MISMATCH] * len(wrong)
    assert [len(talk.committed()) for talk in (made, chosen)] == [1, 1]
    assert Trainer(own, "exp-2", chosen.id).session() not in (made.id, chosen.id)  # a name of its own
    for run in ("", "a b", "..", "x" * 129):
        for path in (CHAT, made.path + CHAT):
            assert error_of(Trainer(own, run, made.id).ask(path=path)) == (400, "invalid_request")


def test_a_session_made_under_the_id_of_another_runs_is_not_used(own: Stand) -> None:
    """An id that follows from a name, an agent or an idempotency key can be computed."""
    plain, one = pair(own)
    key = {"idempotency-key": plain.name}
    unnamed = own.http.post(CHAT, json={"messages": [user("Hi")]}, headers=one.of_run | key).headers[TOLD]
    roots = plain.session(), one.session()
    taken = [own.talk(run="exp-2", session_id=f"{root}:worker") for root in (*roots, "missing")]
    taken.append(own.talk(run="exp-2", session_id=_key_session("exp-3", plain.name)))
    refused = [trainer.ask(**{AGENT: "worker"}) for trainer in (plain, one, Trainer(own, None, "missing"))]
    refused.append(own.http.post(CHAT, json={"messages": [user("Hi")]}, headers={RUN: "exp-3", **key}))
    assert [error_of(response) for response in refused] == [MISMATCH] * 4
    assert [talk.committed() for talk in taken] == [[]] * 4
    assert unnamed == _key_session("exp-1", plain.name)
    assert Trainer(own, "exp-2", roots[0]).session(**{AGENT: "worker"}) != taken[0].id


def _key_session(run: str, key: str) -> str:
    """The id of a session that is named by an idempotency key alone."""
    return f"key-{hashlib.sha256(first_id(run, key).encode()).hexdigest()[:32]}"


def test_a_child_is_of_its_parents_run(own: Stand) -> None:
    """Also where the parent comes later, and where the header names a session of the run by its id."""
    plain, one = pair(own)
    root = one.session()
    child = Trainer(own, None, Named(own).name)
    ids = [child.session(**{PARENT: root}), child.session("More", **{PARENT: root})]
    assert (ids[0], runs_of(own, *ids)) == (ids[1], ["exp-1", "exp-1"])
    early = Trainer(own, "exp-1", Named(own).name)
    below = early.session(**{PARENT: f"{early.name}-top"})
    top = Trainer(own, "exp-1", f"{early.name}-top").session()
    assert own.get(f"/sessions/{below}")["session"]["parent_session_id"] == top
    assert runs_of(own, below, top) == ["exp-1", "exp-1"]
    assert plain.session(**{PARENT: f"{early.name}-top"}) == plain.name  # no name of the default run
    assert runs_of(own, plain.name) == ["default"]


def test_creations_share_the_names_of_their_run(own: Stand) -> None:
    """Whichever comes first, a creation or a header."""
    plain, one = pair(own)
    first = one.session()
    create = {"session_id": one.name, "run": "exp-1", "group_id": "task"}
    assert error_of(own.http.post("/sessions", json=create)) == (409, "session_exists")
    one.end()
    second = own.http.post("/sessions", json=create).json()["session_id"]
    assert own.http.post("/sessions", json={**create, "run": None}, headers=one.of_run).json()["session_id"] == second
    assert (one.session(), second not in (first, one.name)) == (second, True)
    assert plain.session() == plain.name
    by_id = own.talk(run="exp-1", session_id=f"{one.name}-2")
    assert Trainer(own, "exp-1", by_id.id).session() == by_id.id
    assert listed(own, by_id.id) == [("exp-1", 1, "open")]
    unnamed = [
        own.http.post(CHAT, json={"messages": [user("Hi")]}, headers={"idempotency-key": one.name, **of_run})
        for of_run in (one.of_run, one.of_run, {})
    ]
    told = [response.headers[TOLD] for response in unnamed]
    assert (told[0], told[0] != told[2]) == (told[1], True)
    assert runs_of(own, told[0], told[2]) == ["exp-1", "default"]


def test_a_runs_name_goes_on_behind_generations_that_left(own: Stand, tmp_path: Path) -> None:
    """And only its own: what is archived is no other run's. Retries get their own run's reply."""
    pytest.importorskip("pyarrow")
    plain, one = pair(own)
    first = one.session(idempotency_key="a")
    assert plain.session(idempotency_key="a") == plain.name
    plain.end()
    one.end()
    own.http.put(f"/sessions/{first}/reward", json={"reward": 1.0})
    own.http.put(f"{plain.path}/reward", json={"reward": 1.0})
    file = archived(own, tmp_path)["file"]
    assert listed(own, one.name) == []
    create = {"session_id": one.name, "run": "exp-1"}
    second = own.http.post("/sessions", json=create).json()["session_id"]
    assert error_of(one.ask(idempotency_key="a")) == (404, "session_archived")
    assert (one.session("b"), plain.session("b") != plain.name) == (second, True)
    assert imported(own, file)["imported"] == 2
    assert [(run, number) for run, number, _ in listed(own, one.name)] == [
        *(("default", number) for number in (1, 2)),
        *(("exp-1", number) for number in (1, 2)),
    ]
    replayed = [trainer.ask(idempotency_key="a").headers[TOLD] for trainer in (plain, one)]
    assert replayed == [plain.name, first]


def test_a_restore_leaves_each_run_its_names(own: Stand) -> None:
    plain, one = pair(own)
    first = one.session()
    plain.session()
    name = make(own, run="*")
    one.end()
    one.session("b")
    assert own.http.post(f"/checkpoints/{name}/restore", params={"run": "*"}).status_code == 200
    assert (one.session("c"), plain.session("c")) == (first, plain.name)


def test_a_token_is_of_a_session_and_so_of_its_run(guarded: Guarded) -> None:
    made = guarded.client(session_id="of-a-run", run="exp-1")
    for headers, expected in (({}, 200), ({RUN: "exp-1"}, 200), ({RUN: "exp-2"}, 409)):
        for path in (CHAT, made.path + CHAT):
            assert made.chat_at(path, headers=headers).status_code == expected
            assert made.chat_at(path, headers={"x-session-id": "of-a-run", **headers}).status_code == expected
        assert made.ask("GET", made.path, headers=headers).status_code == expected
