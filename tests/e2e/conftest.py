"""One server and engine for the real clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.stand import Stand, Talk, standing

from e2e.packages import built as built
from e2e.page import browser as browser
from e2e.page import page_stand as page_stand
from e2e.page import watch as watch


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with standing(tmp_path_factory.mktemp("e2e"), "--seed", "5", "--reasoning", "0.5") as made:
        yield made


@pytest.fixture
def talk(stand: Stand) -> Talk:
    return stand.talk()


@pytest.fixture
def base_url(stand: Stand, talk: Talk) -> str:
    """What a client is told in place of the engine's address."""
    return f"{stand.server.base_url}{talk.path}/v1"
