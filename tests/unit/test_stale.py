"""Stale tokens and the rewards of turns in rows of random trees, against a reading token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from growing import Ask, Tree
from hypothesis import given
from hypothesis import strategies as st
from shape_rows import TWO_TURNS, rows
from test_tree_properties import ROUNDS, TRIMS, grown

from app.domain.branches import Branches, Loss, branch_rows
from app.domain.columns import AlignedColumn
from app.domain.samples import Sample, aged, sample, segments
from app.domain.session import AssignedReward
from app.errors import InvalidRequest
from app.export import formats
from app.export.query import ExportQuery
from app.export.row import Row, Unfit
from app.export.shapes.shared import token_rewards, turn_rewards
from workers.reply import VersionSpan

VERSIONS = st.lists(st.sampled_from(("3", "5", "6", "7", "9")), min_size=3, max_size=3)
"""Of the tokens of each turn, of which there are at most three: weights change while one is sampled."""


def read(tree: Tree, versions: Sequence[Sequence[str]], branches: Branches, loss: Loss) -> Iterator[Sample]:
    content, events = {}, {}
    for number, tokens in tree.content.items():
        named = versions[number % len(versions)]
        spans = tuple(VersionSpan(named[at], at, at + 1) for at in range(tokens.event.output_tokens))
        events[number] = msgspec.structs.replace(tokens.event, weight_versions=spans)
        content[number] = msgspec.structs.replace(tokens, event=events[number])
    chosen = branch_rows(tree.session, branches, loss)
    return (sample(one, content) for one in segments(tree.session, chosen, events))


@given(
    rounds=ROUNDS,
    trim=TRIMS,
    versions=st.lists(VERSIONS, min_size=1, max_size=5),
    branches=st.sampled_from(("kept", "all", "main")),
    loss=st.sampled_from(("once", "every")),
    current=st.integers(5, 9),
    most=st.integers(0, 5) | st.none(),
)
def test_a_token_is_masked_for_its_own_age_and_for_nothing_else(
    rounds: list[list[Ask]],
    trim: int,
    versions: list[list[str]],
    branches: Branches,
    loss: Loss,
    current: int,
    most: int | None,
) -> None:
    """Which row owns a token was decided before: what is masked in its row is in no other row's loss."""
    for whole in read(grown(rounds, trim=trim).tree, versions, branches, loss):
        own = [(at, int(whole.weight_versions[at])) for at in np.flatnonzero(whole.loss_mask)]
        old = [at for at, version in own if most is not None and current - version > most]
        kept, age = aged(whole, current, most, masks=False)
        assert kept is whole
        assert age.staleness == max((current - version for _, version in own), default=None)
        assert age.stale_tokens == (None if most is None else len(old))
        masked, same_age = aged(whole, current, most, masks=True)
        assert same_age == age
        expected = whole.loss_mask.copy()
        expected[old] = 0
        assert masked.loss_mask.tolist() == expected.tolist()
        assert msgspec.structs.replace(masked, loss_mask=whole.loss_mask) == whole


@pytest.mark.parametrize(("version", "current"), [("base", 5), ("5", None)])
def test_an_age_that_nobody_knows_is_none_and_its_tokens_are_stale(version: str, current: int | None) -> None:
    [row] = rows([msgspec.structs.replace(turn, version=version) for turn in TWO_TURNS])
    found, age = aged(row.sample, current, 0, masks=True)
    assert (age.staleness, age.stale_tokens) == (None, 2)
    assert not found.loss_mask.any(), "of unknown age is not of the wanted age"


REWARD = st.floats(-1e3, 1e3, width=32)


@given(
    rounds=ROUNDS,
    trim=TRIMS,
    versions=st.lists(VERSIONS, min_size=1, max_size=5),
    loss=st.sampled_from(("once", "every")),
    total=REWARD,
    given_rewards=st.dictionaries(st.integers(1, 8), REWARD, max_size=6),
    most=st.integers(0, 5),
)
def test_rewards_of_tokens_are_those_of_their_turns_and_add_up_to_the_rows(
    rounds: list[list[Ask]],
    trim: int,
    versions: list[list[str]],
    loss: Loss,
    total: float,
    given_rewards: dict[int, float],
    most: int,
) -> None:
    tree = grown(rounds, trim=trim).tree
    assigned = {number: AssignedReward(reward, {}) for number, reward in given_rewards.items()}
    session = msgspec.structs.replace(tree.session, reward=AssignedReward(total, {}), turn_rewards=assigned)
    for whole in read(tree, versions, "kept", loss):
        made, _ = aged(whole, 9, most, masks=True)
        row = shown(session, made)
        found = token_rewards(row)
        assert found is not None
        assert math.isclose(found.sum(), total, rel_tol=1e-9, abs_tol=1e-6)
        trained = np.flatnonzero(made.loss_mask).tolist()
        last = trained[-1] if trained else len(made.tokens) - 1
        expected = dict.fromkeys(range(len(made.tokens)), 0.0)
        for span, earned in zip(made.turns, turn_rewards(row), strict=True):
            own = [at for at in trained if span.output_start <= at < span.end]
            assert earned == (given_rewards.get(span.turn, 0.0) if own else 0.0)
            if own:
                expected[own[-1]] = earned
        assert [at for at, reward in enumerate(found) if at != last and reward != expected[at]] == []


def shown(session: Any, made: Sample) -> Row:
    [row] = rows(TWO_TURNS)
    return msgspec.structs.replace(row, session=session, sample=made, by_turn=True)


def with_turns(reward: float | None = 1.0, **turns: float) -> Row:
    [row] = rows(TWO_TURNS, reward=reward)
    given_rewards = {int(name[1:]): AssignedReward(value, {}) for name, value in turns.items()}
    session = msgspec.structs.replace(row.session, turn_rewards=given_rewards)
    return msgspec.structs.replace(row, session=session, by_turn=True)


def test_a_reward_of_a_token_that_no_float32_holds_is_left_out() -> None:
    with pytest.raises(Unfit, match="float32"):
        token_rewards(with_turns(3e38, t1=-3e38))


def test_the_column_advantages_fills_the_field() -> None:
    [row] = rows(TWO_TURNS, advantage=2.0)
    column = AlignedColumn(np.arange(5, dtype=np.float32), np.array([0, 0, 1, 0, 1], np.uint8))
    for shape, expected in (("prime-rl", [0.0, 0.0, 2.0, 0.0, 4.0]), ("tinker", [0.0, 2.0, 0.0, 4.0])):
        found: Any = formats.of_row("ndjson", shape, msgspec.structs.replace(row, columns={"advantages": column}))
        assert found["advantages"].tolist() == expected
        for lacking in (None, AlignedColumn(column.values, np.array([0, 0, 1, 0, 0], np.uint8))):
            with pytest.raises(Unfit, match="tokens in the loss"):
                formats.of_row("ndjson", shape, msgspec.structs.replace(row, columns={"advantages": lacking}))


@pytest.mark.parametrize(
    "query",
    [
        {"stale": "mask"},
        {"format": "atif", "stale": "keep"},
        {"shape": "trl", "rewards": "turn"},
        {"rewards": "turn"},
        {"format": "messages", "rewards": "turn"},
    ],
)
def test_what_rows_cannot_hold_is_refused(query: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"stale|rewards"):
        formats.require(ExportQuery(**query))
