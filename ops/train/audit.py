"""Counts a finished run: what the log has against what the trainer consumed.

`python -m ops.train audit FOLDER` opens the folder's store with a Turnlog of its own and reads

- the log (`TurnCommitted` of all sessions, undone ones too) and the export with its exclusions;
- `steps.jsonl`, the steps of the history that survives;
- `agent-*.jsonl`, where agents noted each reply before they went on;
- `kills.jsonl` and `engine.jsonl` of `faults.py`.

Each turn of the log gets exactly one fate: `trained`, or a reason for which it is in no step. What
has none, or two, is a violation.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from app.store import repair
from app.store.database import Database
from app.store.dialect import StorePoints
from ops.engine.process import is_installed, run_module
from ops.server import ServerProcess
from ops.train.rollouts import lines
from ops.train.task import ATTEMPTS, digest
from ops.verify import Acknowledged, Report, verify
from turnlog import Turnlog

TRAINED, UNDONE = "trained", "undone"
LARGEST_DIFFERENCE = 1e-3
"""Nats, between an exported logprob and that of the weights that the row names."""

JsonObject = dict[str, Any]


class TurnKey(NamedTuple):
    session_id: str
    turn: int


class Evidence(msgspec.Struct):
    """What a run left, as read from its folder and its store.

    `turns` are the `TurnCommitted` events, each with its `session_id`; `restored` the sessions that
    a restore took back; `groups` the states of the training feed by group id; `given_up` the sessions that
    agents erased, because a call had failed for good. `generated` is the
    engines' own count of tokens over all their lives.
    """

    turns: list[JsonObject] = []
    restored: set[str] = set()
    rows: list[JsonObject] = []
    excluded: list[JsonObject] = []
    groups: dict[str, str] = {}
    steps: list[JsonObject] = []
    replies: list[JsonObject] = []
    given_up: set[str] = set()
    starts: list[JsonObject] = []
    generated: int = 0
    max_staleness: int | None = None


class Audit(msgspec.Struct):
    """The result. Counts are of tokens, but for `turns`, `acknowledged`, `lost` and `doubled`.

    `fates` add up to `in_log`. `twice` is the share of generated tokens that no turn of the log has:
    what a kill cut off, and what was generated again for it. `doubled` are turns committed a second
    time for one request. `largest_difference` is in nats, None if the rows were not scored again.
    """

    turns: int = 0
    in_log: int = 0
    fates: dict[str, int] = {}
    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    generated: int = 0
    twice: float = 0.0
    first_turns: int = 0
    largest_difference: float | None = None
    violations: list[str] = []


def account(evidence: Evidence) -> Audit:
    """Give each turn of the log its fate. Pure."""
    audit = Audit(generated=evidence.generated, acknowledged=len(evidence.replies))
    sampled = {key_of(turn): int(turn["output_tokens"]) for turn in evidence.turns}
    audit.turns, audit.in_log = len(sampled), sum(sampled.values())
    fates: dict[TurnKey, list[str]] = defaultdict(list)
    for key, fate in _fates(evidence, audit.violations):
        if key not in sampled:
            audit.violations.append(f"{_named(key)} is {fate}, and not in the log")
        fates[key].append(fate)
    for key, tokens in sampled.items():
        of_turn = fates[key]
        if len(of_turn) != 1:
            told = f"{len(of_turn)} times: {', '.join(of_turn)}" if of_turn else "nowhere"
            audit.violations.append(f"{_named(key)} of the log is accounted for {told}")
        for fate in of_turn[:1]:
            audit.fates[fate] = audit.fates.get(fate, 0) + tokens
    known = sampled.keys()
    for reply in evidence.replies:
        key = TurnKey(reply["reply"], reply["turn"])
        if key not in known and key.session_id not in evidence.given_up:
            audit.lost += 1
            audit.violations.append(f"{_named(key)} was acknowledged, and is not in the log")
    audit.doubled = _doubled(evidence)
    if audit.doubled:
        audit.violations.append(f"{audit.doubled} requests were committed twice")
    audit.twice = max(0.0, 1 - audit.in_log / audit.generated) if audit.generated else 0.0
    audit.first_turns = _check_versions(evidence, audit.violations)
    return audit


def _fates(evidence: Evidence, violations: list[str]) -> Iterator[tuple[TurnKey, str]]:
    """The fate of each turn that is in the export or excluded from it."""
    steps: dict[tuple[str, int], list[JsonObject]] = defaultdict(list)
    left: dict[str, str] = {}
    for step in evidence.steps:
        left.update({group["group_id"]: group["reason"] for group in step.get("left", ())})
        for trained in step["rows"]:
            steps[trained["session_id"], trained["branch"]].append(trained)
    newest = max((int(step["version"]) for step in evidence.steps), default=0)
    for row in evidence.rows:
        trained_as = steps.pop((row["session_id"], row["branch"]), [])
        named = f"session {row['session_id']}, branch {row['branch']}"
        if len(trained_as) > 1:
            violations.append(f"{named} is in {len(trained_as)} steps")
        if trained_as and trained_as[0]["sha256"] != digest(row):
            violations.append(f"{named}: the step's tokens are not the export's")
        fate = TRAINED if trained_as else _reason(row, evidence, left, newest)
        if fate is None:
            violations.append(f"{named}: its group is acknowledged, and it is in no step")
            fate = "acknowledged, in no step"
        for span in row["turns"]:
            if any(row["loss_mask"][span["output_start"] : span["end"]]):
                yield TurnKey(row["session_id"], span["turn"]), fate
    for session_id, branch in steps:
        violations.append(f"session {session_id}, branch {branch} is in a step, not in the export")
    for line in evidence.excluded:
        yield from _excluded(line, evidence)


def _reason(row: JsonObject, evidence: Evidence, left: Mapping[str, str], newest: int) -> str | None:
    """Why an exported row is in no step; None: there is no reason."""
    group_id = row["group_id"]
    state = evidence.groups.get(group_id, "open")
    if state == "open":
        return "incomplete group"
    if state == "acknowledged":
        return left.get(group_id)
    sampled = [version for version in row["weight_versions"] if version >= 0]
    limit = evidence.max_staleness
    is_stale = limit is not None and newest - min(sampled, default=newest) > limit
    return "stale" if is_stale else "not yet trained"


def _excluded(line: JsonObject, evidence: Evidence) -> Iterator[tuple[TurnKey, str]]:
    """The turns that a line of the export excludes: the one that it names, or its session's."""
    reason = line["excluded"].partition(":")[0]
    if line["turn"] is not None:
        yield TurnKey(line["session_id"], line["turn"]), reason
        return
    # Of a session whose turns were all undone, the export says that it has none.
    reason = UNDONE if line["session_id"] in evidence.restored else reason
    for turn in evidence.turns:
        if turn["session_id"] == line["session_id"]:
            yield key_of(turn), reason


def _doubled(evidence: Evidence) -> int:
    """Turns beyond the first of one request: equal session, parent and body.

    A restore lets a request be sent once more, so undone turns do not count.
    """
    undone = {key for line in evidence.excluded for key, reason in _excluded(line, evidence) if reason == UNDONE}
    requests = Counter(
        (turn["session_id"], turn["parent"], turn["body_hash"]) for turn in evidence.turns if key_of(turn) not in undone
    )
    return sum(count - 1 for count in requests.values())


def _check_versions(evidence: Evidence, violations: list[str]) -> int:
    """Check that no turn was sent to an engine with older weights than the newest that had been trained.

    A step's line is written after its weights have been loaded. Returns how many turns were the
    first at an engine that was started again.
    """
    turns = sorted(evidence.turns, key=lambda turn: float(turn["requested_at"]))
    published = sorted((float(step["at"]), int(step["version"])) for step in evidence.steps)
    newest, at = 0, 0
    for turn in turns:
        while at < len(published) and published[at][0] < turn["requested_at"]:
            newest, at = published[at][1], at + 1
        dispatched = turn.get("dispatched")
        if dispatched is None or int(dispatched) < newest:
            said = f"was sent to weights {dispatched}, {newest} were loaded before"
            violations.append(f"{_named(key_of(turn))} {said}")
    began = [float(start["at"]) for start in evidence.starts]
    return sum(
        any(at < turn["requested_at"] < until for turn in turns) for at, until in pairwise([*began, float("inf")])
    )


def key_of(turn: JsonObject) -> TurnKey:
    return TurnKey(turn["session_id"], turn["turn"])


def _named(key: TurnKey) -> str:
    return f"turn {key.turn} of session {key.session_id}"


def notes(folder: Path, kind: str) -> list[JsonObject]:
    """The lines of all agents that begin with this fact: began, reply, ended, gave_up."""
    files = sorted(folder.glob("agent-*.jsonl"))
    return [line for file in files for line in lines(file) if kind in line]


def generated_in(folder: Path) -> int:
    """The engines' own count of the tokens of a run."""
    return max((int(line["tokens"]) for line in lines(folder / "engine.jsonl")), default=0)


def read(folder: Path) -> tuple[Evidence, Report]:
    """A run's evidence, and `turnlog verify` of its store with the replies that agents noted."""
    replies = notes(folder, "reply")
    evidence = Evidence(
        steps=lines(folder / "steps.jsonl"),
        replies=replies,
        given_up={line["gave_up"] for line in notes(folder, "gave_up")},
        starts=[
            line for line in lines(folder / "kills.jsonl") if (line["what"], line["name"]) == ("started", "engine")
        ],
        generated=generated_in(folder),
        max_staleness=json.loads((folder / "run.json").read_text()).get("max_staleness"),
    )
    with ServerProcess(folder) as server:
        with Turnlog(server.base_url) as turnlog:
            for event in turnlog.events(type=["TurnCommitted", "SessionRestored"]):
                if event["type"] == "TurnCommitted":
                    evidence.turns.append(dict(event))
                else:
                    evidence.restored.add(str(event["session_id"]))
            for row in turnlog.export(explain=True):
                (evidence.excluded if "excluded" in row else evidence.rows).append(dict(row))
            evidence.groups = {group["group_id"]: group["state"] for group in turnlog.groups()}
        url = server.environment["TURNLOG_DATABASE_URL"]
    acknowledged = [Acknowledged(reply["reply"], reply["turn"], reply["sha256"]) for reply in replies]
    return evidence, asyncio.run(_verified(url, acknowledged))


async def _verified(url: str, acknowledged: Sequence[Acknowledged]) -> Report:
    database = Database(url, points=StorePoints())
    try:
        await repair.require_revision(database)
        return await verify(database, acknowledged)
    finally:
        await database.close()


def audit(folder: Path) -> Audit:
    """Audit a finished run. Its Turnlog must have ended."""
    evidence, report = read(folder)
    result = account(evidence)
    result.lost = max(result.lost, len(report.missing))
    result.violations += [f"{problem.session_id}: {problem.what}" for problem in report.problems]
    if is_installed() and (folder / "weights").exists():
        rows = "".join(json.dumps(row) + "\n" for row in evidence.rows)
        result.largest_difference = json.loads(run_module("ops.train.rescore", str(folder / "weights"), given=rows))
        if result.largest_difference > LARGEST_DIFFERENCE:
            told = f"a logprob is {result.largest_difference:.3g} off that of the weights it names"
            result.violations.append(told)
    return result


def tally(folder: Path) -> Audit:
    """What can be counted of a run whose server keeps its sessions in memory: it has no log.

    `in_log` and `fates` are of the replies that agents noted. `lost` are turns that an agent had the
    reply of, and that the server no longer had when the rollout ended.
    """
    replies, given_up = notes(folder, "reply"), notes(folder, "gave_up")
    why = {note["gave_up"]: f"rollout lost: {note['why']}" for note in given_up}
    steps = lines(folder / "steps.jsonl")
    trained = {row["session_id"] for step in steps for row in step["rows"]}
    left = {group["group_id"]: group["reason"] for step in steps for group in step["left"]}
    group_of = {note["ended"]: note["group_id"] for note in notes(folder, "ended")}
    sizes = Counter(group_of.values())
    result = Audit(acknowledged=len(replies), turns=len(replies))
    result.lost = sum(note.get("lost", 0) for note in given_up)
    for reply in replies:
        session_id, tokens = reply["reply"], int(reply["tokens"])
        if session_id in trained:
            fate = TRAINED
        elif session_id in why:
            fate = why[session_id]
        else:
            group = group_of.get(session_id, "")
            waits = "not yet trained" if sizes[group] >= ATTEMPTS else "incomplete group"
            fate = left.get(group, waits)
        result.fates[fate] = result.fates.get(fate, 0) + tokens
        result.in_log += tokens
    result.generated = generated_in(folder)
    result.twice = max(0.0, 1 - result.in_log / result.generated) if result.generated else 0.0
    return result


def show(audit: Audit) -> None:
    """Print the result."""
    print(f"{audit.turns} turns with {audit.in_log} sampled tokens in the log:")
    for fate, tokens in sorted(audit.fates.items(), key=lambda fate: -fate[1]):
        print(f"  {tokens:>9} {fate}")
    print(f"{audit.generated} tokens generated, {audit.twice:.1%} of them in no turn")
    if audit.largest_difference is not None:
        print(f"logprobs are at most {audit.largest_difference:.1e} off those of the weights they name")
    print(f"{audit.first_turns} engines that were started again took turns")
    print(f"{audit.acknowledged} replies noted, {audit.lost} lost, {audit.doubled} doubled")
    for violation in audit.violations[:20]:
        print(f"VIOLATED: {violation}")
