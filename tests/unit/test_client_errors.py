"""The client's errors, made from the server's own; and which of them another try may mend."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

import turnlog
from app import errors as server
from turnlog.client.waits import Waits, may_help
from turnlog.errors import NotTurnlog, TurnlogError, Unreachable, refusal


def tree(root: type[server.AppError]) -> list[type[server.AppError]]:
    return [
        found for sub in root.__subclasses__() if not sub.__module__.startswith("tests.") for found in (sub, *tree(sub))
    ]


def of(error: server.AppError) -> TurnlogError:
    return refusal(error.status, error.headers(), json.dumps(error.body()).encode())


@pytest.mark.parametrize("kind", tree(server.AppError), ids=lambda kind: kind.__name__)
def test_every_error_of_the_server_is_known(kind: type[server.AppError]) -> None:
    error = of(kind("why"))
    assert (error.status, error.code, error.message) == (kind.status, kind.code, "why")
    assert str(error) == f"{kind.status} {kind.code}: why"
    assert not isinstance(error, NotTurnlog)
    assert isinstance(error, turnlog.Unavailable | turnlog.EnginesFailed) == (kind.status >= 500)
    assert isinstance(error, turnlog.NotFound) == (kind.status in (404, 410))
    assert isinstance(error, turnlog.Conflict) == (kind.status == 409)
    assert isinstance(error, turnlog.SessionClosed) == (kind in (server.SessionClosed, server.GenerationEnded))
    assert isinstance(error, turnlog.Restored) == (kind is server.Restored)


def test_what_stands_beside_an_error_is_kept() -> None:
    body = {**server.EnginesFailed("two").body(), "engines": {"http://a": {"ok": False}}}
    error = refusal(502, {}, json.dumps(body).encode())
    assert isinstance(error, turnlog.EnginesFailed)
    assert error.body["engines"] == {"http://a": {"ok": False}}


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"[]", b"{}", b'{"error": "no"}', b'{"detail": "Not Found"}', b"\xff"]
)
@pytest.mark.parametrize("status", [301, 404, 502])
def test_another_services_reply_is_told_apart(status: int, content: bytes) -> None:
    error = refusal(status, {}, content)
    assert isinstance(error, NotTurnlog)
    assert (error.status, error.code) == (status, None)
    assert may_help(error) == (status == 502)


@pytest.mark.parametrize(
    ("error", "helps"),
    [
        (server.Overloaded("later"), True),
        (server.StoreUnavailable("later"), True),
        (server.ClaimLost("again"), True),
        (server.SessionBusy("no"), False),
        (server.StoreFull("no"), False),
        (server.SessionExists("no"), False),
        (server.EnginesFailed("no"), False),
        (server.InvalidRequest("no"), False),
        (server.AppError("a fault"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_only_what_may_pass_is_tried_again(error: server.AppError, helps: bool) -> None:
    assert may_help(of(error)) == helps


def test_waits_grow_and_end() -> None:
    waits = Waits(1000.0)
    first, *others = [waits.after(Unreachable("gone")) or 0.0 for _ in range(9)]
    assert 0.05 <= first <= 0.1
    assert 2.5 <= others[-1] <= 5.0
    assert Waits(0.0).after(Unreachable("gone")) is None


def test_the_server_says_when_to_come_again() -> None:
    error = of(server.StoreUnavailable("later"))
    assert error.retry_after_s == 2.0
    wait_s = Waits(1000.0).after(error)
    assert wait_s is not None
    assert wait_s >= 2.0
    assert Waits(1.0).after(error) is None


def test_progress_renews_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("turnlog.client.waits.time", SimpleNamespace(monotonic=lambda: now))
    waits = Waits(0.2)
    now += 0.21
    assert waits.after(Unreachable("gone")) is None
    waits.reset()
    assert waits.after(Unreachable("gone")) is not None
