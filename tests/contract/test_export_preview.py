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
    assert (found.rows, found.sessions, found.tokens, found.trained_tokens) == (4, 4, 12, 8)
    assert (found.scanned, found.complete, found.cursor) == (SESSIONS, True, None)
    assert reasons(found) == {"no committed turn": 4, "unreadable": 4}
    [damaged] = [missing for missing in found.missing if missing.reason == "unreadable"]
    assert {missing.reason: missing.lost_tokens for missing in found.missing}["unreadable"] == 2 * damaged.count
    assert damaged.examples[0].detail == "unreadable: turn 1: the content's hash differs from the log's"
    assert {one.session_id for one in damaged.examples} == {"s01", "s04", "s07", "s10"}


async def test_what_does_not_fit_one_answer_is_another_one(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    previews = await filled(store)
    whole = await previews.of(ExportQuery(), None)
    monkeypatch.setattr("app.export.pages.PAGE", 5)
    for limit in ("MAX_SESSIONS", "MAX_S"):
        with monkeypatch.context() as patched:
            patched.setattr(export_preview, limit, 0)
            parts = [await previews.of(ExportQuery(), None)]
            while not parts[-1].complete:
                parts.append(await previews.of(ExportQuery(), parts[-1].cursor))
        assert len(parts) > 2
        for name in ("rows", "tokens", "scanned"):
            assert sum(getattr(part, name) for part in parts) == getattr(whole, name)
        assert reasons(*parts) == reasons(whole)
