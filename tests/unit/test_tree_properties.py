"""Trees of turns grown by random scripts: what holds of each, whatever is asked and in whatever order it commits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from growing import ROW_BYTES, Ask, Grown, Tree, plain
from hypothesis import example, given
from hypothesis import strategies as st
from making import SESSION

from app.domain.branches import Branches, Loss, branch_rows
from app.domain.events import SessionConfig
from app.domain.retention import chunk_keys
from app.domain.rules import TreeIndex, leaves, superseded
from app.domain.samples import Sample, sample, segments
from app.domain.session import decode_session, encode_session, fold

TEXTS = st.sampled_from("aab")
SOME = st.sampled_from((0, 0, 1, 2, 3, 5))
ASKS = st.builds(
    Ask,
    after=st.sampled_from((0, 1, 1, 2, 3, 4, 7)),
    repeats=SOME,
    texts=st.lists(TEXTS, min_size=1, max_size=2).map(tuple),
    carries=SOME,
    agent=st.sampled_from((None, None, "m", "n")),
    drifts=st.sampled_from((False, False, True)),
    respelled=st.sampled_from((False, False, True)),
    reply=st.sampled_from("xxy"),
    output=st.integers(1, 3),
    brings=st.booleans(),
    waits=st.sampled_from((False, False, True)),
    stays=st.sampled_from((0, 0, 1, 2)),
    fails=st.sampled_from((False, False, False, True)),
    place=st.integers(0, 7),
)
ROUNDS = st.lists(st.lists(ASKS, max_size=4), min_size=1, max_size=5)
"""Few texts and replies, so that equal histories, repeats and carried messages happen by themselves."""

TRIMS = st.sampled_from((0, 0, 1))
WINDOWS = st.sampled_from((0, 1, 2))


def grown(rounds: Sequence[Sequence[Ask]], window: int = 1, trim: int = 0, max_bytes: int | None = None) -> Watched:
    tree = Watched(window, trim, max_bytes)
    tree.tree.grow(rounds)
    return tree


class Watched:
    """A tree that is checked after each commit, and what has been seen of it."""

    def __init__(self, window: int, trim: int = 0, max_bytes: int | None = None) -> None:
        self.branches: dict[int, tuple[int, str | None, int | None]] = {}
        self.gone: set[int] = set()
        """Turns whose payloads were once in no leaf's window: they need not be there for a leaf that comes later."""
        self._window = window
        self.tree = Tree(
            SessionConfig(rollback_window=window, history="tree"), self._look, trim=trim, max_bytes=max_bytes
        )

    def _look(self, tree: Tree) -> None:
        is_commit = len(tree.ended) > len(self.branches)
        self._branches(tree)
        self._payloads(tree, is_commit)

    def _branches(self, tree: Tree) -> None:
        """Those of earlier turns are as they were, and the newest is what its request makes it."""
        session = tree.session
        found = {turn.number: (turn.branch, turn.branch_cause, turn.carries) for turn in session.turns}
        assert found.items() >= self.branches.items()
        for number in found.keys() - self.branches.keys():
            assert found[number] == branch_expected(tree, tree.turns[number], list(self.branches.values()))
        self.branches = found

    def _payloads(self, tree: Tree, is_commit: bool) -> None:
        session = tree.session
        live = {number: chunk_keys(payloads) for number, payloads in session.payloads.items()}
        assert not tree.freed & set().union(*live.values()), "a chunk was freed that a payload has"
        for one in tree.flying:
            assert not tree.freed & {chunk.key for chunk in one.shared}, "a chunk was freed that an open turn continues"
        if tree.max_bytes is None:
            kept = kept_payloads(tree, self._window)
            assert kept - self.gone <= live.keys(), "the payload of a turn within the window of a leaf is gone"
            self.gone |= {number for number in tree.ended if tree.turns[number].ask.brings} - kept
        elif is_commit:
            pinned = {one.parent for one in session.open_turns.values()} | {max(live, default=0, key=tree.ended.index)}
            size = ROW_BYTES * len(set().union(*live.values()))
            assert size <= tree.max_bytes or live.keys() <= pinned


def kept_payloads(tree: Tree, window: int) -> set[int]:
    """The newest turns with a payload on the way to each leaf that is not superseded."""
    gone = superseded(tree.session)
    found: set[int] = set()
    for leaf in leaves([turn for turn in tree.session.turns if turn.number not in gone]):
        line = [one.number for one in tree.session.token_chain(leaf.number) if tree.turns[one.number].ask.brings]
        found.update(line[-window - 1 :])
    return found


def ancestors(tree: Tree, one: Grown) -> list[int]:
    """The turns whose messages it continues, the nearest first."""
    found: list[int] = []
    while one.plan is not None and one.plan.base_messages:
        found.append(one.plan.parent)
        one = tree.turns[one.plan.parent]
    return found


def branch_expected(
    tree: Tree, one: Grown, before: Sequence[tuple[int, str | None, int | None]]
) -> tuple[int, str | None, int | None]:
    """The branch, its cause and what it carries, from the requests alone."""
    earlier = [tree.turns[number] for number in tree.ended[: tree.ended.index(one.number)]]
    if not earlier:
        return 0, "start", None
    line = ancestors(tree, one)
    siblings = [other for other in earlier if ancestors(tree, other)[:1] == line[:1]]
    if line and not siblings and not one.ask.drifts and len(tree.turns[line[0]].tokens) > tree.trim:
        return tree.session.turns[line[0]].branch, None, None
    branch = 1 + max(number for number, _, _ in before)
    if any((plain(o.messages), o.agent) == (plain(one.messages), one.agent) for o in siblings):
        return branch, "retry", None
    new = plain(one.messages)[len(tree.turns[line[0]].history) if line else 0 :]
    for message in new if siblings or not line else ():
        for other in reversed(earlier):
            if plain(other.history)[-1] == message and other.number not in line:
                return branch, "compaction", other.number
    if one.agent != (tree.turns[line[0]] if line else earlier[0]).agent:
        return branch, "agent", None
    return branch, "root" if not line else "fork" if siblings else "drift", None


def parent_expected(tree: Tree, one: Grown, ended: Sequence[int]) -> int:
    """The deepest turn whose whole history begins the request, by walking all of them."""
    asked = plain(one.messages)
    fits = [(len(h), number) for number in ended if asked[: len(h := plain(tree.turns[number].history))] == h]
    deepest = max((length for length, _ in fits), default=0)

    def rank(number: int) -> tuple[bool, bool, int]:
        other = tree.turns[number]
        is_spelled = one.messages[: len(other.messages)] == other.messages
        return other.agent == one.agent, is_spelled, ended.index(number)

    return max((number for length, number in fits if length == deepest), key=rank, default=0)


def rows(tree: Tree, branches: Branches = "all", loss: Loss = "once") -> list[Sample]:
    events = {number: tokens.event for number, tokens in tree.content.items()}
    chosen = branch_rows(tree.session, branches, loss)
    return [sample(one, tree.content) for one in segments(tree.session, chosen, events)]


def in_loss(samples: Sequence[Sample]) -> Counter[int]:
    return Counter(int(token) for row in samples for token in row.tokens[row.loss_mask == 1])


def trained(tree: Tree, numbers: set[int]) -> Counter[int]:
    """Each sampled token of these turns once, but those that every prompt leaves out."""
    continued = {turn.token_parent for turn in tree.session.turns if turn.number in numbers}
    ends = {number: -tree.trim if tree.trim and number in continued else None for number in numbers}
    return Counter(token for number, end in ends.items() for token in tree.turns[number].output[:end])


PAYLOADS = [[Ask(brings=True)], [Ask(after=1, texts=("b",))], [Ask(after=1, texts=("c",), brings=True)]]
"""A turn with a payload is left by one that brings none, which needs it, and then by one that brings its own."""


@example(rounds=PAYLOADS, window=0)
@given(rounds=ROUNDS, window=WINDOWS)
def test_each_request_joins_the_deepest_turn_that_begins_it(rounds: list[list[Ask]], window: int) -> None:
    tree = grown(rounds, window).tree
    for one in tree.turns.values():
        assert one.plan is not None
        ended = [number for number in tree.ended if tree.session.turns[number].seq < one.fence]
        parent = parent_expected(tree, one, ended)
        assert (one.plan.parent, one.plan.base_messages) == (parent, len(tree.turns[parent].history) if parent else 0)


@given(rounds=ROUNDS, window=WINDOWS, trim=TRIMS)
def test_every_turn_is_in_the_tree_once_and_its_tokens_in_one_loss(
    rounds: list[list[Ask]], window: int, trim: int
) -> None:
    tree = grown(rounds, window, trim).tree
    session = tree.session
    assert [turn.number for turn in session.turns] == tree.ended
    assert in_loss(rows(tree)) == trained(tree, set(tree.ended))
    assert in_loss(rows(tree, "kept")) == trained(tree, set(tree.ended) - superseded(session))
    for row in rows(tree, loss="every"):
        assert row.loss_mask.tolist() == row.sampled_mask.tolist()
    if session.turns:
        [main] = rows(tree, "main")
        assert main.turns[-1].turn == tree.ended[-1]


@given(rounds=ROUNDS, trim=TRIMS)
def test_the_tokens_in_the_loss_do_not_depend_on_the_order_of_commits(rounds: list[list[Ask]], trim: int) -> None:
    first, second = Watched(1, trim).tree, Watched(1, trim).tree
    first.grow(rounds)
    second.grow(rounds, lambda place: -place)
    assert set(first.ended) == set(second.ended)
    if not trim:
        assert in_loss(rows(first)) == in_loss(rows(second))


def found_by(index: TreeIndex) -> dict[str, Any]:
    """Everything that an index holds."""
    slots = ("_newest", "_older")
    return {
        name: [getattr(held, slot) for slot in slots] if hasattr(held, "_newest") else held
        for name, held in {**vars(index), "odd_calls": vars(index.odd_calls)}.items()
    }


@given(rounds=ROUNDS, window=WINDOWS)
def test_the_log_gives_the_same_state_in_one_go_and_from_a_snapshot(rounds: list[list[Ask]], window: int) -> None:
    tree = grown(rounds, window).tree
    whole = fold(SESSION, tree.events)
    assert whole == tree.session == decode_session(encode_session(tree.session))
    assert found_by(TreeIndex(tree.session.turns)) == found_by(tree.index)
    half = fold(SESSION, tree.events[: len(tree.events) // 2])
    if half is not None:
        rest = tree.events[len(tree.events) // 2 :]
        assert fold(SESSION, rest, decode_session(encode_session(half))) == whole


@given(rounds=ROUNDS, window=WINDOWS, max_bytes=st.integers(0, 12))
def test_payloads_stay_within_a_budget_and_are_there_for_whoever_continues_them(
    rounds: list[list[Ask]], window: int, max_bytes: int
) -> None:
    grown(rounds, window, max_bytes=max_bytes)
