"""The benchmark of session servers: a short run of it, and that its comparison of records finds what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ops.bench.peers.protocol import Record
from ops.bench.peers.survival import ODD, Audit, Turn, audit, outcome
from ops.bench.peers.witness import Sampled
from ops.server import ROOT

SERVERS = ("engine", "turnlog-sqlite")


@pytest.mark.long
def test_a_quick_run(tmp_path: Path) -> None:
    out = tmp_path / "peers.json"
    command = [sys.executable, "-m", "ops.bench", "peers", "--quick", "--out", str(out), "--servers", *SERVERS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())
    turnlog, alone = results["turnlog-sqlite"], results["engine"]
    assert not turnlog.get("failed"), turnlog
    assert min(turnlog["turns/s, 16 clients"], alone["turns/s, 16 clients"]) > 0
    assert turnlog["errors"] == alone["errors"] == 0
    assert turnlog["exact turns"] == turnlog["of turns without a kill"] > 0
    assert (turnlog["lost"], turnlog["doubled"], turnlog["inexact after kills"]) == (0, 0, 0)
    assert turnlog["acknowledged before and after kills"] > 0
    # Without a tokenizer of its own nobody but the engine knows the ids of a first prompt.
    assert {fault for fault, became in turnlog["odd"].items() if became == "wrong"} == {"other_prompt"}
    assert set(turnlog["odd"]) == set(ODD)


SAMPLED = Sampled("a b", [4, 5, 1], [-0.5, -0.25, -0.125], [1, 2, 3])
AGAIN = Sampled("c", [6, 1], [-0.5, -0.0625], [1, 2, 3])
GOOD = Record(SAMPLED.ids, SAMPLED.logprobs, SAMPLED.prompt)
GENERATIONS = {"t": [SAMPLED, AGAIN]}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([GOOD], Audit(1)),
        ([], Audit(1, lost=1)),
        ([Record(AGAIN.ids, AGAIN.logprobs)], Audit(1, lost=1)),
        ([GOOD, GOOD], Audit(1, doubled=1)),
        ([Record(AGAIN.ids, AGAIN.logprobs), GOOD], Audit(1, doubled=1)),
        ([GOOD._replace(logprobs=[-0.5, -0.25, -0.126])], Audit(1, inexact=1)),
        ([GOOD._replace(logprobs=[-0.5, -0.25])], Audit(1, inexact=1)),
        ([GOOD._replace(logprobs=None)], Audit(1, inexact=1)),
        ([GOOD._replace(prompt=[1, 2])], Audit(1, inexact=1)),
        ([GOOD._replace(prompt=None)], Audit(1)),
    ],
)
def test_what_a_kill_did_is_found(records: list[Record], expected: Audit) -> None:
    assert audit([Turn("t", "a b")], records, GENERATIONS) == expected


@pytest.mark.parametrize(
    ("status", "record", "expected"),
    [
        (502, GOOD._replace(ids=[9, 9, 9]), "refused"),
        (200, Record([], [], []), "no row"),
        (200, GOOD, "as sampled"),
        (200, GOOD._replace(logprobs=None), "less than sampled"),
        (200, GOOD._replace(logprobs=[-0.5]), "less than sampled"),
        (200, GOOD._replace(logprobs=[None, -0.25, -0.125]), "less than sampled"),
        (200, GOOD._replace(logprobs=[-0.25, -0.125]), "wrong"),
        (200, GOOD._replace(logprobs=[float("nan"), -0.25, -0.125]), "wrong"),
        (200, GOOD._replace(logprobs=[*SAMPLED.logprobs, -1.0]), "wrong"),
        (200, GOOD._replace(ids=[4, 5, True]), "wrong"),
        (200, GOOD._replace(ids=[4, 5, 1.0]), "wrong"),
        (200, GOOD._replace(ids=[2**70, 5, 1]), "wrong"),
        (200, GOOD._replace(prompt=[1, 2, 4]), "wrong"),
    ],
)
def test_a_wrong_row_is_found(status: int, record: Record, expected: str) -> None:
    assert outcome(status, [record], [SAMPLED]) == expected
