"""The least that an export costs as the store is: the calls into C without which there is none."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import msgspec
import numpy as np
from sqlalchemy import Connection, text

from app.export.containers.writer import refuse
from app.export.formats import CONTAINERS, DEFAULT
from app.export.row import Fields
from workers import codec
from workers.codec import Facts

_TURNS = text("SELECT turn, facts, wire FROM turns WHERE session_id BETWEEN :first AND :last ORDER BY session_id, turn")

_COLUMNS = {
    "tokens": "[int32]",
    "loss_mask": "[uint8]",
    "sampled_mask": "[uint8]",
    "logprobs": "[float64]",
    "weight_versions": "[int64]",
    "messages": "json",
}


def ideal_cpu_s(connection: Connection, format: str, shape: str) -> float:
    """CPU seconds to check the hash of every turn, to unpack it and to write the columns that a token or a message has
    an item in, for the sessions of a store that each have turns 1, 2, …. Reading is left out, and so is everything
    between: the log, the samples, the other columns.
    """
    turns = connection.execute(_TURNS, {"first": "", "last": "~"})
    size, cpu = 0, 0.0
    with contextlib.closing(CONTAINERS[format](_COLUMNS, refuse)) as writer:
        for session in _sessions((row[0], row[1], row[2]) for row in turns):
            began = time.thread_time()
            size += sum(map(len, writer.write([_fields(session, shape == DEFAULT)])))
            cpu += time.thread_time() - began
        began = time.thread_time()
        size += sum(map(len, writer.finish()))
        cpu += time.thread_time() - began
    return cpu


def _sessions(turns: Iterator[tuple[int, bytes, bytes]]) -> Iterator[list[tuple[bytes, bytes]]]:
    found: list[tuple[bytes, bytes]] = []
    for turn, facts, wire in turns:
        if turn == 1 and found:
            yield found
            found = []
        found.append((facts, wire))
    yield found


def _fields(session: list[tuple[bytes, bytes]], has_messages: bool) -> Fields:
    ids: list[bytes] = []
    logprobs: list[bytes] = []
    messages: list[bytes] = []
    for frames in session:
        codec.content_hash(*frames)
        facts = codec.unpack(frames[0], Facts)
        ids += [facts.suffix_ids, facts.output_ids]
        logprobs += [bytes(2 * len(facts.suffix_ids)), facts.logprobs]
        if has_messages:
            said = codec.unpack_messages(frames[1])
            messages += [*said.messages, said.message]
    tokens = np.frombuffer(b"".join(ids), "<i4")
    mask = np.zeros(len(tokens), np.uint8)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "sampled_mask": mask,
        "logprobs": np.frombuffer(b"".join(logprobs), "<f8"),
        "weight_versions": np.zeros(len(tokens), np.int64),
        **({"messages": msgspec.Raw(b"[" + b",".join(messages) + b"]")} if has_messages else {}),
    }
