"""`PrefixBuffer` against a plain dictionary of histories."""

from __future__ import annotations

from helpers.amounts import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from app.sessions.cache import PrefixBuffer


@settings(max_examples=cases(300), deadline=None)
@given(st.lists(st.integers(0, 8), max_size=8))
def test_what_it_knows_is_right(parents: list[int]) -> None:
    transcript, histories = PrefixBuffer(), {0: [0]}
    for turn, drawn in enumerate(parents, 1):
        parent = drawn % turn
        histories[turn] = [*histories[parent], turn]
        transcript.extend(parent, turn, b"%d" % turn)
        for known in range(1, turn + 1):
            found = transcript.upto(known)
            expected = b",".join(b"%d" % number for number in histories[known][1:])
            assert found in (None, expected)
        if parent == 0:
            assert transcript.upto(turn) == b"%d" % turn


@settings(max_examples=cases(300), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 3), st.integers(0, 1)), max_size=8))
def test_what_it_knows_of_trimmed_items_is_right(steps: list[tuple[int, int, int]]) -> None:
    chain, whole = PrefixBuffer(), {0: [""][:0]}
    for turn, (drawn, count, wish) in enumerate(steps, 1):
        parent = drawn % turn
        trimmed = min(wish, len(whole[parent])) if parent else 0
        new = [f"{turn}{number}" for number in range(count)]
        whole[turn] = [*whole[parent][: len(whole[parent]) - trimmed], *new]
        chain.extend(parent, turn, ",".join(new).encode(), trimmed)
        for known in range(1, turn + 1):
            assert chain.upto(known) in (None, ",".join(whole[known]).encode())
        if parent == 0:
            assert chain.upto(turn) is not None


def test_what_was_given_out_stays_as_it_was() -> None:
    """A turn may still send its history while another one cuts or extends the chain."""
    chain = PrefixBuffer()
    chain.extend(0, 1, b"1,2")
    chain.extend(1, 2, b"3,4")
    given = [chain.upto(1), chain.upto(2)]
    chain.extend(2, 3, b"5")
    given.append(chain.upto(3))
    chain.extend(1, 4, b"6", trimmed=1)
    given.append(chain.upto(4))
    chain.extend(9, 5, b"7")
    assert given == [b"1,2", b"1,2,3,4", b"1,2,3,4,5", b"1,6"]
    assert (chain.upto(4), len(chain.text)) == (None, 0)
