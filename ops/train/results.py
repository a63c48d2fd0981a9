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

COLUMNS = {FAULT_FREE: "Turnlog, no faults", FAULTS: "Turnlog, kill -9", PEER: "in memory, kill -9"}
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


def plan_of(seeds: Sequence[int]) -> list[Planned]:
    """The runs of `--all`, a seed after the other, so that what is complete at any time is a fair table."""
    return [Planned(kind, seed) for seed in seeds for kind in COLUMNS]


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
    """All kept results."""
    return [msgspec.json.decode(path.read_bytes(), type=Result) for path in sorted(RESULTS.glob("*.json"))]


def failures(results: Sequence[Result]) -> list[str]:
    """What a run promised and did not keep. The peer promises nothing."""
    told = []
    for result in results:
        if result.kind == PEER:
            continue
        name = Planned(result.kind, result.seed).name
        told += [f"{name}: {violation}" for violation in result.audit.violations]
        if result.ratio_before > 1e-3:
            told.append(f"{name}: the ratio before the first update is {result.ratio_before:.2e} off")
    free, faults = ([one.final_reward for one in results if one.kind == kind] for kind in (FAULT_FREE, FAULTS))
    if len(free) > 1 and faults and abs(statistics.mean(faults) - statistics.mean(free)) > 2 * statistics.stdev(free):
        told.append("the mean reward with faults is not within two standard deviations of the seeds without")
    return told


Cell = Callable[[Sequence[Result]], str]
"""What the table says of the results of a kind."""


def show(results: Sequence[Result], reward_at: Callable[[Result, float], float]) -> None:
    """Print the table as Markdown, a column a kind of run; of several seeds the mean, the least and the most."""
    kinds = {kind: own for kind in COLUMNS if (own := [result for result in results if result.kind == kind])}
    if not kinds:
        print("no results yet")
        return
    tokens = min(result.points[-1][0] for result in results)
    rows: dict[str, Cell] = {
        "seeds": lambda own: str(len(own)),
        "steps": _of(lambda result: result.steps),
        f"mean reward of the last {LAST} steps": _of(lambda result: result.final_reward, "{:.2f}"),
        f"mean reward after {tokens:,} tokens": _of(lambda result: reward_at(result, tokens), "{:.2f}"),
        "minutes": _of(lambda result: result.seconds / 60, "{:.1f}"),
        "tokens generated": _of(lambda result: result.audit.generated),
        "… thrown away": _of(lambda result: result.thrown_away),
        "… of these in no turn": _of(lambda result: max(result.audit.generated - result.audit.in_log, 0)),
        f"kills: {', '.join(KILLED)}": _kills,
        "rollouts ended": _of(lambda result: result.ended),
        "rollouts lost": _of(lambda result: sum(result.given_up.values())),
        "… to a killed agent": _of(lambda result: result.given_up.get(KILLED_AGENT, 0)),
        "… to a lost turn": _of(lambda result: result.given_up.get(LOST_TURN, 0)),
        "replies": _of(lambda result: result.audit.acknowledged),
        "… lost": _of(lambda result: result.audit.lost),
        "… doubled": _of(lambda result: None if result.kind == PEER else result.audit.doubled),
        "staleness, versions": _of(lambda result: result.staleness[0], "{:.2f}"),
        "ratio before the first update, off 1": _of(lambda result: result.ratio_before, "{:.0e}"),
        "logprobs scored again, nats off": _of(lambda result: result.audit.largest_difference, "{:.0e}"),
    }
    print(f"| | {' | '.join(COLUMNS[kind] for kind in kinds)} |")
    print(f"|---|{'---|' * len(kinds)}")
    for name, cell in rows.items():
        print(f"| {name} | {' | '.join(map(cell, kinds.values()))} |")
    free = {result.seed: result.final_reward for result in kinds.get(FAULT_FREE, ())}
    for kind in (FAULTS, PEER):
        pairs = [(one.final_reward, free[one.seed]) for one in kinds.get(kind, ()) if one.seed in free]
        if pairs:
            told = ", ".join(f"{reward - alone:+.2f}" for reward, alone in pairs)
            print(f"\n{COLUMNS[kind]}: the last reward less that of the same seed without faults: {told}")
    for failure in failures(results):
        print(f"FAILED: {failure}")


def _kills(own: Sequence[Result]) -> str:
    """The means."""
    return ", ".join(f"{statistics.mean(result.kills.get(name, 0) for result in own):.0f}" for name in KILLED)


def _of(figure: Callable[[Result], float | None], form: str = "{:,.0f}") -> Cell:
    """Of a figure, None where a result has none, the mean, and in brackets the least and the most."""

    def cell(own: Sequence[Result]) -> str:
        known = [value for value in map(figure, own) if value is not None]
        if not known:
            return "–"
        mean, least, most = (form.format(value) for value in (statistics.mean(known), min(known), max(known)))
        return mean if least == most else f"{mean} ({least}–{most})"

    return cell


def run_all(
    play: Callable[[Planned, Path], Audit], plan: Sequence[Planned], steps: int, folders: Path = FOLDERS
) -> list[Result]:
    """Play each run of the plan that is not complete, one after the other, and keep its result.

    `play` plays a run of so many steps in a new folder, and audits it.
    """
    for planned in plan:
        folder = folders / planned.name
        if not _is_complete(folder, steps) or not (RESULTS / f"{planned.name}.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            print(f"{planned.name} …", flush=True)
            save(measure(folder, planned.kind, play(planned, folder)))
    return load()


def _is_complete(folder: Path, steps: int) -> bool:
    path = folder / "run.json"
    return path.exists() and bool(json.loads(path.read_text())["steps"] == steps)
