"""The results of `ops.train`: what is measured of a folder, the table, what fails, and the figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.train import figure, results
from ops.train.audit import Audit
from ops.train.results import ALL, FAULT_FREE, FAULTS, PEER, Planned, Result, failures, measure


def result(kind: str, seed: int = 1, final: float = 0.9, **fields: object) -> Result:
    """A run of 40 steps, whose reward rises to `final`."""
    points = [(1000 * step, min(final, 0.3 + step / 50)) for step in range(1, 41)]
    given: dict[str, object] = {
        "kind": kind,
        "seed": seed,
        "steps": 40,
        "seconds": 100.0,
        "points": points,
        "ratio_before": 2e-5,
        "staleness": (1.0, 2.0),
        "trained": 36_000,
        "waiting": 2_000,
        "kills": {},
        "ended": 640,
        "given_up": {},
        "audit": Audit(generated=40_000),
    }
    return Result(**{**given, **fields})  # type: ignore[arg-type]


SEEDS = [result(FAULT_FREE, seed, 0.88 + seed / 100) for seed in range(1, 6)]


def test_a_folder_is_measured(tmp_path: Path) -> None:
    def write(name: str, *lines: object) -> None:
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    (tmp_path / "run.json").write_text(json.dumps({"seed": 3, "seconds": 50.0}))
    step = {"ratio_error": 2e-4, "staleness": 1, "rows": [{"sampled": 30}, {"sampled": 12}]}
    write("steps.jsonl", {**step, "at": 10.0, "reward": 0.25}, {**step, "at": 20.0, "reward": 0.75})
    write("engine.jsonl", *({"at": at, "tokens": tokens} for at, tokens in ((9, 50), (15, 80), (21, 99))))
    kill = {"what": "killed"}
    write("kills.jsonl", {**kill, "name": "agent-1"}, {"name": "engine", "what": "started"})
    write("agent-0.jsonl", {"ended": "a"}, {"gave_up": "b", "why": "killed"}, {"reply": "a"})
    (tmp_path / "agent-1.jsonl").write_text('{"ended": "c"}\n{"ended": "a line that a kill cut sho')
    audit = Audit(generated=99, fates={"trained": 84, "not yet trained": 5, "undone": 6})
    measured = measure(tmp_path, FAULTS, audit)
    assert measured.points == [(50, 0.25), (80, 0.75)]
    assert (measured.trained, measured.waiting, measured.thrown_away) == (84, 5, 10)
    assert (measured.kills, measured.ended, measured.given_up) == ({"agent": 1}, 2, {"killed": 1})
    assert measured.ratio_before == pytest.approx(2e-4)
    assert measured.final_reward == 0.5


TOLD = [
    *SEEDS,
    result(FAULTS, 1, 0.9),
    result(PEER, 1, 0.7, given_up={"killed": 7, "RolloutLost": 4, "APIConnectionError": 1}),
]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    results.show(TOLD, figure.reward_at)
    printed = capsys.readouterr().out.splitlines()
    cells = {line.split(" | ")[0]: line for line in printed}
    assert "| Turnlog, no faults, five seeds | Turnlog, faults | in memory, the same faults |" in printed[0]
    assert cells["| rollouts lost"] == "| rollouts lost | 0 | 0 | 12 |"
    assert cells["| … to a call that failed"].endswith("| 0 | 0 | 1 |")
    assert cells["| thrown away"] == "| thrown away | 5.0% | 5.0% | 5.0% |"
    assert cells["| final mean reward (last 8 steps)"].startswith(
        "| final mean reward (last 8 steps) | 0.89 – 0.93 | 0.9 | 0.7 |"
    )
    assert not any(line.startswith("FAILED") for line in printed)


def test_the_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure.draw(TOLD, tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_what_fails() -> None:
    assert failures([*SEEDS, result(FAULTS, 1, 0.9), result(PEER, 1, 0.1)]) == []
    lost = result(FAULTS, 1, 0.5, audit=Audit(violations=["turn 3 is lost"]), ratio_before=0.01)
    assert failures([*SEEDS, lost]) == [
        "faults-1: turn 3 is lost",
        "faults-1: the ratio before the first update is 1.00e-02 off",
        "faults-1: its final reward 0.500 is outside the spread",
    ]


def test_a_complete_run_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path / "results")
    played: list[Planned] = []

    def play(planned: Planned, folder: Path) -> Audit:
        played.append(planned)
        step = {"at": 1.0, "reward": 0.5, "ratio_error": 0.0, "staleness": 0, "rows": []}
        (folder / "steps.jsonl").write_text(json.dumps(step) + "\n")
        run = {"seed": planned.seed, "seconds": 1.0, "complete": len(played) > 1}
        (folder / "run.json").write_text(json.dumps(run))
        return Audit()

    for _ in range(2):
        kept = results.run_all(play, ALL[:2], tmp_path)
    assert played == [ALL[0], ALL[1], ALL[0]]
    assert [(one.kind, one.seed) for one in kept] == list(ALL[:2])
