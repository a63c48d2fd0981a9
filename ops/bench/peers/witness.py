"""The engine stand-in inside this process, so that what it sampled can be compared with what a server recorded."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

import uvicorn

from ops.bench.peers.protocol import Record
from ops.simulator.app import Simulator
from ops.simulator.generation import Generation
from ops.simulator.wire import Config, Dialect, FaultOrder

_TAG = re.compile(r"turn-\d+-\d+-\d+")


class Sampled(NamedTuple):
    """A generation as the engine made it, before any fault."""

    text: str
    ids: list[int]
    logprobs: list[float]
    prompt: list[int]

    def is_record(self, record: Record) -> bool:
        """Whether the record says this and nothing else."""
        return (
            _same(record.ids, self.ids)
            and record.logprobs is not None
            and _same(record.logprobs, self.logprobs)
            and (record.prompt is None or _same(record.prompt, self.prompt))
        )

    def contradicts(self, record: Record) -> bool:
        """Whether the record says something else; one that has no ids, or fewer logprobs, or null ones, only says
        less."""
        known = [pair for pair in zip(record.logprobs or (), self.logprobs, strict=False) if pair[0] is not None]
        return bool(record.ids) and not (
            _same(record.ids, self.ids)
            and all(_same([said], [sampled]) for said, sampled in known)
            and len(record.logprobs or ()) <= len(self.logprobs)
            and (not record.prompt or _same(record.prompt, self.prompt))
        )


def _same(said: Sequence[object], sampled: Sequence[float]) -> bool:
    """Whether the numbers are equal, logprobs to 32 bits. A bool is no number, and a float no id."""
    return len(said) == len(sampled) and all(
        type(ours) is type(theirs) and ours in (theirs, _float32(theirs))
        for ours, theirs in zip(said, sampled, strict=True)
    )


def _float32(number: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", number))[0]
    return rounded


def tag(session: int, agent: int, turn: int) -> str:
    """What the last message of a turn's request says, so that the engine's generations can be told apart."""
    return f"turn-{session}-{agent}-{turn}"


class WitnessEngine:
    """An engine stand-in in a thread of this process; `sampled` has its generations by the tag of their turns."""

    def __init__(self, dialect: Dialect, latency_s: float = 0.05) -> None:
        self.sampled: dict[str, list[Sampled]] = defaultdict(list)
        simulator = Simulator(Config(dialect=dialect, reasoning=0.0, latency_s=latency_s))
        self._engine = simulator.engine
        self._engine.witnesses.append(self._saw)
        config = uvicorn.Config(simulator, log_level="critical", lifespan="off")
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10.0)
        self._socket.close()

    def fail_next(self, fault: str) -> None:
        """Apply a fault of the simulator to the next reply."""
        self._engine.faults.clear()
        self._engine.faults.add(FaultOrder(fault))

    def _saw(self, generation: Generation[Any]) -> None:
        draft, prompt = generation.draft, list(generation.prompt.ids())
        if tags := _TAG.findall(self._engine.tokenizer.decode(prompt)):
            logprobs = [float(number) for number in self._engine.writer.logprobs(draft)]
            self.sampled[tags[-1]].append(Sampled(draft.text, draft.ids, logprobs, prompt))
