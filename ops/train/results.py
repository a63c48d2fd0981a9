"""The results of runs: what is kept of each, the table of all, and `python -m ops.train --all`."""

from __future__ import annotations

import json
import shutil
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ops.server import ROOT
from ops.train.audit import Audit, notes
from ops.train.rollouts import lines

RESULTS = Path(__file__).parent / "results"
FOLDERS = ROOT / "var" / "train"
FAULT_FREE, FAULTS, PEER = "fault-free", "faults", "memory"
SEEDS = (1, 2, 3)
LAST = 8
"""Steps whose mean reward is a run's final one."""

COLUMNS = {FAULT_FREE: "Turnlog, no faults, five seeds", FAULTS: "Turnlog, faults", PEER: "in memory, the same faults"}
KILLED_AGENT, LOST_TURN = "killed", "RolloutLost"
"""Why agents gave rollouts up, beside the names of the SDK's errors."""

KILLED = ("server", "engine", "agent", "trainer")

WAITING = ("not yet trained", "incomplete group")
"""Fates of tokens that later steps would have trained."""


class Planned(NamedTuple):
    """A run of `--all`."""

    kind: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.seed}"


ALL = tuple(Planned(kind, seed) for seed in SEEDS for kind in (FAULT_FREE, FAULTS, PEER))
"""A seed after the other, so that what is complete at any time is a fair table."""


class Result(msgspec.Struct):
    """What is kept of a run. `points` has for each step the tokens generated before its end, and its mean reward.
    `ratio_before` is the largest distance from 1 of a token's ratio in the first step. `staleness` is in weight
    versions, the mean over steps and the most. `given_up` counts rollouts that an agent could not end, by what ended
    them.
    """

    kind: str
    seed: int
    steps: int
    seconds: float
    points: list[tuple[int, float]]
    ratio_before: float
    staleness: tuple[float, float]
    trained: int
    waiting: int
    kills: dict[str, int]
    ended: int
    given_up: dict[str, int]
    audit: Audit

    @property
    def final_reward(self) -> float:
        return statistics.mean(reward for _, reward in self.points[-LAST:])

    @property
    def thrown_away(self) -> int:
        """Generated tokens that are in no step and will be in none."""
        # The counter was read for the last time just before the last turns.
        return max(0, self.audit.generated - self.trained - self.waiting)


def measure(folder: Path, kind: str, audit: Audit) -> Result:
    """A finished run's result, from its folder."""
    run: dict[str, Any] = json.loads((folder / "run.json").read_text())
    steps = lines(folder / "steps.jsonl")
    counted = [(line["at"], line["tokens"]) for line in lines(folder / "engine.jsonl")]
    kills = Counter(
        line["name"].partition("-")[0] for line in lines(folder / "kills.jsonl") if line["what"] == "killed"
    )
    staleness = [float(step["staleness"]) for step in steps]
    return Result(
        kind=kind,
        seed=run["seed"],
        steps=len(steps),
        seconds=run["seconds"],
        points=[(_at(counted, step["at"]), float(step["reward"])) for step in steps],
        ratio_before=float(steps[0]["ratio_error"]),
        staleness=(statistics.mean(staleness), max(staleness)),
        trained=sum(row["sampled"] for step in steps for row in step["rows"]),
        waiting=sum(audit.fates.get(fate, 0) for fate in WAITING),
        kills=dict(kills),
        ended=len({line["ended"] for line in notes(folder, "ended")}),
        given_up=dict(Counter(note["why"] for note in notes(folder, "gave_up"))),
        audit=audit,
    )


def _at(counted: Sequence[tuple[float, int]], at: float) -> int:
    """The tokens that had been generated at this time."""
    before = bisect_right(counted, at, key=lambda sample: sample[0])
    return counted[before - 1][1] if before else 0


def save(result: Result) -> None:
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{Planned(result.kind, result.seed).name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def load() -> list[Result]:
    """All kept results, in the order of `ALL`."""
    paths = [RESULTS / f"{planned.name}.json" for planned in ALL]
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in paths if path.exists()]


class Spread(NamedTuple):
    """The final rewards of the fault-free seeds; `inside` are those within two standard deviations."""

    mean: float
    deviation: float
    least: float
    most: float

    def holds(self, reward: float) -> bool:
        return abs(reward - self.mean) <= 2 * self.deviation


def spread_of(results: Sequence[Result]) -> Spread | None:
    """None with fewer than two fault-free runs."""
    rewards = [result.final_reward for result in results if result.kind == FAULT_FREE]
    if len(rewards) < 2:
        return None
    deviation = statistics.stdev(rewards)
    return Spread(statistics.mean(rewards), deviation, min(rewards), max(rewards))


def failures(results: Sequence[Result]) -> list[str]:
    """What a run promised and did not keep. The peer promises nothing."""
    spread = spread_of(results)
    told = []
    for result in results:
        if result.kind == PEER:
            continue
        name = Planned(result.kind, result.seed).name
        told += [f"{name}: {violation}" for violation in result.audit.violations]
        if result.ratio_before > 1e-3:
            told.append(f"{name}: the ratio before the first update is {result.ratio_before:.2e} off")
        if result.kind == FAULTS and spread is not None and not spread.holds(result.final_reward):
            told.append(f"{name}: its final reward {result.final_reward:.3f} is outside the spread")
    return told


Cell = Callable[[Result], float | str]


def show(results: Sequence[Result], reward_at: Callable[[Result, float], float]) -> None:
    """Print the table as Markdown, a column a kind of run; of several seeds the least and the most."""
    kinds = [kind for kind in COLUMNS if any(result.kind == kind for result in results)]
    if not kinds:
        print("no results yet")
        return
    tokens = min(result.points[-1][0] for result in results)
    figures: dict[str, Cell] = {
        "steps": lambda result: result.steps,
        f"final mean reward (last {LAST} steps)": lambda result: result.final_reward,
        f"mean reward after {tokens:,} generated tokens": lambda result: reward_at(result, tokens),
        "ratio before the first update, distance from 1": lambda result: f"{result.ratio_before:.0e}",
        "logprobs scored again with the weights that rows name, largest difference": lambda result: _off(result),
        "staleness, mean, in weight versions": lambda result: result.staleness[0],
        "staleness, most": lambda result: f"{result.staleness[1]:g}",
        "seconds": lambda result: round(result.seconds),
        "generated tokens": lambda result: result.audit.generated,
        "generated tokens a second": lambda result: round(result.audit.generated / result.seconds),
        "trained": lambda result: f"{result.trained / result.audit.generated:.1%}",
        "thrown away": lambda result: f"{result.thrown_away / result.audit.generated:.1%}",
        "generated and in no turn": lambda result: f"{result.audit.twice:.1%}",
        **{f"kills of {name}": _kills(name) for name in KILLED},
        "rollouts that ended": lambda result: result.ended,
        "rollouts lost": lambda result: sum(result.given_up.values()),
        "… to a call that failed": lambda result: _to_calls(result.given_up),
        "… to a killed agent": lambda result: result.given_up.get(KILLED_AGENT, 0),
        "… because the server had lost a turn": lambda result: result.given_up.get(LOST_TURN, 0),
        "replies to agents": lambda result: result.audit.acknowledged,
        "of them lost": lambda result: result.audit.lost,
        "doubled": lambda result: "–" if result.kind == PEER else result.audit.doubled,
    }
    print(f"| | {' | '.join(COLUMNS[kind] for kind in kinds)} |")
    print(f"|---|{'---|' * len(kinds)}")
    for name, cell in figures.items():
        cells = [_range([cell(result) for result in results if result.kind == kind]) for kind in kinds]
        print(f"| {name} | {' | '.join(cells)} |")
    spread = spread_of(results)
    if spread is not None:
        print(f"\nFinal reward without faults: {spread.mean:.3f} ± {spread.deviation:.3f}")
    for failure in failures(results):
        print(f"FAILED: {failure}")


def _off(result: Result) -> str:
    difference = result.audit.largest_difference
    return "–" if difference is None else f"{difference:.0e}"


def _to_calls(given_up: dict[str, int]) -> int:
    return sum(count for why, count in given_up.items() if why not in (KILLED_AGENT, LOST_TURN))


def _kills(name: str) -> Cell:
    return lambda result: result.kills.get(name, 0)


def _range(cells: Sequence[float | str]) -> str:
    """The least and the most; of texts the distinct ones."""
    numbers = [cell for cell in cells if not isinstance(cell, str)]
    values: list[float | str] = sorted(set(numbers)) if numbers else sorted(set(map(str, cells)))
    ends = values[:1] if len(values) == 1 else [values[0], values[-1]]
    return " – ".join(dict.fromkeys(map(_shown, ends)))


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.3f}".rstrip("0").rstrip(".")


def run_all(
    play: Callable[[Planned, Path], Audit], plan: Sequence[Planned] = ALL, folders: Path = FOLDERS
) -> list[Result]:
    """Play each run of the plan that is not complete, one after the other, and keep its result.

    `play` plays a run in a new folder, and audits it.
    """
    for planned in plan:
        folder = folders / planned.name
        if not _is_complete(folder) or not (RESULTS / f"{planned.name}.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            print(f"{planned.name} …", flush=True)
            save(measure(folder, planned.kind, play(planned, folder)))
    return load()


def _is_complete(folder: Path) -> bool:
    path = folder / "run.json"
    return path.exists() and bool(json.loads(path.read_text()).get("complete"))
