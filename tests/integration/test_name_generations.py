"""What becomes of a name whose generations are archived, undone or erased, and what has none: forks and agents."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from integration.places import Places
from integration.routing import problems
from integration.stand import CHAT, Stand, error_of, serving, until
from integration.test_archive import archived, imported
from integration.test_checkpoints import make, restore
from integration.test_names import TOLD, Named
from ops.simulator.process import SimulatorProcess

pytest.importorskip("pyarrow")

SETTINGS = {"TURNLOG_AGENTS": "sessions", "TURNLOG_FILE_ROOT": tempfile.gettempdir()}


@pytest.fixture
def own(sglang: SimulatorProcess, places: Places) -> Iterator[Stand]:
    with serving(places.new("generations"), sglang.base_url, environment=SETTINGS) as made:
        yield made
        assert problems(made) == []


def epoch(named: Named, *keys: str) -> str:
    """A generation of a turn for each key, finished and rewarded; its id."""
    for key in keys:
        reply = named.chat(key, headers={"idempotency-key": key})
        assert reply.status_code == 200, reply.text
    session_id = str(named.finish()["session_id"])
    assert named.stand.http.put(f"/sessions/{session_id}/reward", json={"reward": 1.0}).status_code == 200
    return session_id


def numbers(named: Named) -> list[int]:
    return [number for number, _, _ in named.generations()]


def test_a_name_goes_on_behind_generations_that_left(own: Stand, tmp_path: Path) -> None:
    """As does what its turns' retries get: nothing of them is another generation's."""
    named = Named(own)
    first = epoch(named, "a")
    one = archived(own, tmp_path)["file"]
    second = epoch(named, "b")
    assert numbers(named) == [2]
    two = archived(own, tmp_path)["file"]
    assert numbers(named) == []
    assert error_of(own.http.get(named.path)) == (404, "session_archived")
    third = named.chat("c", headers={"idempotency-key": "c"}).headers[TOLD]
    assert own.get(named.path)["session_id"] == third
    assert error_of(own.http.get(named.path, params={"generation": 1})) == (404, "session_archived")
    assert error_of(own.http.get(named.path, params={"generation": 2})) == (404, "session_archived")
    for path in (CHAT, named.path + CHAT):
        for key in ("a", "b"):
            assert error_of(named.chat(key, path, {"idempotency-key": key})) == (404, "session_archived"), key
        assert error_of(named.chat("b", path, {"x-stainless-retry-count": "1"})) == (404, "session_archived")
    assert named.generations() == [(3, "open", 1)]
    assert imported(own, one)["imported"] == 1
    assert numbers(named) == [1, 3]
    assert named.chat("a", headers={"idempotency-key": "a"}).headers["x-turnlog-replayed"] == "true"
    assert own.get(named.path)["session_id"] == third
    assert named.finish()["session_id"] == third
    assert imported(own, two)["imported"] == 1
    assert numbers(named) == [1, 2, 3]
    assert named.chat("d").headers[TOLD] not in (first, second, third)
    assert named.generations() == [(1, "closed", 1), (2, "closed", 1), (3, "closed", 1), (4, "open", 1)]


@pytest.mark.parametrize("is_archived", [False, True])
def test_one_generation_is_erased(own: Stand, is_archived: bool, tmp_path: Path) -> None:
    """The others stay, and the name goes on, also behind an erased one that was the newest."""
    named = Named(own)
    epoch(named, "a")
    second = epoch(named, "b")
    if is_archived:
        assert archived(own, tmp_path)["archived"] == 2
    for number, path in ((1, named.path), (2, f"/sessions/{second}")):
        erase = {"erase": "true"} | ({"generation": 1} if number == 1 else {})
        until(lambda path=path, erase=erase: own.http.delete(path, params=erase).status_code == 204)  # type: ignore[misc]
        left = [] if is_archived else [(2, "closed", 1)]
        assert named.generations() == [(1, "erased", 1), *([(2, "erased", 1)] if number == 2 else left)]
    for key in ("a", "b"):
        assert error_of(named.chat(key, headers={"idempotency-key": key})) == (404, "session_closed")
    assert named.chat("c").status_code == 200
    assert named.generations() == [(1, "erased", 1), (2, "erased", 1), (3, "open", 1)]
    assert named.events(1)[-1]["type"] == "SessionErased"


@pytest.mark.parametrize("is_begun", [False, True])
def test_agents_sessions_end_with_the_generation_of_their_root(own: Stand, is_begun: bool, tmp_path: Path) -> None:
    """A retry gets its own agent's reply, whose key another agent has used too, or learns that it is archived."""
    named = Named(own)

    def sub(agent: str, text: str = "Hello") -> httpx.Response:
        return named.chat(text, headers={"x-turnlog-agent-id": agent, "idempotency-key": "1"})

    named.chat("a")
    replies = {agent: sub(agent) for agent in ("one", "two")}
    own.http.put(f"{named.path}/reward", json={"reward": 1.0})
    named.finish()
    for agent in replies:
        assert error_of(own.http.get(f"/sessions/{named.name}:{agent}")) == (404, "session_closed")
    if is_begun:
        named.chat("b")
    for agent, reply in replies.items():
        again = sub(agent)
        assert (again.json(), again.headers["x-turnlog-replayed"]) == (reply.json(), "true")
        assert again.headers[TOLD] == f"{named.name}:{agent}"
    assert error_of(sub("one", "Other")) == (422, "idempotency_mismatch")
    assert sub("three").headers[TOLD] == f"{own.get(named.path)['session_id']}:three"
    assert archived(own, tmp_path)["archived"] == 3
    assert error_of(sub("one")) == (404, "session_archived")


@pytest.mark.parametrize("finish_later", [False, True])
def test_a_name_goes_on_from_where_a_restore_left_it(own: Stand, finish_later: bool) -> None:
    """The second generation is undone, then the finish of the first. No number and no id comes again."""
    named = Named(own)
    named.chat("a")
    before_finish = make(own)
    named.finish()
    after_finish = make(own)
    second = named.chat("b", headers={"idempotency-key": "b"}).headers[TOLD]
    if finish_later:
        named.finish()
    restore(own, after_finish)
    assert named.generations() == [(1, "closed", 1), (2, "undone", 0)]
    third = named.chat("b", headers={"idempotency-key": "b"})
    assert (third.status_code, third.headers.get("x-turnlog-replayed")) == (200, None)
    assert third.headers[TOLD] not in (named.name, second)
    assert own.get(named.path)["session_id"] == third.headers[TOLD]
    restore(own, before_finish)
    assert named.generations() == [(1, "open", 1), (2, "undone", 0), (3, "undone", 0)]
    assert TOLD not in named.chat("c").headers
    assert named.finish() == {"session_id": named.name, "name": named.name, "generation": 1}
    named.chat("d")
    assert named.generations() == [(1, "closed", 2), (2, "undone", 0), (3, "undone", 0), (4, "open", 1)]
