"""An error that a large body is refused with ends with its request: no frame of its traceback holds it.

Else it would hold itself, the body and what was read of it until a full collection, which is rare (`app.main`).
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import InvalidRequest, UpstreamInvalid
from app.protocols.registry import PROTOCOLS
from app.turn.large_bodies import LargeBodies
from app.turn.turns import _parse_mended
from app.turn.validation import ReplyValidator
from app.upstream.body import Body
from workers.parse_json import Rejected

pytestmark = pytest.mark.anyio

BROKEN = b'{"messages": [1, "x'


@pytest.fixture(autouse=True)
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("size", [0, 1 << 20], ids=["inline", "thread"])
async def test_the_error_of_a_refused_body(size: int) -> None:
    bodies, chat = LargeBodies(), PROTOCOLS["chat"]

    async def refused() -> weakref.ref[BaseException]:
        try:
            try:
                await bodies.run(size, partial(chat.parse, BROKEN))
            except InvalidRequest:
                assert await bodies.run(size, partial(_parse_mended, chat, BROKEN)) is None
                raise
        except InvalidRequest as error:
            return weakref.ref(error)
        raise AssertionError

    gone = await refused()
    await asyncio.sleep(0)
    assert gone() is None


@pytest.mark.parametrize("body", [b"{}", b'{"error": {"message": "no memory"}}'], ids=["malformed", "error"])
async def test_the_error_of_a_refused_reply(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    async def judged(*_: Any) -> None:
        raise Rejected("a rule")

    monkeypatch.setattr(ReplyValidator, "_judged", judged)
    validator: Any = ReplyValidator.__new__(ReplyValidator)

    async def refused() -> weakref.ref[BaseException]:
        answer = SimpleNamespace(body=Body([body]), engine="an engine")
        try:
            await validator.by_all_rules(None, answer, 0, None)
        except UpstreamInvalid as error:
            return weakref.ref(error.__cause__ or error)
        raise AssertionError

    gone = await refused()
    await asyncio.sleep(0)
    assert gone() is None
