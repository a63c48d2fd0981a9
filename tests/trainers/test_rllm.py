"""rLLM's gateway manager and engine for agents, in a process of their own, with Turnlog in their gateway's place."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from trainers import playing
from trainers.stand import Sequenced, TrainerStand, judge, trainer_stand
from turnlog import Turnlog

pytestmark = [
    pytest.mark.harness,
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("rllm") is None, reason="rllm is not there, see CONTRIBUTING.md"),
]


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[TrainerStand]:
    """The server does not know the engine: rLLM names it."""
    on = {"TURNLOG_FEATURES": "all,rllm"}
    with trainer_stand(tmp_path / "server", "--silent-versions", dialect="vllm", environment=on) as made:
        yield made


def asked(stand: TrainerStand, *rows: tuple[str, str]) -> dict[str, Any]:
    messages = [{"messages": [{"role": "user", "content": text}], "what": what} for text, what in rows]
    return {"turnlog": stand.url, "engine": stand.engine.base_url, "rows": messages, "version": 7}


def require(stand: TrainerStand, episodes: list[dict[str, Any]], unused: int = 0) -> None:
    """Each has one row, as the engine said it, and both of its turns."""
    rows = []
    for one in episodes:
        [prompt], [response], [mask], [logprobs] = (one[name] for name in ("prompts", "responses", "masks", "logprobs"))
        rows.append(Sequenced([*prompt, *response], [0] * len(prompt) + mask, [0.0] * len(prompt) + logprobs))
        last = len(mask) - max(place for place, sampled in enumerate(mask) if not sampled) - 1
        assert one["rewards"] == [last]
        assert one["versions"] == [7, 7]
    judge(rows, stand.generations(), unused=unused)


def test_verls_rows_are_what_the_engine_said(stand: TrainerStand, tmp_path: Path) -> None:
    """Of an agent that raises rLLM tries the task again under its name, and then has an episode without steps."""
    given = asked(stand, ("One", "fine"), ("Two", "raises"))
    with Turnlog(stand.url) as turnlog:
        turnlog.remove_engine(stand.engine.base_url)  # rLLM adds it.
    with playing.program(tmp_path, "rllm_program", given, stand.url) as trainer:
        found = trainer.result()
    assert found["workers"] == [stand.engine.base_url]
    assert [one["rewards"] for one in found["episodes"][2:]] == [[], []]
    require(stand, found["episodes"][:2], unused=4)
    with Turnlog(stand.url) as turnlog:
        exported = list(turnlog.export())
        listed = list(turnlog.sessions())
    pinned = {"temperature": 0.9, "top_p": 1.0, "max_tokens": 40}
    assert [one["pinned"]["params"] for one in exported] == [pinned] * 6
    assert [one["status"] for one in listed] == ["closed"] * 6


def test_a_kill_of_the_server_and_of_the_trainer_loses_nothing(stand: TrainerStand, tmp_path: Path) -> None:
    """rLLM keeps rewards itself, so it plays all again. Under the same names, those of before are deleted first."""
    given = asked(stand, ("One", "waits"), ("Two", "waits"))
    (tmp_path / "gate").touch()
    with playing.program(tmp_path, "rllm_program", given, stand.url) as trainer:
        trainer.until("waiting", 4)
        trainer.kill()
    for path in (tmp_path / "waiting").iterdir():
        path.unlink()
    names = [f"task/{task}:{attempt}" for task in range(2) for attempt in range(2)]
    deleted = httpx.post(f"{stand.url}/sessions/batch_delete", json={"session_ids": names})
    assert deleted.json() == {"deleted": 4}
    with playing.program(tmp_path, "rllm_program", given, stand.url) as trainer:
        trainer.until("waiting", 4)
        stand.kill()
        trainer.gate.unlink()
        require(stand, trainer.result()["episodes"], unused=4)
    with Turnlog(stand.url) as turnlog:
        assert len(list(turnlog.export())) == 8
