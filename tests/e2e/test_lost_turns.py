"""Harnesses that send several conversations to one session: no sampled token is lost, whatever becomes of a request.

In a linear session what diverges is refused by default; with `on_divergence: "segment"` and in a tree all of it is
kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from integration.stand import Stand, standing
from prometheus_client.parser import text_string_to_metric_families

from e2e import conversations
from e2e.conversations import Where

pytestmark = [pytest.mark.harness, pytest.mark.filterwarnings("ignore")]

REFUSED = ("history_mismatch", "rollback_too_deep")
ANSWERED = ("committed", "replayed", "joined")
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "reject": {},
    "segment": {"on_divergence": "segment"},
    "tree": {"history": "tree"},
}
TREE = ("tree",)
"""The settings of a case that has several turns in flight, or that a linear session would take for a retry."""

CASES: Mapping[str, tuple[Callable[[Where], None], Collection[str]]] = {
    "five unrelated messages": (conversations.unrelated, SETTINGS),
    "a compaction": (conversations.compaction, TREE),
    "CrewAI, tasks at once": (conversations.crewai, TREE),
    "dspy, ReAct at once": (conversations.dspy, TREE),
    "openai-agents, as_tool": (conversations.as_tool, SETTINGS),
    "openai-agents, tools at once": (conversations.tools_at_once, TREE),
    "openai-agents, handoff": (conversations.handoff, SETTINGS),
    "LangGraph, summaries": (conversations.summarisation, SETTINGS),
    "OpenCode": (conversations.opencode, TREE),
    "OpenCode, by header": (conversations.opencode_by_header, TREE),
    "all at once": (conversations.all_at_once, TREE),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    """A server and an engine of the module's own, whose counts are those of one case at a time."""
    with standing(tmp_path_factory.mktemp("lost"), "--seed", "5", "--reasoning", "0") as made:
        yield made


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "setting"), [(case, setting) for case, (_, settings) in CASES.items() for setting in settings]
)
def test_nothing_that_was_sampled_is_lost(
    server: Stand,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    case: str,
    setting: str,
) -> None:
    for name in ("OTEL_SDK_DISABLED", "CREWAI_DISABLE_TELEMETRY", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "true")
    server.sim.post("/sim/reset")
    before, known = outcomes(server), sessions(server)
    talk = server.talk(**SETTINGS[setting])

    def plan(when: str, **sim: Any) -> None:
        server.sim.post("/sim/replies", json={"when": when, "sim": sim}).raise_for_status()

    failure: Exception | None = None
    try:
        run, _ = CASES[case]
        run(Where(f"{server.base_url}{talk.path}/v1", f"{server.base_url}/v1", plan, tmp_path))
    except Exception as error:  # noqa: BLE001
        failure = error  # a harness stops where it is refused, with an error of its own
    ended = {outcome: int(count - before[outcome]) for outcome, count in outcomes(server).items()}
    talks = [server.known(name) for name in sorted(sessions(server) - known)]
    rows = [row for one in talks for row in one.rows()]
    refused = sum(ended[outcome] for outcome in REFUSED)
    if failure is not None and not refused:
        raise failure
    owners = Counter(
        (row["session_id"], span["turn"])
        for row in rows
        for span in row["turns"]
        if any(row["loss_mask"][span["output_start"] : span["end"]])
    )
    stats = server.stats()
    assert (len(owners), set(owners.values())) == (stats["finished"], {1}), "each generation is in one row's loss"
    assert sum(sum(row["loss_mask"]) for row in rows) == stats["sampled_tokens"], "and so is each of its tokens"
    answered = sum(ended[outcome] for outcome in ANSWERED)
    turns = sum(len(one.committed()) for one in talks)
    assert turns == stats["finished"] == answered, "what was acknowledged is there"
    assert sum(ended.values()) == answered + refused, ended
    assert all("RolledBack" not in one.types() for one in talks)
    if setting != "tree":
        assert len(talk.state()["records"]) == turns
    if setting == "reject":
        assert (refused > 0, len(rows)) == (True, 1)
    else:
        assert (refused, len(rows) > 1) == (0, True)


def sessions(server: Stand) -> set[str]:
    """The newest of them."""
    response = server.http.get("/sessions", params={"limit": 100})
    assert response.status_code == 200, response.text
    return {one["session_id"] for one in response.json()["sessions"]}


def outcomes(server: Stand) -> dict[str, float]:
    """How the server's turns ended since it began."""
    families = text_string_to_metric_families(server.http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == "turnlog_turns_total"]
    return {sample.labels["outcome"]: sample.value for sample in samples}
