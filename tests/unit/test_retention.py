"""Which replay payloads a commit tombstones, and which chunks go with them."""

from __future__ import annotations

from typing import Any

import pytest
from making import Book, assistant, user

from app.domain import retention
from app.domain.events import (
    BlobsTombstoned,
    ChunkRef,
    PayloadRef,
    ReplayKind,
    RewardAssigned,
    SessionClosed,
    TurnRejected,
    UnknownEvent,
)

HASH = "0" * 32


class Script:
    """A book whose turns bring payloads: each turn of the conversation adds a row, which is a chunk of its own."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.history = [user("0")]
        self.gone: list[BlobsTombstoned] = []

    def take(
        self,
        kinds: tuple[ReplayKind, ...] = ("routed_experts",),
        *,
        share: bool = True,
        back: int = 0,
        fresh: bool = False,
        prompt: list[int] | None = None,
    ) -> int:
        """A turn; `back` turns are discarded by it, `fresh` begins another conversation. Returns its fence."""
        if fresh:
            self.history = [user(f"anew {len(self.book.events)}")]
        if back:
            self.history = self.history[: -2 * back]
        seen, fences = len(self.book.events), list[int]()

        def brought(fence: int) -> tuple[PayloadRef, ...]:
            fences.append(fence)
            return tuple(self._ref(kind, fence, number, share) for number, kind in enumerate(kinds))

        reply = assistant(f"reply {seen}")
        self.book.turn(self.history, reply, payloads=brought, prompt=prompt)
        self.history = [*self.history, reply, user(f"next {seen}")]
        new = [recorded.event for recorded in self.book.events[seen:]]
        self.gone += [event for event in new if isinstance(event, BlobsTombstoned)]
        return fences[0]

    def _ref(self, kind: ReplayKind, fence: int, number: int, share: bool) -> PayloadRef:
        opened = self.book.session.open_turn
        assert opened is not None
        before = self.book.session.payload(opened.parent, kind) if share else None
        start = before.stop if before else 0
        chunk = ChunkRef(fence, number, start, 1, "uint8", 2, HASH)
        return PayloadRef(kind, 0, start + 1, 0, (2,), (chunk,), len(before.chunks) if before else 0)

    @property
    def kept(self) -> list[int]:
        return sorted(self.book.session.payloads)

    def live(self) -> set[int]:
        """Fences of the chunks that a payload can still need."""
        payloads = (payload for kept in self.book.session.payloads.values() for payload in kept)
        return {chunk.fence for payload in payloads for chunk in payload.chunks}


@pytest.mark.parametrize("window", [0, 1, 3])
def test_kept_are_the_newest_turns_of_the_window_and_one(window: int) -> None:
    script = Script(Book(window))
    for turn in range(1, 8):
        script.take()
        assert script.kept == list(range(max(1, turn - window), turn + 1))
    assert [event.turns for event in script.gone] == [(turn,) for turn in range(1, 7 - window)]
    assert {event.reason for event in script.gone} == {"window"}
    assert [event.freed for event in script.gone] == [()] * len(script.gone)


def test_chunks_go_when_no_payload_refers_to_them() -> None:
    """Those that a later payload shares stay, also where the turn that brought them was discarded."""
    script = Script(Book(1))
    fences = [script.take(share=False) for _ in range(5)]
    assert [event.freed for event in script.gone] == [((fence, 0),) for fence in fences[:3]]
    assert script.live() == set(fences[3:])
    script = Script(Book(0))
    first, second, alone = script.take(), script.take(), script.take(share=False)
    assert [(event.turns, event.freed) for event in script.gone] == [((1,), ()), ((2,), ((first, 0), (second, 0)))]
    assert script.live() == {alone}
    script = Script(Book(1))
    first, second, third = script.take(), script.take(), script.take(back=1)
    assert [(event.turns, event.freed) for event in script.gone] == [((2,), ((second, 0),))]
    assert script.live() == {first, third}


@pytest.mark.parametrize(("window", "back"), [(1, 1), (3, 1), (3, 2), (3, 3)])
def test_a_discarded_turns_payload_goes_with_it(window: int, back: int) -> None:
    script = Script(Book(window))
    for _ in range(5):
        script.take(share=False)
    before = set(script.kept)
    script.take(share=False, back=back)
    discarded = set(range(5 - back + 1, 6))
    assert set(script.gone[-1].turns) >= discarded
    live = [turn for turn in script.book.session.path if turn in before] + [6]
    assert script.kept == live[-window - 1 :]
    newest = [type(recorded.event).__name__ for recorded in script.book.events[-3:]]
    assert newest == ["RolledBack", "TurnCommitted", "BlobsTombstoned"]


def test_turns_without_a_payload_do_not_push_one_out() -> None:
    """A reply of no tokens has none, and the rows of the turns before it are still needed."""
    script = Script(Book(0))
    for _ in range(3):
        script.take(())
    assert (script.gone, retention.tombstone_all(script.book.session)) == ([], None)
    script = Script(Book(1))
    script.take()
    for _ in range(4):
        script.take(())
    assert (script.kept, script.gone) == ([1], [])
    script.take()
    assert script.kept == [1, 6]
    script.take()
    assert (script.kept, [event.turns for event in script.gone]) == ([6, 7], [(1,)])


def test_a_turn_stays_for_the_kind_that_no_newer_turn_has() -> None:
    script = Script(Book(0))
    fence = script.take(("routed_experts", "indexer_topk"))
    script.take(("indexer_topk",), share=False)
    assert (script.kept, script.gone) == ([1, 2], [])
    script.take(("routed_experts",), share=False)
    [event] = script.gone
    assert (event.turns, event.freed) == ((1,), ((fence, 0), (fence, 1)))
    assert script.kept == [2, 3]
    assert script.book.session.payload(2, "routed_experts") is None


@pytest.mark.parametrize("retain", ["window", "all"])
def test_a_closed_session_can_lose_all_that_is_left(retain: str) -> None:
    script = Script(Book(1, retain="all" if retain == "all" else "window"))
    fences = [script.take() for _ in range(4)]
    left = script.kept
    script.book.add(SessionClosed())
    event = retention.tombstone_all(script.book.session)
    assert event is not None
    assert (event.turns, event.reason) == (tuple(left), "closed")
    assert event.freed == tuple((fence, 0) for fence in fences)
    script.book.add(event, RewardAssigned(1.0))
    assert (script.book.session.payloads, retention.tombstone_all(script.book.session)) == ({}, None)


def test_a_payload_that_shares_what_is_gone_refuses_the_session() -> None:
    """Better unreadable than rows of something else."""
    script = Script(Book(1))
    script.take()

    def shares_too_much(fence: int) -> tuple[PayloadRef, ...]:
        return (PayloadRef("routed_experts", 0, 2, 0, (2,), (), shared=2),)

    with pytest.raises(UnknownEvent, match="shares chunks"):
        script.book.turn(script.history, assistant("x"), payloads=shares_too_much)


def test_a_superseded_payload_goes_though_a_turn_that_continued_it_fails_later() -> None:
    book = Book(history="tree")

    def take(messages: list[dict[str, Any]], reply: str) -> list[dict[str, Any]]:
        book.turn(messages, assistant(reply), payloads=brought)
        return [*messages, assistant(reply), user("on")]

    def brought(fence: int) -> tuple[PayloadRef, ...]:
        return (PayloadRef("routed_experts", 0, 1, 0, (2,), (ChunkRef(fence, 0, 0, 1, "uint8", 2, HASH),), 0),)

    asked = take([user("0")], "first")
    fence = book.open(book.plan(take(asked, "lost")), body_hash="01")
    history = take(take(asked, "again"), "on it")
    assert 2 in book.session.payloads, "a turn in flight continues it"
    book.add(TurnRejected(3, fence, "upstream_invalid"))
    take(history, "done")
    assert 2 not in book.session.payloads
