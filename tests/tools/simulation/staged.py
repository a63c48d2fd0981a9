"""Schedules whose engines stream as vLLM does, most of them with staged tokens, and what must hold of their turns."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from sqlalchemy import Connection, select

from app.domain.events import Recorded, SessionErased, SessionRestored, TurnCommitted, TurnRejected
from app.features.resume.schema import staged_tokens
from app.settings import Settings
from app.store.content import load_messages, load_tokens
from app.store.schema import sessions
from app.store.sessions import load_events
from tests.tools.simulation.engine import Engines, Sample, SimulatedEngine
from tests.tools.simulation.vllm import OF_DIGEST, VllmEngine, logprob, sampled, text_of
from tests.tools.simulation.world import World
from workers.reply import UNKNOWN_VERSION


def with_streams(settings: Settings, seed: int) -> Settings:
    """Drawn apart from all else in a schedule. A stream has no payloads, and vLLM no sessions."""
    rng = random.Random(f"streams {seed}")
    changed = {"upstream_dialect": "vllm", "stage_tokens_s": rng.choice((0.0, 0.02, 0.1, 0.5))}
    return settings.model_copy(update={**changed, "replay": (), "engine_sessions": ()})


def engine_of(world: World, is_shut: Callable[[str | None], bool]) -> SimulatedEngine:
    kind = VllmEngine if world.settings.upstream_dialect == "vllm" else SimulatedEngine
    return kind(world, is_shut)


KEPT = ("upstream_unreachable", "upstream_timeout", "store_unavailable")
"""Why a turn may be refused and its staged tokens be kept for a retry."""


def judge(world: World) -> None:
    """What is wrong with generations that were streamed, joined or left becomes a problem of the schedule."""
    if world.settings.upstream_dialect != "vllm":
        return
    for session_id in world.store.read(lambda c: [row[0] for row in c.execute(select(sessions.c.session_id))]):
        for problem in world.store.read(lambda c: list(_problems(c, session_id, world.engines))):  # noqa: B023
            world.history.problem(f"{session_id}: {problem}")


def _problems(connection: Connection, session_id: str, engines: Engines) -> Iterator[str]:
    log = load_events(connection, session_id)
    yield from _left(connection, session_id, log)
    if any(isinstance(recorded.event, SessionErased) for recorded in log):
        return
    turns = {recorded.event.turn: recorded.event for recorded in log if isinstance(recorded.event, TurnCommitted)}
    messages = load_messages(connection, session_id, list(turns))
    for number, tokens in load_tokens(connection, session_id, list(turns)).items():
        ids, logprobs = list(memoryview(tokens.output_ids).cast("i")), list(memoryview(tokens.logprobs).cast("d"))
        for problem in _of_turn(turns[number], ids, logprobs, engines):
            yield f"turn {number}, {problem}"
        if msgspec.json.decode(messages[number].message)["content"] != text_of(ids):
            yield f"turn {number} says something else than its tokens"


def _of_turn(turn: TurnCommitted, ids: list[int], logprobs: list[float], engines: Engines) -> Iterator[str]:
    """It is what an engine that nobody kills would have generated, and names who did."""
    if turn.finish_reason not in ("stop", "abort"):
        yield f"its finish reason is {turn.finish_reason}"
    if logprobs != [logprob(token, place) for place, token in enumerate(ids)]:
        yield "its logprobs are not those of its tokens at their places"
    if turn.finish_reason == "abort" and len(ids) < OF_DIGEST:
        return
    named = text_of(ids[:OF_DIGEST])
    whole = sampled(named)
    if ids != (whole if turn.finish_reason == "stop" else whole[: len(ids)]):
        yield f"its tokens are {ids} and should be {whole}"
    parts = [(part.engine, part.start, part.end) for part in turn.parts] or [(turn.engine, 0, len(ids))]
    for what, spans in (("parts", parts), ("versions", [(s.version, s.start, s.end) for s in turn.weight_versions])):
        ends = [0, *(end for _, _, end in spans)]
        if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != len(ids):
            yield f"its {what} are {spans} of {len(ids)} tokens"
    for by, start, end in parts:
        of = [
            {s.generation for s in engines.sampled[named, at] if f"http://{s.engine}" == by} for at in range(start, end)
        ]
        if not of or not set.intersection(*of):
            yield f"tokens {start} to {end} are said to be one generation of {by}"
    for span in turn.weight_versions:
        for place in range(span.start, span.end):
            versions = {version for sample in engines.sampled[named, place] for version in _told(sample, turn)}
            if span.version not in (UNKNOWN_VERSION, *versions):
                yield f"token {place} is said to be of weights {span.version}, and is of {sorted(versions)}"


def _told(sample: Sample, turn: TurnCommitted) -> Iterable[str]:
    """The weights that a token may be said to be of. An engine names them when a generation ends: one that was cut
    before, and of which a turn has a part, has those that it was sent to, though it ran on across an update."""
    return map(str, range(int(sample.sent), int(sample.version) + 1)) if turn.parts else (sample.version,)


def _left(connection: Connection, session_id: str, log: Sequence[Recorded]) -> Iterator[str]:
    """Staged tokens that no retry may go on from; the audit knows those of turns that are committed, or ended."""
    found = select(staged_tokens.c.fence).where(staged_tokens.c.session_id == session_id)
    left = set(connection.execute(found).scalars())
    for recorded in log:
        match recorded.event:
            case SessionRestored() if left and min(left) < recorded.seq:
                yield f"event {recorded.seq} has undone turns, and their staged tokens are left"
            case TurnRejected(fence=fence, reason=reason) if fence in left and reason not in KEPT:
                yield f"turn {recorded.event.turn} was refused as {reason}, and its staged tokens are left"
