"""`Chain` against a plain dictionary of histories."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from app.service.chain import Chain


def test_a_rollback_cuts_and_a_foreign_parent_empties() -> None:
    transcript = Chain()
    transcript.extend(0, 1, b"a")
    transcript.extend(1, 2, b"b")
    assert (transcript.upto(1), transcript.upto(2), len(transcript)) == (b"a", b"a,b", 3)
    transcript.extend(1, 3, b"c")
    assert (transcript.upto(2), transcript.upto(3)) == (None, b"a,c")
    transcript.extend(2, 4, b"d")
    assert ([transcript.upto(n) for n in (1, 2, 3, 4)], len(transcript)) == ([None] * 4, 0)
    transcript.extend(0, 5, b"e")
    assert transcript.upto(5) == b"e"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=8))
def test_what_it_knows_is_right(parents: list[int]) -> None:
    transcript, histories = Chain(), {0: [0]}
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
