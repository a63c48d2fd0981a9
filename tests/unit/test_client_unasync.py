"""The sync client is made from the async one."""

from __future__ import annotations

import inspect

from ops import unasync
from turnlog import AsyncSession, AsyncTurnlog, Session, Turnlog


def test_the_sync_client_is_current() -> None:
    assert unasync.is_current(), "run python -m ops.unasync"


def test_nothing_of_it_is_async() -> None:
    for text in unasync.generate().values():
        body = text.removeprefix(unasync.NOTICE)
        assert not any(word in body for word in ("async ", "await ", "Async", "asyncio"))


def test_both_have_the_same_methods() -> None:
    for asynchronous, synchronous in ((AsyncTurnlog, Turnlog), (AsyncSession, Session)):
        ours = {name for name, _ in inspect.getmembers(asynchronous) if not name.startswith("_")}
        theirs = {name for name, _ in inspect.getmembers(synchronous) if not name.startswith("_")}
        assert {"close" if name == "aclose" else name for name in ours} == theirs
