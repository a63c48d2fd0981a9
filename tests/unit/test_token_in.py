"""What a prompt of ids adds to the stored text of tokens."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from app.sessions.cache import PrefixBuffer
from app.turn.in_flight import PromptIds
from app.turn.token_in import added_text
from workers.parse import KnownTokens, token_text

IDS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


def text(ids: Sequence[int]) -> bytes:
    return ",".join(map(str, ids)).encode()


def known(ids: Sequence[int]) -> KnownTokens:
    whole = token_text(ids)
    return KnownTokens(len(ids), len(whole), hashlib.sha256(whole).hexdigest())


@given(IDS, IDS, IDS, st.integers(0, 1))
def test_the_chain_of_tokens_is_all_that_was_sent_and_sampled(
    stored: list[int], new: list[int], output: list[int], trimmed: int
) -> None:
    chain = PrefixBuffer()
    chain.extend(0, 1, text(stored))
    kept = stored[: len(stored) - trimmed]
    prompt = PromptIds(text([*kept, *new]), known(kept), trimmed)
    added = added_text(prompt, len(kept), array("i", output).tobytes())
    if not kept:
        return
    assert added == text([*new, *output])
    chain.extend(1, 2, added, trimmed)
    assert chain.upto(2) == text([*kept, *new, *output])


@given(IDS, IDS, IDS)
def test_a_prompt_that_continues_nothing_is_added_whole(
    stored: list[int], prompt: list[int], output: list[int]
) -> None:
    sampled = array("i", output).tobytes()
    for before in (None, known(stored)):
        assert added_text(PromptIds(text(prompt), before), 0, sampled) == text([*prompt, *output])


@given(IDS, IDS)
def test_nothing_new_or_nothing_sampled_leaves_no_comma(stored: list[int], output: list[int]) -> None:
    prompt = PromptIds(text(stored), known(stored))
    assert added_text(prompt, len(stored), array("i", output).tobytes()) == text(output)
    assert added_text(prompt, len(stored), b"") == b""
    assert added_text(PromptIds(text(stored), None), 0, b"") == text(stored)
