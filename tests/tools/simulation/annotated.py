"""The drill of annotations: what may be said of a session and its turns, in every form, comes back as it was."""

from __future__ import annotations

import struct
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from app.domain.columns import Column
from app.domain.events import SessionConfig
from app.errors import InvalidRequest
from app.features.annotations import bodies
from app.features.annotations.annotations import Annotations
from app.features.annotations.rules import MAX_DEPTH
from tests.tools.simulation.agreeing import asked
from tests.tools.simulation.client import Client
from tests.tools.simulation.process import Process


class AnnotatingClient(Client):
    """Has a session of one turn."""

    async def drill(self) -> None:
        """Raises SessionClosed, SessionNotFound, GaveUp."""
        await self.join(SessionConfig(rollback_window=1))
        await self.turn()
        listed = await self._answer(lambda process: process.service.cache.current(self.session_id))
        if listed is None or listed.session.leaf is None:
            return
        turn = listed.session.leaf.number
        values = [None if place % 3 == 1 else place / 2 for place in range(listed.session.leaf.output_tokens)]
        for form, read in _forms(values).items():
            said = await self._say(form, turn, read)
            self._must(said == values, f"{values} were said as {form}, and are {said}")
        for depth in (MAX_DEPTH, MAX_DEPTH + 1):
            value = _nested(depth)
            said = await self._say(f"{depth} lists in each other", None, lambda: value)  # noqa: B023
            self._must(said == (value if depth == MAX_DEPTH else None), f"{depth} lists in each other are {said}")
        for what, read in _REFUSED.items():
            said = await self._say(what, None, read)
            self._must(said is None, f"it has {what}: {said}")

    async def _say(self, what: str, turn: int | None, read: Callable[[], Any]) -> Any:
        """What is there then; None where it was refused."""

        async def say(process: Process) -> Any:
            annotations: Annotations = process.service.features["annotations"]
            try:
                await annotations.write(self.session_id, turn, "said", read(), None)
                content = (await annotations.read(self.session_id, turn, "said")).content
                return bodies.to_list(content) if isinstance(content, Column) else content
            except InvalidRequest as error:
                self._note(f"{self.name} says {what}: {error}")
                return None

        return await self._answer(say)

    async def _answer(self, work: Callable[[Process], Coroutine[Any, Any, Any]]) -> Any:
        process = self._process()
        return await asked(self._world, process, lambda: work(process))

    def _must(self, good: bool, what: str) -> None:
        self._world.must(good, f"{self.session_id}: {what}")


def _forms(values: list[Any]) -> Mapping[str, Callable[[], Column]]:
    """The same column, read from each form of a body."""
    column = bodies.from_list(values, "float32", "output")
    plain = bodies.to_safetensors(column)
    return {
        "a list": lambda: bodies.from_list(values, "float32", "output"),
        "npy": lambda: bodies.from_npy(bodies.to_npy(column), "output"),
        "safetensors": lambda: bodies.from_safetensors(plain, "output"),
        "safetensors with metadata": lambda: bodies.from_safetensors(_with_metadata(plain), "output"),
    }


def _with_metadata(body: bytes) -> bytes:
    size = struct.unpack("<Q", body[:8])[0]
    header = msgspec.json.encode({"__metadata__": {"by": "drill"}, **msgspec.json.decode(body[8 : 8 + size])})
    return struct.pack("<Q", len(header)) + header + body[8 + size :]


def _longer_header(body: bytes) -> bytes:
    """The header says that it is longer than the body."""
    return struct.pack("<Q", len(body)) + body[8:]


def _nested(depth: int) -> Any:
    value: Any = depth
    for _ in range(depth):
        value = [value]
    return value


def _none() -> Column:
    return bodies.from_list([], "float32", "output")


_REFUSED: Mapping[str, Callable[[], Any]] = {
    "a column, which only a turn may have": _none,
    "a column of a body that is too short": lambda: bodies.from_safetensors(
        _longer_header(bodies.to_safetensors(_none())), "output"
    ),
}
"""What nobody can say of a session."""
