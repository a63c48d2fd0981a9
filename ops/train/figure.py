"""The figure of the proof, from the kept results: `python -m ops.train figure`.

On the left reward over generated tokens, of each kind of run the mean of its seeds and the band between the least and
the most; on the right what each kind cost, the mean of its seeds and each seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ops.server import ROOT
from ops.train.results import COLUMNS, FAULT_FREE, FAULTS, PEER, Result

PICTURE = ROOT / "docs" / "train.png"
WINDOW = 8
"""Steps that a point of a curve is the mean of."""

COLORS = {FAULT_FREE: "#888888", FAULTS: "#0a66c2", PEER: "#d1495b"}
COSTS: Mapping[str, Callable[[Result], float]] = {
    "minutes": lambda result: result.seconds / 60,
    "tokens thrown away, thousands": lambda result: result.thrown_away / 1000,
    "rollouts lost": lambda result: sum(result.given_up.values()),
}

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

    kinds = {kind: own for kind in COLUMNS if (own := [result for result in results if result.kind == kind])}
    figure = pyplot.figure(figsize=(9.5, 4.2), dpi=140)
    grid = figure.add_gridspec(len(COSTS), 2, width_ratios=(3, 1.3))
    _draw_curves(figure.add_subplot(grid[:, 0]), kinds)
    for place, (name, cost) in enumerate(COSTS.items()):
        _draw_costs(
            figure.add_subplot(grid[place, 1]), name, {kind: list(map(cost, own)) for kind, own in kinds.items()}
        )
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _draw_curves(axes: Any, kinds: Mapping[str, Sequence[Result]]) -> None:
    for kind, own in kinds.items():
        curves = [curve(result) for result in own]
        grid = np.linspace(max(tokens[0] for tokens, _ in curves), min(tokens[-1] for tokens, _ in curves), 200)
        rewards = np.stack([np.interp(grid, *points) for points in curves])
        seeds = f"{len(own)} seed{'s' if len(own) > 1 else ''}"
        axes.plot(grid / 1000, rewards.mean(axis=0), color=COLORS[kind], label=f"{COLUMNS[kind]}, {seeds}")
        band = (rewards.min(axis=0), rewards.max(axis=0))
        axes.fill_between(grid / 1000, *band, color=COLORS[kind], alpha=0.18, linewidth=0)
    axes.set_xlabel("generated tokens, thousands")
    axes.set_ylabel(f"mean reward of {WINDOW} steps")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)


def _draw_costs(axes: Any, name: str, costs: Mapping[str, Sequence[float]]) -> None:
    """A bar for each kind, and a point for each seed."""
    for place, (kind, values) in enumerate(costs.items()):
        axes.barh(-place, statistics.mean(values), color=COLORS[kind], height=0.7, alpha=0.8)
        axes.plot(values, [-place] * len(values), "|", color="black", markersize=8)
    axes.set_yticks([])
    axes.set_title(name, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
