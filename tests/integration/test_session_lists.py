"""`GET /sessions` with every filter, and a session's state: what the command line asks for."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from integration.stand import Stand, error_of


def every(stand: Stand, limit: int = 2, **parameters: Any) -> list[str]:
    """The ids of all pages."""
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = stand.get("/sessions", limit=limit, **parameters, **cursor)
        found += [one["session_id"] for one in page["sessions"]]
        if page["next_cursor"] is None:
            return found
        cursor = {"cursor": page["next_cursor"]}


class Group:
    """Five sessions of a group: rewards 0 to 3 and none, two turns in the first, the last two closed; 0 and 4 have a
    verdict, 2 has one of a longer name, 3 had one."""

    def __init__(self, stand: Stand) -> None:
        self.name = f"listed-{uuid.uuid4().hex}"
        given = [
            {"difficulty": number % 2, "env": {"name": "maze"}, "odd": number % 2 == 1, "tag": str(number), "a.b": 1}
            for number in range(5)
        ]
        self.talks = [
            stand.talk(group_id=self.name, attempt=number, metadata=given[number], session_id=f"{self.name}-{number}")
            for number in range(5)
        ]
        self.talks[0].say("One")
        self.talks[0].say("Two")
        for number in range(4):
            stand.http.put(f"{self.talks[number].path}/reward", json={"reward": float(number)}).raise_for_status()
        self.talks[1].noted(note="odd", tags=["look", "x"])
        self.talks[0].annotate("verdict", {"passed": True}, writer="ann")
        self.talks[0].annotate("verdict", False, turn=1)
        self.talks[0].annotate("judged", 1, turn=2)
        self.talks[2].annotate("verdict-2", 0.5)
        self.talks[3].annotate("verdict", 1)
        stand.http.delete(f"{self.talks[3].path}/annotations/verdict").raise_for_status()
        for talk in self.talks[3:]:
            stand.http.delete(talk.path).raise_for_status()
        self.talks[4].annotate("verdict", "good")

    def numbers(self, ids: list[str]) -> list[int]:
        return [int(one.rpartition("-")[2]) for one in ids]


FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [4, 3, 2, 1, 0]),
    ({"order": "asc"}, [0, 1, 2, 3, 4]),
    ({"status": "closed"}, [4, 3]),
    ({"state": "idle"}, [2, 1, 0]),
    ({"attempt": 2}, [2]),
    ({"min_reward": 1, "max_reward": 2}, [2, 1]),
    ({"unrewarded": "true"}, [4]),
    ({"sort": "reward", "order": "asc"}, [0, 1, 2, 3, 4]),
    ({"sort": "turns", "limit": 1, "attempt": 0}, [0]),
    ({"engine": "http://elsewhere"}, []),
    ({"tag": "look"}, [1]),
    ({"annotated": "verdict"}, [4, 0]),
    ({"unannotated": "verdict"}, [3, 2, 1]),
    ({"unannotated": "verdict", "annotated": "note"}, [1]),
    ({"annotated": "judged"}, []),
    ({"unannotated": "verdict", "metadata.tag": 2}, [2]),
    ({"stuck_s": 0}, []),
    ({"metadata.difficulty": 0, "metadata.tag": 2}, [2]),
    ({"metadata.odd": "true", "status": "open"}, [1]),
    ({"metadata.env.name": "maze", "order": "asc"}, [0, 1, 2, 3, 4]),
    ({"metadata.env": '{"name": "maze"}', "attempt": 4}, [4]),
    ({"metadata.a.b": 1, "min_reward": 3}, [3]),
]


@pytest.fixture(scope="module")
def group(shared: Stand) -> Group:
    return Group(shared)


def test_filters_and_orders(stand: Stand, group: Group) -> None:
    for asked, wanted in FILTERS:
        for mine in ({"group_id": group.name}, {"prefix": f"{group.name}-"}):
            assert group.numbers(every(stand, **mine, **asked)) == wanted, asked


def test_a_cursor_is_of_one_order(stand: Stand, group: Group) -> None:
    cursor = stand.get("/sessions", group_id=group.name, limit=2)["next_cursor"]
    other = stand.get("/sessions", group_id=group.name, limit=2, sort="turns")["next_cursor"]
    for wrong in ({"cursor": other}, {"cursor": cursor, "sort": "turns"}, {"cursor": cursor, "order": "asc"}):
        assert error_of(stand.http.get("/sessions", params=wrong)) == (400, "invalid_request"), wrong


WRONG: tuple[dict[str, Any], ...] = (
    {"sorted": "turns"},
    *({"status": "idle"}, {"status": "open", "state": "idle"}, {"attempt": -1}, {"min_reward": "nan"}),
    *({"annotated": "a b"}, {"unannotated": ""}, {"metadata": "difficulty=0"}, {"metadata.": "1"}, {"prefix": "a b"}),
    *({"limit": 1001}, {"limit": "x"}, {"cursor": "zzz"}),
)


def test_a_wrong_parameter_is_refused(stand: Stand) -> None:
    for wrong in WRONG:
        assert error_of(stand.http.get("/sessions", params=wrong)) == (400, "invalid_request"), wrong


def test_a_session_after_any_event(stand: Stand) -> None:
    talk = stand.talk(metadata={"task": "seven"})
    talk.say("One")
    talk.say("Two")
    stand.http.delete(talk.path).raise_for_status()
    state = stand.get(f"{talk.path}/state")
    assert (state["status"], len(state["turns"]), state["metadata"]) == ("closed", 2, {"task": "seven"})
    assert {**state, "checkpoints": [], "budgets": [], "limit": None} == stand.get(f"/ui/api{talk.path}")
    first = stand.get(f"{talk.path}/state", seq=talk.types().index("TurnCommitted") + 1)
    assert (first["status"], len(first["turns"]), first["last_seq"]) == ("open", 1, state["seq"])
    assert error_of(stand.http.get("/sessions/never-seen/state")) == (404, "session_not_found")


def test_a_metadata_filter_sees_forks_and_no_erased_session(stand: Stand) -> None:
    mark = uuid.uuid4().hex
    talk = stand.talk(metadata={"mark": mark})
    talk.say("One")
    [fork] = stand.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    assert every(stand, **{"metadata.mark": mark}) == [fork["session_id"], talk.id]
    stand.http.delete(talk.path, params={"erase": "true"}).raise_for_status()
    assert every(stand, **{"metadata.mark": mark}) == [fork["session_id"]]
