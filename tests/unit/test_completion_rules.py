"""Where a completion's prompt joins turns of both kinds, and turns whose engine counted other tokens than before."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import pytest
from helpers.log import committed, created, digest, opened

from app.domain.completion import IncomingPrompt
from app.domain.events import Recorded, TurnCommitted
from app.domain.fold import fold
from app.domain.history import Plan
from app.domain.session import Session
from app.domain.tree import TreeIndex
from app.errors import HistoryMismatch
from app.protocols.completions import parse_completion
from workers.parse import token_text


def incoming(prompt: str | list[int]) -> IncomingPrompt:
    return IncomingPrompt(parse_completion(json.dumps({"prompt": prompt}).encode()))


def done(
    number: int, before: int, tokens: Sequence[int], *, text: str | None = None, prompt: str | list[int] = ""
) -> TurnCommitted:
    """Turn `number` after `before` messages; `text` is all that was said by its end, None where it came as ids."""
    sequence = token_text(tokens)
    said = (digest("reply"),) if text is None else (digest("new"), f"{len(text)}:{digest(text)}")
    return committed(
        number,
        number - 1,
        2 * number,
        protocol="completions",
        base_messages=before,
        new_messages=len(said) - 1,
        message_hashes=said,
        client_hash=incoming(prompt).spelling(0),
        tokens_hash=hashlib.sha256(sequence).hexdigest(),
        tokens_text_bytes=len(sequence),
    )


def session_of(*turns: TurnCommitted) -> Session:
    events = [created(), *(event for turn in turns for event in (opened(turn.turn, turn.parent), turn))]
    found = fold("s", [Recorded(seq, 0.0, event) for seq, event in enumerate(events, 1)])
    assert found is not None
    return found


def test_text_behind_a_turn_that_came_as_ids_discards_nothing() -> None:
    """What the newest turn said is not known as text, so nobody can tell that this prompt leaves it out."""
    session = session_of(done(1, 0, [1, 2], text="abc"), done(2, 2, [1, 2, 3, 4]))
    for prompt in ("abcde and more", "abc", "ab"):
        with pytest.raises(HistoryMismatch):
            incoming(prompt).join(session, TreeIndex(), None)
    assert incoming([1, 2, 3, 4, 5]).join(session, TreeIndex(), None) == Plan(2, 3)
    assert incoming([1, 2, 5]).join(session, TreeIndex(), None) == Plan(1, 2, (2,))


@pytest.mark.parametrize("new", [0, 3, 90])
def test_ids_continue_the_leaf_though_an_earlier_turn_had_more_of_them(new: int) -> None:
    long, short = list(range(100, 140)), list(range(500, 510))
    session = session_of(done(1, 0, long, text="abc"), done(2, 2, short, text="abcdef"))
    assert incoming([*short, *[7] * new]).join(session, TreeIndex(), None) == Plan(2, 4)
    assert incoming([*long, *[7] * new]).join(session, TreeIndex(), None) == Plan(1, 2, (2,))


def test_text_that_spells_ids_is_not_those_ids() -> None:
    session = session_of(done(1, 0, [1, 2, 3, 8], prompt=[1, 2, 3]))
    for text in ("1,2,3,", "1,2,3", "ids:1,2,3"):
        assert incoming(text).spelling(0) != incoming([1, 2, 3]).spelling(0)
        with pytest.raises(HistoryMismatch):
            incoming(text).join(session, TreeIndex(), None)
    assert incoming([1, 2, 3]).join(session, TreeIndex(), None) == Plan(0, 0, (1,))
