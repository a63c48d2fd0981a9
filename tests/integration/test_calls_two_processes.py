"""A process that is behind recognises calls of turns that another one has committed, once it has read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.stand import SPOKEN, Stand, serving, user
from integration.test_calls import (
    HISTORIES,
    PLAIN,
    ask,
    calling,
    ids_of,
    require_one_line,
    results,
    with_arguments,
)
from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long


@pytest.fixture
def pair(sglang: SimulatorProcess, postgres_url: str, tmp_path: Path) -> Iterator[tuple[Stand, Stand]]:
    environment = {"TURNLOG_DATABASE_URL": postgres_url}
    with (
        serving(tmp_path / "one", sglang.base_url, environment=environment) as one,
        serving(tmp_path / "other", sglang.base_url, environment=environment) as other,
    ):
        yield one, other


def talk_in_turns(
    pair: tuple[Stand, Stand], protocol: str, history: str, sims: Sequence[dict[str, Any]], returned: str
) -> None:
    """Each process takes every second turn; the client returns other arguments than it got."""
    talk = pair[0].talk(protocol, history=history)
    talks = [talk, pair[1].known(talk.id, protocol)]
    messages = [user("Go")]
    for number, sim in enumerate([*sims, PLAIN]):
        speaker = talks[number % 2]
        speaker.messages = messages
        ids = ids_of(protocol, ask(speaker, sim))
        messages = with_arguments(protocol, speaker.messages, returned) + results(protocol, ids)
    require_one_line(talk, len(sims) + 1)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("protocol", SPOKEN)
def test_arguments_that_are_no_object_and_odd_ids(pair: tuple[Stand, Stand], protocol: str, history: str) -> None:
    ids: list[str | None] = ["", None, "functions.Bash:0", "", None]
    talk_in_turns(pair, protocol, history, [calling('{"cmd": "echo', ids=[call_id]) for call_id in ids], "{}")


def test_arguments_that_a_client_trims(pair: tuple[Stand, Stand]) -> None:
    talk_in_turns(pair, "messages", "tree", [calling('{"cmd": "x  "}')] * 5, '{"cmd": "x"}')
