"""The three curves of the proof, from the raw results: `python -m ops.train figure`.

Reward over generated tokens: five fault-free seeds as a band with their mean, Turnlog with faults,
and a session server in memory with the same faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ops.server import ROOT
from ops.train.results import FAULT_FREE, FAULTS, PEER, Result

PICTURE = ROOT / "docs" / "train.png"
WINDOW = 5
"""Steps that a point of a curve is the mean of."""

Array = NDArray[np.float64]


def curve(result: Result) -> tuple[Array, Array]:
    """Generated tokens and the running mean of the reward, an entry for each step."""
    tokens = np.array([tokens for tokens, _ in result.points], dtype=np.float64)
    rewards = np.array([reward for _, reward in result.points], dtype=np.float64)
    means = [rewards[max(0, end - WINDOW) : end].mean() for end in range(1, len(rewards) + 1)]
    return tokens, np.array(means)


def reward_at(result: Result, tokens: float) -> float:
    """The running mean of the reward when so many tokens had been generated."""
    return float(np.interp(tokens, *curve(result)))


def draw(results: Sequence[Result], path: Path = PICTURE) -> None:
    """Write the figure. Raises ImportError without matplotlib (the extra `train`)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.2), dpi=140)
    free = [curve(result) for result in results if result.kind == FAULT_FREE]
    if free:
        grid = np.linspace(max(tokens[0] for tokens, _ in free), min(tokens[-1] for tokens, _ in free), 100)
        rewards = np.stack([np.interp(grid, *points) for points in free])
        label = f"without faults, {len(free)} seeds"
        axes.plot(grid / 1000, rewards.mean(axis=0), color="#888888", label=label)
        band = (rewards.min(axis=0), rewards.max(axis=0))
        axes.fill_between(grid / 1000, *band, color="#888888", alpha=0.25, linewidth=0)
    for kind, color, label in (
        (FAULTS, "#0a66c2", "Turnlog, with kill -9"),
        (PEER, "#d1495b", "a session server in memory, with the same kill -9"),
    ):
        for tokens, rewards in (curve(result) for result in results if result.kind == kind):
            axes.plot(tokens / 1000, rewards, color=color, label=label)
    axes.set_xlabel("generated tokens, thousands")
    axes.set_ylabel(f"mean reward of {WINDOW} steps")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
