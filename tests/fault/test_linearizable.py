"""The checker itself finds every kind of lie. What a correct session may answer, each schedule has it accept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tools.simulation.calls import (
    Audit,
    Call,
    Chat,
    Close,
    Create,
    Done,
    Erase,
    Look,
    Numbers,
    Refused,
    Reply,
    Request,
    Reward,
    Shown,
    Taken,
    Told,
)
from tests.tools.simulation.linearizable import CONCURRENT, Checker, TooLong
from tests.tools.simulation.session_model import Rules, State

WINDOW = 1


def chat(*texts: str, key: str | None = None) -> Chat:
    """A history of user and assistant texts in turn."""
    roles = ("user", "assistant")
    return Chat(tuple((roles[i % 2], text) for i, text in enumerate(texts)), "body of " + "/".join(texts), key)


def taken(turn: int, text: str, *, replayed: bool = False) -> Taken:
    return Taken(turn, text, f"bytes of {text}", replayed)


def call(start: float, end: float, request: Request, reply: Reply | None) -> Call:
    return Call(start, end, request, reply)


def seen(*texts: str) -> Shown:
    """Each reply of a letter is to the same small letter."""
    return Shown(tuple(said for text in texts for said in (("user", text.lower()), ("assistant", text))))


FIRST = call(1, 2, chat("a", key="k1"), taken(1, "A"))
SECOND = call(3, 4, chat("a", "A", "b"), taken(2, "B"))
THIRD = call(5, 6, chat("a", "A", "b", "B", "c"), taken(3, "C"))
BOTH = Told(((1, 0, FIRST.request.body), (2, 1, SECOND.request.body)), False)  # type: ignore[union-attr]
CLOSED = Refused(404, "session_closed")
BUSY = Refused(409, "session_busy")
TOO_DEEP = Refused(400, "rollback_too_deep")
MISMATCH = Refused(400, "history_mismatch")
UNAVAILABLE = Refused(503, "store_unavailable")

LIES: dict[str, list[Call]] = {
    "an acknowledged turn is lost": [FIRST, SECOND, call(5, 6, Audit(), Told(BOTH.turns[:1], False))],
    "an acknowledged turn is not seen": [FIRST, SECOND, call(5, 6, Look(), seen("A"))],
    "a stale look": [FIRST, call(3, 4, SECOND.request, SECOND.reply), call(4.5, 5, Look(), seen("A"))],
    "a key is taken twice": [FIRST, call(3, 4, chat("a", key="k1"), taken(2, "A"))],
    "a retry is generated anew in secret": [FIRST, call(3, 4, chat("a", key="k1"), taken(1, "Z", replayed=True))],
    "two turns with one number": [
        FIRST,
        replace(SECOND, start=3, end=9),
        call(4, 8, chat("a", "A", "x"), taken(2, "X")),
    ],
    "both turns commit after one parent": [
        *(FIRST, replace(SECOND, start=3, end=9), call(4, 8, chat("a", "A", "x"), taken(3, "X"))),
        call(10, 11, Look(), seen("A", "B", "X")),
    ],
    "a number that goes back": [FIRST, replace(SECOND, reply=taken(4, "B")), replace(THIRD, reply=taken(3, "C"))],
    "a number that two turns share": [
        *(FIRST, call(3, 4, SECOND.request, None), replace(THIRD, reply=taken(2, "C"))),
        call(7, 8, Audit(), Told((*BOTH.turns, (2, 2, THIRD.request.body)), False)),  # type: ignore[union-attr]
    ],
    "a number that an audit has otherwise": [
        *(FIRST, replace(SECOND, reply=taken(3, "B")), call(5, 6, Audit(), BOTH)),
    ],
    "an unmarked request is given an older turn's reply": [
        *(FIRST, SECOND, call(5, 6, chat("a"), taken(1, "A", replayed=True))),
    ],
    "an unmarked request is given another's reply": [
        *(FIRST, call(3, 4, chat("a", "A", "b"), taken(1, "A", replayed=True))),
    ],
    "a turn after the close": [FIRST, call(3, 4, Close(), Done()), replace(SECOND, start=5, end=6)],
    "closed twice": [call(1, 2, Close(), Done()), call(3, 4, Close(), Done())],
    "closed by nobody": [FIRST, call(3, 4, Look(), CLOSED)],
    "open again": [FIRST, call(3, 4, Close(), Done()), call(5, 6, Look(), seen("A"))],
    "busy with nothing": [FIRST, call(3, 4, SECOND.request, BUSY)],
    "a claim lost to nobody": [FIRST, call(3, 4, SECOND.request, Refused(409, "claim_lost"))],
    "a mismatch that fits": [FIRST, call(3, 4, SECOND.request, MISMATCH)],
    "too deep within the window": [FIRST, SECOND, call(5, 6, chat("a", "A", "x"), TOO_DEEP)],
    "a rollback beyond the window": [FIRST, SECOND, call(5, 6, chat("a"), taken(3, "X"))],
    "a rollback by another conversation": [FIRST, call(3, 4, chat("x"), taken(2, "X"))],
    "another conversation that is too deep": [FIRST, SECOND, call(5, 6, chat("x"), TOO_DEEP)],
    "a rollback that kept what it discarded": [
        *(FIRST, SECOND, call(5, 6, chat("a", "A", "x"), taken(3, "X"))),
        call(7, 8, Look(), seen("A", "B", "X")),
    ],
    "a rollback of what was never sampled": [FIRST, SECOND, call(5, 6, chat("a", "X", "c"), taken(3, "C"))],
    "a turn nobody asked for": [FIRST, call(3, 4, Audit(), BOTH)],
    "a turn in a wrong place": [
        FIRST,
        SECOND,
        call(5, 6, Audit(), Told(((1, 0, "body of a"), (2, 0, "body of a/A/b")), False)),
    ],
    "a replay of nothing": [call(1, 2, chat("a", key="k1"), taken(1, "A", replayed=True))],
    "a key refused though its body is the same": [
        FIRST,
        call(3, 4, FIRST.request, Refused(422, "idempotency_mismatch")),
    ],
    "a broken turn that two saw differently": [
        *(
            FIRST,
            call(3, 4, SECOND.request, None),
            call(5, 6, Look(), seen("A", "B")),
            call(7, 8, Look(), Shown((*seen("A").messages, ("user", "b"), ("assistant", "C")))),
        ),
    ],
    "a broken turn that came and went": [
        *(
            FIRST,
            call(3, 4, SECOND.request, None),
            call(5, 6, Look(), seen("A", "B")),
            call(7, 8, Look(), seen("A")),
        ),
    ],
    "a refusal that nothing explains": [FIRST, call(3, 4, SECOND.request, Refused(404, "session_not_found"))],
}


FORK = call(5, 6, chat("a", "A", "x"), taken(3, "X"))
LOG = ((1, 0, "body of a"), (2, 1, "body of a/A/b"), (3, 1, "body of a/A/x"))

LIES_IN_A_TREE: dict[str, list[Call]] = {
    "a fork that hangs at the newest turn": [FIRST, SECOND, FORK, call(7, 8, Look(), seen("A", "B", "X"))],
    "a turn behind another than its own parent": [
        *(FIRST, SECOND, FORK, call(7, 8, Audit(), Told((*LOG[:2], (3, 2, LOG[2][2])), False))),
    ],
    "a turn that is in the log twice": [FIRST, SECOND, call(5, 6, Audit(), Told((*LOG[:2], (3, 1, LOG[1][2])), False))],
    "one number for two": [FIRST, replace(SECOND, end=9), call(4, 8, chat("a", "A", "x"), taken(2, "X"))],
    "the wrong one is the newest": [FIRST, SECOND, FORK, call(7, 8, Look(), seen("A", "B"))],
    "commits in an order that nobody saw": [
        *(FIRST, SECOND, FORK, call(7, 8, Audit(), Told((LOG[0], LOG[2], LOG[1]), False))),
    ],
    "an acknowledged turn is lost": [FIRST, SECOND, FORK, call(7, 8, Audit(), Told(LOG[:2], False))],
    "a key is taken twice": [FIRST, call(3, 4, chat("a", key="k1"), taken(2, "B"))],
    "a refusal for its history": [FIRST, call(3, 4, chat("x"), MISMATCH)],
    "a turn after the close": [FIRST, call(3, 4, Close(), Done()), replace(SECOND, start=5, end=6)],
}


AGENTS = [
    call(1, 2, replace(chat("a"), agent="x"), taken(1, "A")),
    call(3, 4, replace(chat("a"), agent="y"), taken(2, "A")),
]
"""Two turns with one history, each of its agent."""

OWN = Told(((1, 0, "body of a"), (2, 0, "body of a"), (3, 1, "body of a/A/b")), False)

MARKED = replace(chat("a", "A", "b"), retry_count=1)
FOUND = call(3, 4, replace(chat("a", "A", "b"), retry_count=2), taken(2, "B"))

SIMULATED: dict[str, tuple[list[Call], Rules, bool]] = {
    "a marked retry is given the newest turn's reply": (
        [FIRST, SECOND, call(5, 6, MARKED, taken(2, "B", replayed=True))],
        Rules(WINDOW),
        True,
    ),
    "a marked retry generates again": ([FIRST, SECOND, call(5, 6, MARKED, taken(3, "X"))], Rules(WINDOW), False),
    "a marked retry is too deep": ([FIRST, SECOND, call(5, 6, MARKED, TOO_DEEP)], Rules(0), False),
    "an attempt that came late is given the turn of a later one": (
        [FIRST, FOUND, replace(THIRD, start=5, end=6), call(7, 8, SECOND.request, taken(2, "B", replayed=True))],
        Rules(WINDOW),
        True,
    ),
    "a retry is given the turn of an earlier attempt, which was continued": (
        [FIRST, SECOND, THIRD, call(7, 8, MARKED, taken(2, "B", replayed=True))],
        Rules(WINDOW),
        False,
    ),
    "another conversation begins a segment, and is gone on with": (
        [
            *(FIRST, call(3, 4, chat("x"), taken(2, "X")), call(5, 6, chat("x", "X", "y"), taken(3, "Y"))),
            call(7, 8, Look(), Shown((("user", "x"), ("assistant", "X"), ("user", "y"), ("assistant", "Y")))),
        ],
        Rules(WINDOW, segments=True),
        True,
    ),
    "another conversation is refused where it may begin a segment": (
        [FIRST, call(3, 4, chat("x"), MISMATCH)],
        Rules(WINDOW, segments=True),
        False,
    ),
    "an agent goes on with its own turn": (
        [*AGENTS, call(5, 6, replace(chat("a", "A", "b"), agent="x"), taken(3, "B")), call(7, 8, Audit(), OWN)],
        Rules(None),
        True,
    ),
    "an agent goes on with another's turn": (
        [*AGENTS, call(5, 6, replace(chat("a", "A", "b"), agent="y"), taken(3, "B")), call(7, 8, Audit(), OWN)],
        Rules(None),
        False,
    ),
    "an engine's error changes nothing": (
        [FIRST, call(3, 4, SECOND.request, Refused(502, "upstream_invalid")), call(5, 6, Look(), seen("A"))],
        Rules(WINDOW),
        True,
    ),
    "an engine's error, and a turn": (
        [FIRST, call(3, 4, SECOND.request, Refused(502, "upstream_invalid")), call(5, 6, Look(), seen("A", "B"))],
        Rules(WINDOW),
        False,
    ),
    "erased, and rewarded": (
        [FIRST, call(3, 4, Erase(), Done()), call(5, 6, Reward(), Done())],
        Rules(WINDOW),
        False,
    ),
    "closed with its root": (
        [FIRST, call(3, 4, Close(with_root=True), Done()), call(5, 6, Look(), CLOSED)],
        Rules(WINDOW),
        True,
    ),
    "closed with its root, and gone on with": (
        [FIRST, call(3, 4, Close(with_root=True), Done()), replace(SECOND, start=5, end=6)],
        Rules(WINDOW),
        False,
    ),
    "of a number that no other read has": ([FIRST, call(3, 4, Look(), Numbers(frozenset({2})))], Rules(WINDOW), False),
}


@pytest.mark.parametrize(("history", "rules", "is_right"), SIMULATED.values(), ids=SIMULATED)
def test_what_only_the_simulation_has_is_judged(history: list[Call], rules: Rules, *, is_right: bool) -> None:
    assert (Checker(history, rules).fault() is None) == is_right


def test_a_session_begins_with_its_creation() -> None:
    created = call(0, 0.5, Create(), Done())
    assert Checker([created, FIRST], Rules(WINDOW), begins=State(created=False)).fault() is None
    assert Checker([FIRST], Rules(WINDOW), begins=State(created=False)).fault() is not None


def test_a_search_that_takes_too_long_is_given_up() -> None:
    with pytest.raises(TooLong):
        Checker([FIRST, SECOND, THIRD], Rules(WINDOW), most=1).fault()


@pytest.mark.parametrize("history", LIES_IN_A_TREE.values(), ids=LIES_IN_A_TREE)
def test_a_lie_about_a_tree_is_found(history: list[Call]) -> None:
    assert Checker(history, Rules(None), needs_rival=CONCURRENT).fault() is not None


@pytest.mark.parametrize("history", LIES.values(), ids=LIES)
def test_a_lie_is_found(history: list[Call]) -> None:
    assert Checker(history, Rules(WINDOW), needs_rival=CONCURRENT).fault() is not None
