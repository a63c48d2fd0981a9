"""Harnesses before engines that give what no harness asked for: no branch of a session is a false one.

Each harness does its tasks in a linear session and in a tree, before an engine that renders messages and one that is
sent ids. The two SDKs get every reply, each framework those that it makes something of its own of, and a part of the
others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
from integration.stand import Stand, Talk, standing

from e2e.harnesses import HARNESSES, TASKS, Harness
from e2e.test_lost_turns import ANSWERED, outcomes
from ops.simulator import tokenizer_files

pytestmark = [pytest.mark.harness, pytest.mark.long, pytest.mark.filterwarnings("ignore")]

ENGINE = ("--seed", "5", "--reasoning", "0.3")


class Mode(NamedTuple):
    """The engine's reply to each task: calls of the harness's tool with these `arguments` (None: good ones) and ids,
    where `#` stands for the task's number; or a text."""

    arguments: Sequence[str | None] = ()
    call_ids: Sequence[str | int | None] = ()
    text: str | None = None

    @property
    def is_no_call(self) -> bool:
        """It says something, but calls no tool that can be called."""
        return any(text is not None for text in self.arguments) or (not self.arguments and self.text != "")

    def sim(self, harness: Harness, task: int) -> Mapping[str, Any]:
        calls = [
            {"name": harness.tool, "arguments": harness.arguments if text is None else text} for text in self.arguments
        ]
        ids = [given.replace("#", str(task)) if isinstance(given, str) else given for given in self.call_ids]
        return {"call_ids": ids, "text": self.text} | ({"calls": calls} if calls else {})


THOUGHT = "<think>\nIt may rain.\n</think>\n\n"
MODES: Mapping[str, Mode] = {
    "arguments: cut": Mode(['{"city": "Os']),
    "arguments: a list": Mode(["[1]"]),
    "arguments: null": Mode(["null"]),
    "arguments: empty": Mode([""]),
    "arguments: a raw tab": Mode(['{"city": "Os\tlo"}']),
    "arguments: two cut": Mode(['{"city": "Os', '{"city": "Ber']),
    "arguments: one of two cut": Mode([None, '{"city": "Ber'], text="I look."),
    "ids: empty": Mode([None], [""]),
    "ids: two empty": Mode([None, None], ["", ""]),
    "ids: a number": Mode([None], [7]),
    "ids: null": Mode([None], [None]),
    "ids: repeated in a reply": Mode([None, None], ["call_#", "call_#"]),
    "ids: repeated in each turn": Mode([None, None], ["functions.weather:0", "functions.weather:1"]),
    "ids: outside the alphabet": Mode([None], ["weather/é #"]),
    "reasoning: in content": Mode(text=f"{THOUGHT}Hi"),
    "reasoning: before a call": Mode([None], text=f"{THOUGHT}I look."),
    "reasoning: alone before a call": Mode([None], text=THOUGHT),
    "reasoning: a closing tag only": Mode(text="It may rain.\n</think>\n\nHi"),
    "an empty reply": Mode(text=""),
}


class Own(NamedTuple):
    """What a harness does of its own accord: it stops with an error of this name, or begins branches and segments with
    these causes; its linear sessions take what diverges as a segment."""

    why: str
    stops: str = ""
    causes: Sequence[str] = ()


DIVERGES = ("root", "fork", "compaction", "divergence")
PROSE = Own("tells its calls and their results as prose", causes=DIVERGES)
NO_CALL = Own("leaves out a reply without a valid call and tells an error instead", causes=DIVERGES)
NO_OBJECT = Own("its message cannot hold arguments that are no object", stops="ValidationError")
OWN: Mapping[tuple[str, str], Own] = {
    **{("smolagents", mode): PROSE for mode in MODES},
    **{("mini-swe-agent", mode): NO_CALL for mode, given in MODES.items() if given.is_no_call},
    ("langchain-openai", "arguments: a list"): NO_OBJECT,
    ("langchain-openai, Responses", "arguments: a list"): NO_OBJECT,
    ("langchain-openai, Responses", "arguments: null"): NO_OBJECT,
    ("langgraph", "arguments: a list"): NO_OBJECT,
    ("openai-agents", "ids: repeated in each turn"): Own(
        "sends the last of the calls and results that have one id, and leaves out the others", causes=DIVERGES
    ),
}
SETTINGS: Sequence[Mapping[str, str]] = ({"history": "linear"}, {"history": "tree"})
PLACES = {name: place for names in (HARNESSES, MODES) for place, name in enumerate(names)}
PAIRS = [
    (name, mode)
    for name in HARNESSES
    for mode in MODES
    if name in ("openai", "anthropic")
    or (PLACES[name] + PLACES[mode]) % 4 == 0
    or OWN.get((name, mode), PROSE) not in (PROSE, NO_CALL)
]


@pytest.fixture(scope="module")
def stands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sequence[Stand]]:
    """A server in capture mode and one with a tokenizer, each with its engine."""
    tokenizer = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files.write(tokenizer)
    environment = {"TURNLOG_TOKENIZER": str(tokenizer)}
    with (
        standing(tmp_path_factory.mktemp("capture"), *ENGINE) as capture,
        standing(tmp_path_factory.mktemp("tito"), *ENGINE, environment=environment) as tito,
    ):
        yield capture, tito


@pytest.mark.parametrize(("name", "mode"), PAIRS)
def test_no_branch_is_false(stands: Sequence[Stand], name: str, mode: str) -> None:
    harness, own = HARNESSES[name], OWN.get((name, mode), Own(""))
    stops, meant = set[str](), 0
    each = list(product(stands, SETTINGS))
    # Without ways of its own, two of the four: a line at one engine, a tree at the other; in the next mode the others.
    for stand, setting in each if own.why else (each[::3], each[1:3])[PLACES[mode] % 2]:
        segments = {"on_divergence": "segment"} if own.causes and setting["history"] == "linear" else {}
        talk = stand.talk(**setting, **segments)
        before = outcomes(stand)
        stops.add(played(stand, talk, harness, MODES[mode]))
        assert {ended for ended, count in outcomes(stand).items() if count > before[ended]} <= set(ANSWERED)
        meant += audited(stand, talk, own, may_drift=stand is stands[0])
    assert stops == {own.stops}
    assert (meant > 0) == bool(own.causes), "the reason still holds"


def played(stand: Stand, talk: Talk, harness: Harness, mode: Mode) -> str:
    """The name of the error with which the harness stopped, if any."""
    stand.sim.post("/sim/reset").raise_for_status()
    odd = [(task, mode.sim(harness, number), 1) for number, task in enumerate(TASKS)]
    for when, sim, count in (*odd, ("", harness.ends, 1000)):
        stand.sim.post("/sim/replies", json={"when": when, "sim": sim, "count": count}).raise_for_status()
    try:
        harness.run(f"{stand.base_url}{talk.path}/v1")
    except Exception as error:  # noqa: BLE001
        return type(error).__name__
    return ""


def audited(stand: Stand, talk: Talk, own: Own, *, may_drift: bool) -> int:
    """How many branches and segments the harness meant; there is no other, and each turn is in one row's loss."""
    rows = talk.rows()
    owners = Counter(
        span["turn"]
        for row in rows
        for span in row["turns"]
        if any(row["loss_mask"][span["output_start"] : span["end"]])
    )
    turns = [event["turn"] for event in talk.committed()]
    assert owners == dict.fromkeys(turns, 1)
    assert (talk.generations(), stand.stats()["refused"]) == (len(turns), 0)
    causes = Counter(cause_of(row) for row in rows)
    assert set(causes) <= {"start", *own.causes, *(("drift",) if may_drift else ())}
    assert "RolledBack" not in talk.types()
    return sum(causes[cause] for cause in own.causes)


def cause_of(row: Mapping[str, Any]) -> str:
    """Why a row's branch or segment began."""
    cause: str = row["branch_cause"] or row["segment_cause"] or "start"
    return cause
