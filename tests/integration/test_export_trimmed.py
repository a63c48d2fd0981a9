"""Exports of a log made by hand, on both databases: turns whose trailing tokens the next prompt trims, as GLM's are."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers.log import BODY, committed, created, float64, int32
from helpers.store import CLAIMED_AT, Store
from sqlalchemy import update

from app.domain.events import BlobRef, RewardAssigned, VersionSpan
from app.export.exporter import Exporter
from app.export.query import ExportQuery
from app.store.log import Appended, StoredBlob
from app.store.log_sessions import AssignReward, Create
from app.store.log_turns import Commit, Known
from app.store.schema import turns as turns_table
from integration.corpus import SINGLE, parts
from integration.reading import CONTAINERS, Row, differences, read
from workers import codec
from workers.codec import Facts, Wire

pytestmark = pytest.mark.anyio

PARAMS = b'{"model":"glm"}'


class Turn(msgspec.Struct):
    """What a turn adds: `trimmed` of the tokens before it, new prompt ids, output ids, and where its output begins."""

    prompt: list[int]
    output: list[int]
    trimmed: int = 0


TRIMMED = [Turn([1, 2, 3], [10, 11, 99]), Turn([4, 5], [12, 13, 99], 1), Turn([6], [14], 1)]
"""The role token 99 ends a reply, and the next prompt brings its own in its place."""

TOKENS = [1, 2, 3, 10, 11, 4, 5, 12, 13, 6, 14]
MASK = [0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 1]


def logprob(turn: int, place: int) -> float:
    return -(turn + place / 7)


LOGPROBS = [0, 0, 0, logprob(1, 0), logprob(1, 1), 0, 0, logprob(2, 0), logprob(2, 1), 0, logprob(3, 0)]


async def add(store: Store, session_id: str, turns: list[Turn], group_id: str | None = None) -> None:
    made = Create(session_id, 1.0, created(group_id=group_id), BODY, group_id, None)
    assert isinstance(await store.submit(made), Appended)
    length = 0
    for number, turn in enumerate(turns, 1):
        session = await store.session(session_id)
        assert session is not None
        taken = await store.claim(session_id, session.version, turn=number, parent=number - 1)
        assert isinstance(taken, Appended)
        await store.submit(turn_of(store, session_id, taken.events[0].seq, number, turn, length))
        length += len(turn.prompt) + len(turn.output) - turn.trimmed


def turn_of(store: Store, session_id: str, fence: int, number: int, turn: Turn, length: int) -> Commit:
    sampled = [logprob(number, place) for place in range(len(turn.output))]
    facts = codec.pack(Facts(int32(turn.prompt), int32(turn.output), float64(sampled)))
    said, reply = b'{"role":"user","content":"u"}', b'{"role":"assistant","content":"a"}'
    wire = codec.pack(Wire(messages=[said], message=reply, reply=reply, headers=[]))
    ref = BlobRef(0, "params", len(PARAMS), "h" * 64)
    event = committed(
        number,
        number - 1,
        fence,
        base_messages=2 * (number - 1),
        base_tokens=length - turn.trimmed,
        trimmed=turn.trimmed,
        suffix_tokens=len(turn.prompt),
        output_tokens=len(turn.output),
        weight_versions=(VersionSpan(str(number), 0, len(turn.output)),),
        content_hash=codec.content_hash(facts, wire),
        new_blobs=(ref,) if number == 1 else (),
    )
    stored = [StoredBlob(0, "params", len(PARAMS), "h" * 64, codec.compress(PARAMS))] if number == 1 else []
    return Commit(
        session_id,
        fence,
        store.me,
        CLAIMED_AT,
        3.0,
        Known(fence, CLAIMED_AT, number - 1),
        [event],
        facts,
        wire,
        stored,
        [],
    )


async def reward(store: Store, session_id: str, value: float) -> None:
    assert isinstance(await store.submit(AssignReward(session_id, 4.0, RewardAssigned(value, {}, None))), Appended)


async def rows_of(store: Store, wish: ExportQuery, cursor: str | None = None) -> list[Row]:
    started = await Exporter(store.database, "test").start(wish, cursor)
    return read(wish.format, b"".join([piece async for piece in started.pieces]))


@pytest.mark.long
@pytest.mark.parametrize("shape", SINGLE)
async def test_trimmed_tokens_are_in_no_shape_and_all_stay_in_step(store: Store, shape: str) -> None:
    await add(store, "glm", TRIMMED)
    await reward(store, "glm", 1.0)
    [row] = await rows_of(store, ExportQuery(shape=shape))
    tokens, mask, logprobs = parts(shape, row)
    assert (tokens, mask) == (TOKENS, MASK)
    assert np.array_equal(np.array(logprobs, np.float32), np.array(LOGPROBS, np.float32))
    for format in CONTAINERS[1:]:
        assert differences([row], await rows_of(store, ExportQuery(shape=shape, format=format))) == []


async def test_a_trimmed_tokens_version_and_span_go_with_it(store: Store) -> None:
    await add(store, "glm", TRIMMED)
    [row] = await rows_of(store, ExportQuery())
    assert row["weight_versions"] == [-1, -1, -1, 1, 1, -1, -1, 2, 2, -1, 3]
    assert [(span["start"], span["output_start"], span["end"]) for span in row["turns"]] == [
        (0, 3, 5),
        (5, 7, 9),
        (9, 10, 11),
    ]
    [prime] = await rows_of(store, ExportQuery(shape="prime-rl"))
    assert len(prime["temperatures"]) == len(TOKENS)
    [document] = await rows_of(store, ExportQuery(format="atif"))
    metrics = [step["metrics"] for step in document["steps"] if "metrics" in step]
    assert [one["completion_token_ids"] for one in metrics] == [[10, 11], [12, 13], [14]]


async def test_a_cut_behind_a_turn_keeps_its_last_tokens_which_nothing_trims(store: Store) -> None:
    await add(store, "glm", TRIMMED)
    for length, expected in ((6, [*TOKENS[:5], 99]), (10, [*TOKENS[:9], 99]), (11, TOKENS)):
        [row] = await rows_of(store, ExportQuery(max_seq_len=length))
        assert row["tokens"] == expected
        assert row["status"] == ("completed" if length == 11 else "truncated")
    assert await rows_of(store, ExportQuery(max_seq_len=5)) == []


async def test_tokens_that_do_not_add_up_are_left_out_with_the_reason_and_others_are_not(store: Store) -> None:
    await add(store, "bad", [Turn([1], [2]), Turn([3], [4])])
    await add(store, "good", TRIMMED)
    wrong = Facts(int32([1, 1]), int32([2]), float64([-1.0]))
    await damage(store, "bad", wrong)
    rows = await rows_of(store, ExportQuery(explain=True))
    assert [(row["session_id"], row.get("excluded", "")[:10]) for row in rows] == [("bad", "unreadable"), ("good", "")]
    assert "hash" in rows[0]["excluded"]
    assert [row["session_id"] for row in await rows_of(store, ExportQuery())] == ["good"]


async def damage(store: Store, session_id: str, facts: Facts) -> None:
    changed = (
        update(turns_table)
        .where(turns_table.c.session_id == session_id, turns_table.c.turn == 1)
        .values(facts=codec.pack(facts))
    )
    await store.database.write(lambda tx: tx.run(changed, {}), durable=True)


async def test_groups_stand_at_the_place_of_their_last_session(store: Store) -> None:
    for name, group_id in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("c", None), ("b2", "b"), ("late", "a")):
        await add(store, name, TRIMMED, group_id)
        await reward(store, name, float(len(name)))
    wish = ExportQuery(shape="atropos", explain=True)
    rows = await rows_of(store, wish)
    assert [row["session_ids"] for row in rows] == [["c"], ["b1", "b2"], ["a1", "a2", "late"]]
    for place, row in enumerate(rows):
        assert await rows_of(store, wish, row["cursor"]) == rows[place + 1 :]
    first = await Exporter(store.database, "test").start(wish.model_copy(update={"limit": 1}), None)
    before = b"".join([piece async for piece in first.pieces])
    assert read("ndjson", before)[0]["session_ids"] == ["c"]
    await reward(store, "b1", 9.0)
    assert [row["session_ids"] for row in await rows_of(store, wish, first.cursor)] == [
        ["c"],
        ["b1", "b2"],
        ["a1", "a2", "late"],
    ]
    fresh = await rows_of(store, wish)
    assert [row["session_ids"] for row in fresh] == [["c"], ["a1", "a2", "late"], ["b1", "b2"]]
    assert fresh[-1]["scores"] == [9.0, 2.0]
    chosen = await rows_of(store, ExportQuery(group_id="b", shape="atropos"))
    assert [row["session_ids"] for row in chosen] == [["b1", "b2"]]


async def test_grpo_is_numpys_on_both_databases(store: Store) -> None:
    given: dict[str, float] = {"a": 1.0, "b": 0.0, "c": 0.25, "d": 1e6}
    for name, value in given.items():
        await add(store, name, TRIMMED, "g")
        await reward(store, name, -5.0)
        await reward(store, name, value)
    await add(store, "unrewarded", TRIMMED, "g")
    await add(store, "alone", TRIMMED, None)
    await reward(store, "alone", 1.0)
    values = np.array(list(given.values()))
    expected = dict(zip(given, (values - values.mean()) / (values.std(ddof=1) + 1e-6), strict=True))
    rows: list[dict[str, Any]] = await rows_of(store, ExportQuery(advantage="grpo"))
    found = {row["session_id"]: row.get("advantage") for row in rows}
    assert {name: found[name] for name in given} == pytest.approx(expected, rel=1e-12)
    assert found["unrewarded"] is found["alone"] is None
