"""What a session's token may name by headers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.api.header_sessions import session_of_request
from app.errors import SessionNotFound
from app.services import Services


@pytest.mark.parametrize("way", ["ensure", "existing"])
def test_another_tokens_session_is_like_one_that_does_not_exist(way: str) -> None:
    """Whatever its history: an agent of a linear session would have a session of its own."""

    def refusal(stored: Any) -> str:
        async def get(session_id: str) -> Any:
            return stored

        settings = SimpleNamespace(history=None, agents="branches")
        sessions = SimpleNamespace(config_of=get)
        app = cast(Services, SimpleNamespace(cache=SimpleNamespace(get=get), settings=settings, sessions=sessions))
        headers = [("x-turnlog-session-id", "theirs"), ("x-turnlog-agent-id", "a1")]
        session = session_of_request(headers, b"", "mine")
        with pytest.raises(SessionNotFound) as raised:
            asyncio.run(getattr(session, way)(app))
        return str(raised.value)

    linear, tree = (
        SimpleNamespace(session=SimpleNamespace(history=history, name=None)) for history in ("linear", "tree")
    )
    assert refusal(None) == refusal(linear) == refusal(tree)
