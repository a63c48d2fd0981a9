"""Does the server hold what the reply said? Each check gives the differences it finds, as sentences."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.tools.mutated_replies.payload_reader import KINDS, Rows
from tests.tools.mutated_replies.reader import Reading, Value, decode, get, is_object

HOMES = ((), ("choices", 0), ("choices", 0, "meta_info"), ("sglext",))
"""Where a value may be null in what the server gives."""

WINDOW = 2
"""The newest turns of a segment keep their payloads: TURNLOG_ROLLBACK_WINDOW, which is 1, and one."""

RECORD_DEPTH = 110
"""A reply may nest to 100; the record around it adds a few levels."""


@dataclass(slots=True)
class Taken:
    """A reply that the server said 200 to: its number (None: a sound one), its bytes, what a strict reader reads."""

    number: int | None
    turn: int
    body: bytes
    reading: Reading


def differences(sent: Value, got: Value, nullable: Sequence[str], path: tuple[str | int, ...] = ()) -> Iterator[str]:
    """Where `got` is not `sent`, spellings of numbers and order of keys included. `nullable` values may be null."""
    if sent == got:
        return
    if is_object(sent) and is_object(got) and [key for key, _ in sent[1]] == [key for key, _ in got[1]]:
        for (key, inner), (_, other) in zip(sent[1], got[1], strict=True):
            if not (key in nullable and path in HOMES and other is None):
                yield from differences(inner, other, nullable, (*path, key))
    elif isinstance(sent, list) and isinstance(got, list) and len(sent) == len(got):
        for place, (inner, other) in enumerate(zip(sent, got, strict=True)):
            yield from differences(inner, other, nullable, (*path, place))
    else:
        yield f"at {'.'.join(map(str, path)) or 'the top'} it differs"


def client_reply(served: bytes, got: bytes, nullable: Sequence[str]) -> Iterator[str]:
    """The reply that the client got; to the byte where nothing may be left out of it."""
    if served == got:
        return
    if not nullable:
        yield "the client's reply is not the engine's bytes"
        return
    found = list(differences(decode(served), decode(got), nullable))
    yield from (f"the client's reply: {what}" for what in found)
    if not found and not _holds(decode(served), nullable):
        yield "the client's reply is not the engine's bytes, though nothing in it may be left out"


def _holds(root: Value, names: Sequence[str]) -> bool:
    choices = get(root, "choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    homes = (root, choice, get(choice, "meta_info"), get(root, "sglext"))
    return any(get(home, name) is not None for home in homes for name in names)


def records(taken: Sequence[Taken], session: bytes) -> Iterator[str]:
    """`GET /sessions/{id}`: a record per committed turn, with the reply as it came."""
    found = get(decode(session, RECORD_DEPTH), "records")
    if not isinstance(found, list) or len(found) != len(taken):
        yield f"{len(found or [])} records for {len(taken)} committed turns"
        return
    for place, (one, record) in enumerate(zip(taken, found, strict=True)):
        nullable = KINDS if place < len(taken) - WINDOW else ()
        for what in differences(one.reading.root, get(record, "response"), nullable):
            yield f"the record of turn {one.turn}: {what}"
        if get(record, "turn") != ("#", str(one.turn)):
            yield f"the record of turn {one.turn} has another turn's number"


def events(expected: Sequence[str], lines: bytes) -> Iterator[str]:
    """`GET …/events`: each turn opened and ended, as the client was told; no open turn is left."""
    found = [json.loads(line) for line in lines.splitlines()]
    ended: list[str] = []
    open_turn: int | None = None
    for place, event in enumerate(found, 1):
        if event["seq"] != place:
            yield f"event {event['seq']} stands where {place} should"
        if event["type"] == "TurnOpened":
            if open_turn is not None:
                yield f"turn {event['turn']} was opened while turn {open_turn} was open"
            open_turn = event["turn"]
        elif event["type"] in ("TurnCommitted", "TurnRejected", "TurnAbandoned"):
            if open_turn != event["turn"]:
                yield f"turn {event['turn']} ended, but {open_turn} was open"
            open_turn = None
            ended.append("committed" if event["type"] == "TurnCommitted" else event.get("reason") or event["type"])
    if open_turn is not None:
        yield f"turn {open_turn} is still open"
    if ended != list(expected):
        yield f"the log has {ended}, the client was told {list(expected)}"


def _loads(text: bytes | str) -> Any:
    """Integers that Python refuses to read stay text."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else digits)


def export(taken: Sequence[Taken], lines: bytes, replay: bool) -> Iterator[str]:
    """`/export` of the session: tokens, logprobs, masks, versions, states and payload rows of every turn, once."""
    by_turn = {one.turn: one for one in taken}
    seen: list[int] = []
    for line in lines.splitlines():
        row = _loads(line)
        members: list[Taken] = []
        for span in row["turns"]:
            seen.append(span["turn"])
            one = by_turn.get(span["turn"])
            if one is None:
                yield f"the export has turn {span['turn']}, which was not acknowledged"
                return
            members.append(one)
            yield from _turn(one, row, span)
        if not members:
            yield "the export has a row without turns"
            return
        yield from _row(members, row)
        if replay:
            for kind in KINDS:
                yield from _rows(kind, members, row)
    if seen != [one.turn for one in taken]:
        yield f"the export has turns {seen} of {[one.turn for one in taken]}"


def _turn(one: Taken, row: Mapping[str, Any], span: Mapping[str, Any]) -> Iterator[str]:
    """One turn's part of a row."""
    reading, start, begin, end = one.reading, span["start"], span["output_start"], span["end"]
    where = f"the export of turn {one.turn}"
    if row["tokens"][:begin] != reading.prompt:
        yield f"{where}: other prompt ids"
    if row["tokens"][begin:end] != reading.output:
        yield f"{where}: other output ids"
    if row["logprobs"][begin:end] != reading.logprobs or any(row["logprobs"][start:begin]):
        yield f"{where}: other logprobs"
    masks = [0] * (begin - start) + [1] * (end - begin)
    if row["loss_mask"][start:end] != masks or row["sampled_mask"][start:end] != masks:
        yield f"{where}: other masks"
    names = row["weight_version_names"]
    numbers = row["weight_versions"][begin:end]
    said = [names[number] if names else str(number) for number in numbers]
    # An engine that does not say its version has the one that it was known to have when it was asked.
    known = span.get("dispatched") or "unknown"
    versions = [known if version == "unknown" else version for version in reading.versions]
    wanted = versions if names else [_number(version) for version in versions]
    if said != wanted or set(row["weight_versions"][start:begin]) - {-1}:
        yield f"{where}: other weight versions"
    if span["finish_reason"] != reading.finish_reason:
        yield f"{where}: another finish reason"


def _number(version: str) -> str:
    """A version that is a number, as that number is written; the export may drop leading zeros."""
    return version.lstrip("0") or "0"


def _row(members: Sequence[Taken], row: Mapping[str, Any]) -> Iterator[str]:
    """What a row says as a whole: its status is that of all its turns, the rest its last turn's."""
    last = members[-1]
    reasons = {one.reading.finish_reason for one in members}
    status = "aborted" if "abort" in reasons else "truncated" if "length" in reasons else "completed"
    if row["status"] != status:
        yield f"the export of turn {last.turn}: status {row['status']}"
    total = len(last.reading.prompt) + len(last.reading.output)
    if {len(row[name]) for name in ("tokens", "logprobs", "loss_mask", "weight_versions")} != {total}:
        yield f"the export of turn {last.turn}: not {total} tokens"
    if not row["messages"] or row["messages"][-1] != _loads(last.body)["choices"][0]["message"]:
        yield f"the export of turn {last.turn}: another message"


def _rows(kind: str, members: Sequence[Taken], row: Mapping[str, Any]) -> Iterator[str]:
    """The row's payload: that of its last turn, the rows before its first one from the turns before."""
    known: Rows | None = None
    for one in members:
        own = one.reading.payloads.get(kind)
        if own is not None:
            known = _joined(known, own)
        last = own
    given = _given(kind, row)
    where = f"the export of turn {members[-1].turn}"
    if last is None or not last.ids:
        if given is not None and given.ids and known is None:
            yield f"{where}: {kind} from nowhere"
        return
    assert known is not None
    if given is None:
        yield f"{where}: {kind} is missing"
    elif given.start + given.rows != last.start + last.rows or given.start > last.start:
        yield f"{where}: {kind} has rows {given.start} + {given.rows}, the reply {last.start} + {last.rows}"
    elif given.width != last.width:
        yield f"{where}: {kind} has {given.width} ids a row, the reply {last.width}"
    elif _shape(kind, row)[:1] != [given.rows] or math.prod(_shape(kind, row)) != len(given.ids):
        yield f"{where}: {kind} has {len(given.ids)} ids, its shape is {_shape(kind, row)}"
    else:
        begin = max(given.start, known.start)
        if given.ids[(begin - given.start) * given.width :] != known.ids[(begin - known.start) * known.width :]:
            yield f"{where}: other ids in {kind}"


def _joined(before: Rows | None, own: Rows) -> Rows:
    """A turn's rows with those before them that an earlier turn brought."""
    if not own.start or before is None or before.width != own.width or before.start + before.rows < own.start:
        return own
    if before.start >= own.start:
        return own
    kept = before.ids[: (own.start - before.start) * own.width]
    return Rows(before.start, own.start - before.start + own.rows, kept + own.ids)


def _fields(kind: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A payload in an export row: the fields of `routed_experts` stand beside it, another kind's in its own object."""
    held = row.get(kind)
    return held if isinstance(held, dict) else {**row, "data": held}


def _shape(kind: str, row: Mapping[str, Any]) -> list[int]:
    return list(_fields(kind, row)["shape"])


def _given(kind: str, row: Mapping[str, Any]) -> Rows | None:
    fields = _fields(kind, row)
    text = fields.get("data")
    if text is None:
        return None
    ids = [int(number) for number in np.frombuffer(base64.b64decode(text, validate=True), fields["dtype"])]
    return Rows(fields["row_start"], fields["rows"], ids)
