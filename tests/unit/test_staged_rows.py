"""A staged row holds what had come when it became due, whatever comes before it is written."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.errors import UpstreamInvalid
from app.features.resume import staging
from app.features.resume.resume import Resume
from app.features.resume.staged_tokens import StageTokens
from app.features.resume.staging import StagedTurn, StagingCounters
from app.settings import Settings
from workers import codec

pytestmark = pytest.mark.anyio


class Rows:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    async def submit(self, operation: StageTokens) -> bool:
        self.data.append(codec.decompress(operation.row.data))
        return True


def chunk(text: str, token: int, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "token_ids": [token], "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "model": "m", "created": 1, "choices": [choice]}).encode() + b"\n\n"


async def test_an_end_that_comes_before_the_row_is_written_is_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retry would ask an engine to go on behind a whole reply."""
    monkeypatch.setattr(staging, "_request_hash", lambda turn, call: "")
    flight, opened, none = SimpleNamespace(session_id="s"), SimpleNamespace(turn=1), cast(Any, None)
    turn = cast(Any, SimpleNamespace(flight=flight, fence=1, incarnation=1, opened_at=0.0, opened=opened))
    rows, settings = Rows(), Settings.model_construct(stage_tokens_s=0.0)
    staged = StagedTurn(turn, none, none, cast(Any, rows), settings, StagingCounters(), is_native=False)
    stream = staged.stream(None, None, "http://engine", None, None)
    stream.feed(chunk("a", 1))
    stream.feed(chunk("b", 2, "stop") + b"data: [DONE]\n\n")
    assert stream.reply_stream.has_ended
    await staged.settled()
    assert rows.data == [chunk("a", 1)]


async def test_what_is_no_valid_reply_any_more_is_dropped() -> None:
    dropped: list[str] = []

    async def restore() -> list[None]:
        return [None]

    async def validate_body(*_: Any) -> None:
        raise UpstreamInvalid("without ids")

    async def drop(why: str) -> None:
        dropped.append(why)

    services = SimpleNamespace(engine_calls=SimpleNamespace(validate_body=validate_body), features={})
    staged, turn = cast(Any, SimpleNamespace(restore=restore, drop=drop)), cast(Any, SimpleNamespace(stored=()))
    assert await Resume(cast(Any, services), cast(Any, None))._restored(turn, cast(Any, turn), staged) is None
    assert dropped == ["without ids"]
