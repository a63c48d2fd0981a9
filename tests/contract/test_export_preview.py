"""A preview of a large store comes in parts, and the parts are the whole."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.log import created, float64, int32
from helpers.store import Store

from app.export.query import ExportQuery
from app.features.page import preview as export_preview
from app.features.page.preview import Preview, Previews
from app.store.log import StoredBlob
from app.store.log_sessions import Create
from workers import codec
from workers.codec import Exchange, StoredTokens

pytestmark = pytest.mark.anyio

SAID = b'{"role":"assistant","content":"a"}'
HASH = codec.content_hash(
    codec.pack(StoredTokens(int32([1]), int32([2, 3]), float64([-0.5, -1.5]))),
    codec.pack(Exchange(messages=[SAID], message=SAID, reply=SAID, headers=[])),
)
"""Of what `Store.take_turn` stores: one prompt token and two sampled ones."""

PARAMS = StoredBlob(0, "params", 2, "h" * 64, codec.compress(b"{}"))

SESSIONS = 12


async def filled(store: Store) -> Previews:
    """Of each three sessions one has a turn, one has none, and one is damaged."""
    for number in range(SESSIONS):
        name = f"s{number:02}"
        await store.submit(Create(name, 1.0, created(), None))
        if number % 3 == 0:
            await store.take_turn(name, text=SAID, content_hash=HASH, base_messages=0, blobs=[PARAMS])
        if number % 3 == 1:
            await store.take_turn(name, text=SAID, content_hash="f" * 64, blobs=[PARAMS])
    return Previews(store.database, "test")


def reasons(*previews: Preview) -> Counter[str]:
    counts: Counter[str] = Counter()
    for preview in previews:
        counts.update({missing.reason: missing.count for missing in preview.missing})
    return counts


async def test_reasons_are_counted_by_kind_and_examples_say_all(store: Store) -> None:
    found = await (await filled(store)).of(ExportQuery(), None)
    assert (found.rows, found.sessions, found.tokens, found.sampled_tokens) == (4, 4, 12, 8)
    assert (found.scanned, found.complete, found.cursor) == (SESSIONS, True, None)
    assert reasons(found) == {"no committed turn": 4, "unreadable": 4}
    [damaged] = [missing for missing in found.missing if missing.reason == "unreadable"]
    assert damaged.examples[0].detail == "unreadable: turn 1: the content's hash is not the log's"
    assert {one.session_id for one in damaged.examples} == {"s01", "s04", "s07", "s10"}


@pytest.mark.parametrize("limit", ["MAX_SESSIONS", "MAX_S"])
async def test_what_does_not_fit_one_answer_is_another_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    previews = await filled(store)
    whole = await previews.of(ExportQuery(), None)
    monkeypatch.setattr(export_preview, limit, 0)
    monkeypatch.setattr("app.export.pages.PAGE", 5)
    parts = [await previews.of(ExportQuery(), None)]
    while not parts[-1].complete:
        parts.append(await previews.of(ExportQuery(), parts[-1].cursor))
    assert len(parts) > 2
    assert sum(part.rows for part in parts) == whole.rows
    assert sum(part.tokens for part in parts) == whole.tokens
    assert sum(part.scanned for part in parts) == whole.scanned
    assert reasons(*parts) == reasons(whole)


async def test_few_examples_stand_for_many(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_preview, "EXAMPLES", 2)
    monkeypatch.setattr(export_preview, "MAX_REASONS", 1)
    found = await (await filled(store)).of(ExportQuery(), None)
    assert sorted(missing.count for missing in found.missing) == [4, 4]
    assert all(len(missing.examples) == 2 for missing in found.missing)
    assert export_preview.OTHER in reasons(found)
