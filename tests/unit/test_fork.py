"""What a fork's log says: the line of its source up to the turn, as any session's own."""

from __future__ import annotations

from typing import Any

import msgspec
from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st
from making import Book, assistant, samples, user
from test_retention import Script

from app.domain.events import (
    BlobRef,
    BlobsTombstoned,
    Recorded,
    RewardAssigned,
    SessionClosed,
    TurnCommitted,
)
from app.domain.groups import oldest_version
from app.domain.samples import TurnTokens
from app.domain.session import Session, fold
from app.features.forks.rules import Forked, config_of_fork, fork
from workers.reply import VersionSpan

LOST_BY_PLACE = (
    *("number", "parent", "retry_key", "body_hash", "seq", "params", "tools"),
    *("branch", "branch_cause", "carries", "opened_seq", "incarnation", "committed_at"),
)
"""What of a folded turn may differ in a copy."""


PARAMS = BlobRef(0, "params", 2, "0" * 64)


def log_of(book: Book) -> list[Recorded]:
    """Its log, with the blob that all turns of a book name."""
    found = list(book.events)
    for place, recorded in enumerate(found):
        event = recorded.event
        if isinstance(event, TurnCommitted) and event.turn == 1 and not event.new_blobs:
            found[place] = Recorded(recorded.seq, recorded.at, msgspec.structs.replace(event, new_blobs=(PARAMS,)))
    return found


def forked(book: Book, turn: int, *, loss: bool = False, metadata: BlobRef | None = None) -> tuple[Forked, Session]:
    """The fork, and the fold of its log."""
    config = config_of_fork(book.session, None)
    made = fork(book.session, log_of(book), turn, config=config, body_hash="11", metadata=metadata, loss=loss)
    session = fold("f", [Recorded(seq, 1.0, event) for seq, event in enumerate(made.events, 1)])
    assert session is not None
    return made, session


def plain(session: Session, number: int) -> dict[str, Any]:
    turn = session.turn(number)
    return {name: getattr(turn, name) for name in turn.__struct_fields__ if name not in LOST_BY_PLACE}


steps = st.lists(
    st.tuples(st.sampled_from(["on", "on", "on", "back", "drift", "anew"]), st.booleans(), st.booleans()),
    min_size=1,
    max_size=12,
)


def written(window: int, plan: list[tuple[str, bool, bool]]) -> Script:
    script = Script(Book(window, on_divergence="segment"))
    for kind, pays, shares in plan:
        kinds: Any = ("routed_experts",) if pays else ()
        can_go_back = window > 0 and len(script.book.session.path) > 1 and len(script.history) > 2
        script.take(
            kinds,
            share=shares,
            back=1 if kind == "back" and can_go_back else 0,
            fresh=kind == "anew",
            prompt=[7, len(script.book.events)] if kind == "drift" else None,
        )
    return script


@settings(max_examples=cases(600), deadline=None)
@given(st.integers(0, 3), steps, st.data())
def test_a_fork_is_the_line_of_its_source(window: int, plan: list[tuple[str, bool, bool]], data: st.DataObject) -> None:
    book = written(window, plan).book
    source = book.session
    turn = data.draw(st.integers(1, len(source.turns)))
    made, session = forked(book, turn, loss=data.draw(st.booleans()))
    line = source.line(turn)
    assert session.path == tuple(range(1, len(line) + 1))
    assert [plain(session, place) for place in session.path] == [plain(source, number) for number in line]
    assert made.turns == dict(zip(session.path, line, strict=True))
    numbers = {0: 0} | {number: place for place, number in made.turns.items()}
    assert [session.turn(place).parent for place in session.path] == [
        numbers[source.turn(number).parent] for number in line
    ]
    # Its fences are its own places, below those of all later claims.
    assert [event.fence for event in made.copied] == [session.turn(place).seq for place in session.path]
    kept_payloads(made, session, source, window)
    content = {
        place: TurnTokens(event, *(getattr(book.content[made.turns[place]], name) for name in CONTENT))
        for place, event in enumerate(made.copied, 1)
    }
    as_samples(book, session, content, line)


CONTENT = ("suffix_ids", "output_ids", "logprobs")


def kept_payloads(made: Forked, session: Session, source: Session, window: int) -> None:
    """Those of the newest turns of each segment that the source can still read, with the same rows."""
    readable = [place for place in session.path if made.turns[place] in source.payloads]
    by_segment: dict[int, list[int]] = {}
    for place in readable:
        by_segment.setdefault(session.turn(place).segment, []).append(place)
    kept = {place for places in by_segment.values() for place in places[-window - 1 :]}
    assert set(session.payloads) == kept
    for place, [payload] in session.payloads.items():
        [theirs] = source.payloads[made.turns[place]]
        back = {(chunk.fence, chunk.number): made.chunks[chunk.fence, chunk.number] for chunk in payload.chunks}
        assert list(back.values()) == [(chunk.fence, chunk.number) for chunk in theirs.chunks]
        assert (payload.start, payload.stop, payload.shape) == (theirs.start, theirs.stop, theirs.shape)
    every = {(chunk.fence, chunk.number) for event in made.copied for ref in event.payloads for chunk in ref.chunks}
    freed = {(chunk.fence, chunk.number) for _, chunk in made.freed}
    assert freed | set(made.chunks) == every
    assert not freed & set(made.chunks)
    tombstones = [event for event in made.events if isinstance(event, BlobsTombstoned)]
    assert {key for event in tombstones for key in event.freed} == freed


def as_samples(book: Book, session: Session, content: dict[int, TurnTokens], line: list[int]) -> None:
    """As the samples of a session that has the line and nothing else; in the loss only where that was asked for."""
    assert session.fork is not None
    mine = samples(session, content)
    assert [int(one.loss_mask.sum()) for one in mine] == [
        int(one.sampled_mask.sum()) if session.fork.loss else 0 for one in mine
    ]
    if tuple(line) == book.session.path:
        for own, theirs in zip(mine, samples(book.session, book.content), strict=True):
            for name in ("tokens", "sampled_mask", "logprobs", "weight_versions"):
                assert getattr(own, name).tolist() == getattr(theirs, name).tolist()


def talked(count: int, window: int = 1) -> Book:
    book = Book(window)
    history = [user("0")]
    for number in range(1, count + 1):
        reply = assistant(f"reply {number}")
        book.turn(history, reply, retry_key=f"{number:032}", versions=[(str(number), 0, 1)])
        history += [reply, user(str(number))]
    return book


def test_the_age_of_context_does_not_count() -> None:
    book = talked(3)
    made, _ = forked(book, 2)
    assert oldest_version(made.events) is None
    more = [*made.events, sampled_later(made, "7")]
    assert oldest_version(more) == 7
    assert oldest_version(forked(book, 2, loss=True)[0].events) == 1


def sampled_later(made: Forked, version: str) -> Any:
    """The next turn, sampled under `version`."""
    return msgspec.structs.replace(made.copied[-1], turn=3, weight_versions=(VersionSpan(version, 0, 1),))


def test_a_fork_is_a_rollout_and_an_attempt_of_its_own() -> None:
    book = talked(1)
    book.add(RewardAssigned(1.0), SessionClosed())
    _, session = forked(book, 1)
    assert (session.status, session.reward, session.affinity, session.open_turns) == ("open", None, None, {})
    assert (session.config.parent, session.config.attempt) == (None, None)
