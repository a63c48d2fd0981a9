"""Logs for the tests of pure code: sessions made by the same decisions that the service makes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, cast

import msgspec
from helpers.log import float64, int32
from helpers.replies import known_as

from app.domain.branches import branch_rows
from app.domain.calls import sampled_calls
from app.domain.decide import TurnBlobs, commit_turn, open_turn, token_parent
from app.domain.events import (
    Event,
    History,
    Matcher,
    PayloadRef,
    Recorded,
    SessionConfig,
    SessionCreated,
    TurnCommitted,
    TurnOpened,
    TurnRejected,
)
from app.domain.history import RequestHistory
from app.domain.rules import Plan, TreeIndex
from app.domain.samples import Sample, Truncate, TurnTokens, sample, segments
from app.domain.session import Session, fold
from app.turn.in_flight import Claimed, InFlightTurn, Stages, Waiter
from workers.reply import ValidatedReply, VersionSpan

SESSION = "s"


def raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(value).encode())


def raws(messages: Sequence[Mapping[str, Any]]) -> list[msgspec.Raw]:
    return [raw(message) for message in messages]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def validated(
    tokens: Sequence[int], base: int, output: int, message_hash: str, finish_reason: str | None = "stop", **rest: Any
) -> ValidatedReply:
    """A reply whose prompt and output are `tokens`: `base` of them the parent's, the last `output` sampled."""
    counts = (base, len(tokens) - base - output, output)
    fields = {"engine": "http://engine", "message_hash": message_hash, "weight_versions": (), **rest}
    reply = ValidatedReply("sglang", b"", *counts, known_as(tokens), finish_reason, (), tokens=b"", exchange=b"")
    return msgspec.structs.replace(reply, **fields)


class Made(msgspec.Struct, frozen=True):
    """What went into one committed turn, in plain lists."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    spans: tuple[tuple[str, int, int], ...]
    history: list[dict[str, Any]]
    joined: bool
    finish_reason: str | None
    trimmed: int = 0


class Book:
    """A session's log and its fold, written turn by turn."""

    _session: Session

    def __init__(
        self,
        window: int = 1,
        on_divergence: Literal["reject", "segment"] = "reject",
        matcher: Matcher = "tolerant",
        retain: Literal["window", "all"] = "window",
        history: History = "linear",
    ) -> None:
        config = SessionConfig(
            rollback_window=window, on_divergence=on_divergence, matcher=matcher, retain=retain, history=history
        )
        self.index = TreeIndex()
        self.events: list[Recorded] = []
        self.made: dict[int, Made] = {}
        self.content: dict[int, TurnTokens] = {}
        self.add(SessionCreated(config, body_hash="00"))

    @property
    def session(self) -> Session:
        return self._session

    def add(self, *events: Event) -> None:
        for event in events:
            recorded = Recorded(len(self.events) + 1, float(len(self.events)), event)
            self.events.append(recorded)
            state = fold(SESSION, [recorded], self._session if recorded.seq > 1 else None)
            assert state is not None
            self._session = state
            if isinstance(event, TurnCommitted):
                self.index.add(state.turn(event.turn))

    def incoming(self, messages: Sequence[Mapping[str, Any]], agent_id: str | None = None) -> RequestHistory:
        incoming = RequestHistory(raws(messages), self.session.config.matcher)
        incoming.check(self.index, self.session, agent_id)
        return incoming

    def plan(self, messages: Sequence[Mapping[str, Any]], agent_id: str | None = None) -> Plan:
        return self.incoming(messages, agent_id).join(self.session, self.index, agent_id)

    def open(self, plan: Plan, retry_key: str | None = None, body_hash: str = "00", agent_id: str | None = None) -> int:
        """Take a claim; its fence."""
        self.add(
            open_turn(self.session, plan, incarnation=1, body_hash=body_hash, retry_key=retry_key, agent_id=agent_id)
        )
        return self.session.version

    def reject(self, messages: Sequence[Mapping[str, Any]], reason: str = "upstream_invalid") -> None:
        """A turn that ends without a commit."""
        fence = self.open(self.plan(messages))
        opened = self.session.open_turn
        assert opened is not None
        self.add(TurnRejected(opened.turn, fence, reason))

    def turn(
        self,
        messages: Sequence[dict[str, Any]],
        reply: dict[str, Any],
        *,
        prompt: Sequence[int] | None = None,
        output: Sequence[int] = (1,),
        versions: Sequence[tuple[str, int, int]] | None = None,
        finish_reason: str | None = "stop",
        retry_key: str | None = None,
        payloads: Callable[[int], tuple[PayloadRef, ...]] = lambda _: (),
        trimmed: int = 0,
        body_hash: str = "00",
        agent_id: str | None = None,
        max_replay_bytes: int | None = None,
    ) -> TurnCommitted:
        """Commit a turn. `prompt` None: the parent's tokens and one more. `payloads` come with it, by its fence.

        `trimmed` of the parent's tokens are left out of the prompt.
        """
        incoming = self.incoming(messages, agent_id)
        plan = incoming.join(self.session, self.index, agent_id)
        parent = self.made.get(plan.parent)
        if prompt is None:
            prompt = [*(parent.prompt + parent.output if parent else []), 99]
        if versions is None:
            versions = [("1", 0, len(output))] if output else []
        fence = self.open(plan, retry_key, body_hash, agent_id)
        opened = self.events[-1].event
        assert isinstance(opened, TurnOpened)
        before = token_parent(self.session, plan)
        known = [] if before is None else self.made[before.number].prompt + self.made[before.number].output
        known = known[: len(known) - trimmed]
        base = len(known) if list(prompt[: len(known)]) == known else 0
        message_hash, calls_hash, bare_hash = incoming.reply_hashes(raw(reply))
        answer = validated(
            [*prompt, *output],
            base,
            len(output),
            message_hash,
            calls_hash=calls_hash,
            bare_hash=bare_hash,
            calls=sampled_calls(bytes(raw(reply))),
            finish_reason=finish_reason,
            weight_versions=tuple(VersionSpan(*span) for span in versions),
            trimmed=trimmed,
        )
        logprobs = [-0.1 * (len(self.made) + index + 1) for index in range(len(output))]
        events = commit_turn(
            self.session,
            self.index,
            opened,
            fence,
            plan,
            incoming,
            answer,
            blobs=TurnBlobs(0),
            payloads=payloads(fence),
            max_replay_bytes=max_replay_bytes,
        )
        self.add(*events)
        [committed] = (event for event in events if isinstance(event, TurnCommitted))
        if committed.turn in self.index.odd_calls:
            self.index.odd_calls.learn(committed.turn, answer.calls)
        self.made[committed.turn] = Made(
            prompt=list(prompt),
            output=list(output),
            logprobs=logprobs,
            spans=tuple(versions),
            history=[*messages, reply],
            joined=plan.base_messages > 0,
            finish_reason=finish_reason,
            trimmed=trimmed if base else 0,
        )
        self.content[committed.turn] = TurnTokens(committed, int32(prompt[base:]), int32(output), float64(logprobs))
        return committed


def claimed(session: Session, opened: TurnOpened | None = None, fence: int = 2, idle_since: float = 0.0) -> Claimed:
    """A turn of the session that has its claim, with nothing of a request."""
    flight, nothing = InFlightTurn(session.session_id, Waiter(lambda size: None), Stages(lambda: 0.0)), cast(Any, None)
    opened = opened or TurnOpened(1, 0, 1, "", None)
    places: Any = {"entry": nothing, "session": session, "plan": nothing, "opened": opened, "fence": fence}
    times = {"opened_at": 0.0, "idle_since": idle_since, "requested_at": 0.0}
    request = cast(Any, SimpleNamespace(control=None))
    return Claimed(flight, request, nothing, None, 0, incarnation=1, rid="", **places, **times)


def samples(
    session: Session, content: Mapping[int, TurnTokens], max_seq_len: int | None = None, truncate: Truncate = "turn"
) -> list[Sample]:
    """The samples of all kept branches; `content` holds their turns. Raises Inconsistent."""
    events = {number: tokens.event for number, tokens in content.items()}
    fitting = segments(session, branch_rows(session), events, max_seq_len, truncate)
    return [sample(segment, content) for segment in fitting]
