"""Rewards of turns, for trainers that take a reward for each token.

A session's reward is the whole of what it earned; the rewards of its turns say which turn earned which part. So the
rewards of a row's tokens add up to the row's reward, and a trainer that sums them has the number that it has without.
"""

from __future__ import annotations

import math

import numpy as np

from app.domain.patterns import MAX_FLOAT32
from app.domain.samples import Array
from app.export.row import Row, Unfit


def by_turn(row: Row) -> list[float]:
    """What each turn of the row earned; 0.0 where nothing was assigned, or where the row does not train the turn."""
    mask, given = row.sample.loss_mask, row.session.turn_rewards
    return [
        given[span.turn].reward if span.turn in given and mask[span.output_start : span.end].any() else 0.0
        for span in row.sample.turns
    ]


def by_token(row: Row) -> Array | None:
    """float64 [T]: what a turn earned at its last token in the loss, the rest of the row's reward at the row's last.

    None without a reward. Raises Unfit where a float32 cannot hold a token's reward, as trainers keep it.
    """
    if row.reward is None:
        return None
    mask, earned = row.sample.loss_mask, by_turn(row)
    rewards = np.zeros(len(mask))
    for span, reward in zip(row.sample.turns, earned, strict=True):
        if reward:
            rewards[span.output_start + np.flatnonzero(mask[span.output_start : span.end])[-1]] = reward
    trained = np.flatnonzero(mask)
    rewards[trained[-1] if trained.size else -1] += row.reward - math.fsum(earned)
    if np.abs(rewards).max() > MAX_FLOAT32:
        raise Unfit("the reward of a token is beyond a float32")
    return rewards
