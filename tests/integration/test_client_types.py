"""What the server answers has the fields and the types that the client says, and its lists have filters."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from integration.places import Places
from integration.stand import Stand, serving, user
from ops.simulator.process import SimulatorProcess
from turnlog import (
    Acknowledged,
    AsyncTurnlog,
    Checkpoint,
    Event,
    Excluded,
    Group,
    LeasedGroup,
    ListedGroup,
    ListedSession,
    PausedAdapter,
    Records,
    RestoredStore,
    Row,
    SampleFields,
    State,
    Tree,
    Turnlog,
    WaitingGroup,
)

EVENTS = {get_args(get_type_hints(kind)["type"])[0]: kind for kind in get_args(Event)}


def require(kind: Any, found: Iterable[Any]) -> None:
    """Each has this type, and no field that it does not name."""
    some = list(found)
    assert some
    names = set(get_type_hints(get_origin(kind) or kind))
    for one in some:
        msgspec.convert(one, kind)
        assert set(one) <= names, set(one) - names


@pytest.fixture
def client(stand: Stand) -> Iterator[Turnlog]:
    with Turnlog(stand.server.base_url) as made:
        yield made


def filled(client: Turnlog, stand: Stand) -> str:
    """A group of three: one with two turns and a rolled back one, one whose turn was refused, one without a turn."""
    group = uuid.uuid4().hex
    for attempt in range(3):
        session = client.create_session(group_id=group, attempt=attempt, metadata={"number": attempt, "task": group})
        talk = stand.known(session.id)
        if attempt == 0:
            talk.say("One")
            messages = list(talk.messages)
            talk.say("Two")
            assert talk.chat([*messages, user("Two, else")]).status_code == 200
            session.set_reward(0.5, components={"tests": 0.5})
            session.set_reward(0.25, turn=1)
            session.annotate("note", "A note")
            session.annotate("tags", [group])
        elif attempt == 1:
            assert talk.chat([user("Bad")], sim={"fault": "missing_meta_info"}).status_code == 502
            session.set_reward(1.0)
        else:
            session.set_reward(0.0)
        if attempt < 2:
            session.close()
    return group


def test_answers_have_the_types_that_they_are_said_to_have(client: Turnlog, stand: Stand) -> None:
    group = filled(client, stand)
    listed = list(client.sessions(group_id=group, order="asc"))
    require(ListedSession, listed)
    require(ListedGroup, [one for one in client.groups() if one["group_id"] == group])
    require(Group, [client.group(group)])
    sessions = [client.attach(one["session_id"]) for one in listed]
    require(Row, client.export(group_id=group, advantage="grpo", replay=True))
    require(Excluded, [one for one in client.export(group_id=group, explain=True) if "excluded" in one])
    require(State, [session.state() for session in sessions])
    require(State, [sessions[0].state(seq=4)])
    require(Tree, [session.tree(branches="all") for session in sessions])
    for session in sessions:
        for event in [*session.events(), *client.events(session_id=session.id)]:
            assert "error" not in event
            require(EVENTS[event["type"]], [event])
    require(Records, [sessions[2].get()])
    require(SampleFields, [one.fields for one in client.attach(_talked(client, stand)).samples().samples])
    consumer = f"trainer-{group}"
    waiting = client.hand_out(consumer, size=1000, explain=True)
    require(WaitingGroup, [one for one in waiting if one["group_id"] == group])
    sessions[2].close()
    [leased] = [one for one in client.hand_out(consumer, size=1000) if one["group_id"] == group]
    require(LeasedGroup[Row], [leased])
    require(Row, leased["rows"])
    require(Acknowledged, [client.acknowledge(consumer, [group])])
    try:
        require(PausedAdapter, [client.pause_adapter(group, lease_s=60)])
    finally:
        client.resume_adapter(group)


def _talked(client: Turnlog, stand: Stand) -> str:
    session = client.create_session()
    stand.known(session.id).say("Hello")
    return session.id


def test_checkpoints_too(sglang: SimulatorProcess, places: Places) -> None:
    with serving(places.new("types"), sglang.base_url) as stand, Turnlog(stand.server.base_url) as client:
        _talked(client, stand)
        require(Checkpoint, [client.checkpoint("one"), *client.checkpoints()])
        require(RestoredStore, [client.restore_checkpoint("one")])


def test_sessions_are_filtered(client: Turnlog, stand: Stand) -> None:
    group = filled(client, stand)

    def attempts(**filters: Any) -> list[int | None]:
        return [one["attempt"] for one in client.sessions(group_id=group, **filters)]

    assert attempts() == [2, 1, 0]
    assert attempts(limit=2) == [2, 1]
    assert attempts(limit=0) == []
    assert attempts(state="idle") == [2]
    assert attempts(tag=group) == [0]
    assert attempts(attempt=1, status="closed") == [1]
    assert attempts(metadata={"number": 2, "task": group}) == [2]
    assert attempts(metadata={"number": 3}) == []
    assert attempts(sort="reward", order="asc") == [2, 0, 1]
    assert attempts(unrewarded=False, min_reward=0.5, limit=None) == [1, 0]
    with pytest.raises(TypeError, match="grup is not a parameter, did you mean group_id"):
        list(client.sessions(grup=group))  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="shape must be one of turnlog"):
        client.export(shape="turnlogs")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="branches must be one of kept"):
        client.attach("any").tree(branches="most")  # type: ignore[typeddict-item]

    async def listed() -> list[str]:
        async with AsyncTurnlog(stand.server.base_url) as turnlog:
            groups = [one["group_id"] async for one in turnlog.groups() if one["group_id"] == group]
            sessions = [one["session_id"] async for one in turnlog.sessions(metadata={"task": group}, limit=1)]
        return groups + sessions

    assert asyncio.run(listed()) == [group, next(client.sessions(group_id=group))["session_id"]]
