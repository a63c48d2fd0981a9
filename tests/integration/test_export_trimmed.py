"""Exports of a log made by hand, on both databases: turns whose trailing tokens the next prompt trims, as GLM's are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from helpers.log import BODY, committed, created, float64, int32
from helpers.store import CLAIMED_AT, Store

from app.domain.events import BlobRef, RewardAssigned
from app.export.exporter import Exporter
from app.export.query import ExportQuery
from app.store.log import Appended, StoredBlob
from app.store.log_sessions import AssignReward, Create
from app.store.log_turns import Commit, Known
from integration.corpus import SINGLE, parts
from integration.reading import CONTAINERS, Row, differences, read
from workers import codec
from workers.codec import Exchange, StoredTokens
from workers.reply import VersionSpan

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


async def add(store: Store, session_id: str, turns: list[Turn]) -> None:
    made = Create(session_id, 1.0, created(), BODY, None, None)
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
    tokens = codec.pack(StoredTokens(int32(turn.prompt), int32(turn.output), float64(sampled)))
    said, reply = b'{"role":"user","content":"u"}', b'{"role":"assistant","content":"a"}'
    exchange = codec.pack(Exchange(messages=[said], message=reply, reply=reply, headers=[]))
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
        content_hash=codec.content_hash(tokens, exchange),
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
        tokens,
        exchange,
        stored,
        [],
    )


async def reward(store: Store, session_id: str, value: float) -> None:
    assert isinstance(await store.submit(AssignReward(session_id, 4.0, RewardAssigned(value, {}, None))), Appended)


async def rows_of(store: Store, wish: ExportQuery) -> list[Row]:
    started = await Exporter(store.database, "test").start(wish, None)
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
