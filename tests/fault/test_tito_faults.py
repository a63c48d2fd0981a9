"""Prompts built here, and an engine, a process or a client that does not play along."""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest
from integration.stand import Stand, Talk, error_of, user
from integration.tito import (
    checked,
    rendered,
    require_consistent,
    sent_ids,
    tokenizer_folder,
)

from ops.simulator.process import SimulatorProcess

pytestmark = pytest.mark.long

PLACES = re.compile(
    r"http://127\.0\.0\.1:\d+ reports another prompt than the one it was sent: choices\[0\]\.prompt_token_ids is not "
    r"the prompt that was sent: they differ from token (\d+) on \((\d+) tokens sent, (\d+) reported\)"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    return str(tokenizer_folder(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def shared_tito(engine: SimulatorProcess, tokenizer: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with checked(
        tmp_path_factory.mktemp("tito"), engine.base_url, environment={"TURNLOG_TOKENIZER": tokenizer}
    ) as made:
        yield made


@pytest.fixture
def tito(shared_tito: Stand) -> Stand:
    assert shared_tito.sim.post("/sim/reset").status_code == 200
    return shared_tito


def chatted(stand: Stand, turns: int = 2, **body: object) -> Talk:
    talk = stand.talk(**body)
    for turn in range(turns):
        talk.say(f"Question {turn}")
    return talk


@pytest.mark.parametrize("turns", [0, 2])
def test_another_prompt_than_was_sent_is_500_and_commits_nothing(tito: Stand, turns: int) -> None:
    talk = chatted(tito, turns)
    before = talk.state()
    sent = [*talk.messages, user("A secret")]
    response = talk.chat(sent, sim={"fault": "other_prompt"})
    assert error_of(response) == (500, "token_prefix_mismatch")
    found = PLACES.fullmatch(response.json()["error"]["message"])
    assert found is not None, response.text
    position, asked, reported = map(int, found.groups())
    [*_, ids] = sent_ids(tito, talk)
    assert asked == reported == len(ids)
    assert 0 <= position < asked
    assert talk.types()[-2:] == ["TurnOpened", "TurnRejected"]
    assert "secret" not in str(talk.events())
    after = talk.state()
    assert after["records"] == before["records"]
    assert after["metadata"]["accumulated_token_ids"] == before["metadata"]["accumulated_token_ids"]
    talk.say("Something else")
    require_consistent(tito, talk)


def test_a_rollback_that_meets_another_prompt_keeps_the_old_turn(tito: Stand) -> None:
    talk = chatted(tito)
    before = talk.state()["records"]
    response = talk.chat([*talk.messages[:2], user("Instead")], sim={"fault": "other_prompt"})
    assert error_of(response) == (500, "token_prefix_mismatch")
    assert talk.state()["records"] == before
    assert "RolledBack" not in talk.types()
    talk.say("On")
    require_consistent(tito, talk)


def test_a_reply_without_its_prompt_is_sound_where_the_prompt_was_sent(tito: Stand) -> None:
    talk = chatted(tito, 1)
    talk.say("Again", sim={"fault": "missing_prompt_ids"})
    talk.say("And again")
    assert "prompt_token_ids" not in talk.state()["records"][1]["response"]["choices"][0]
    require_consistent(tito, talk)


def test_an_abort_is_continued_exactly(tito: Stand) -> None:
    talk = chatted(tito, 1)
    talk.say("Abort", sim={"fault": "abort"})
    talk.say("On")
    assert [record["response"]["choices"][0]["finish_reason"] for record in talk.state()["records"]][1] == "abort"
    require_consistent(tito, talk)


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_restart_between_turns_changes_no_prompt(tito: Stand, end: str) -> None:
    talk = chatted(tito)
    getattr(tito.server, end)()
    tito.server.start()
    talk.say("After the restart")
    talk.say("And once more")
    assert sent_ids(tito, talk)[-1] == rendered(talk.messages[:-1])
    require_consistent(tito, talk)


def test_a_kill_during_a_rollback_keeps_the_old_turn(tito: Stand) -> None:
    talk = chatted(tito)
    before = talk.state()
    sent = [*talk.messages[:2], user("Instead")]
    call = tito.meanwhile(talk.chat, sent, sim={"latency_s": 5})
    tito.until_generating(talk, 3)
    tito.server.kill()
    assert isinstance(call.exception(), httpx.TransportError)
    tito.server.start()
    assert talk.state()["records"] == before["records"]
    assert talk.chat(sent, headers={"x-stainless-retry-count": "1"}).status_code == 200
    assert talk.types()[-3:] == ["TurnOpened", "RolledBack", "TurnCommitted"]
    require_consistent(tito, talk)


def test_without_a_cache_every_prompt_is_the_same(
    engine: SimulatorProcess, tokenizer: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    environment = {"TURNLOG_TOKENIZER": tokenizer, "TURNLOG_CACHE_BYTES": "0"}
    with checked(tmp_path_factory.mktemp("cold"), engine.base_url, environment=environment) as stand:
        talks = [stand.talk(rollback_window=2) for _ in range(3)]
        for turn in range(4):
            for talk in talks:
                talk.say(f"Turn {turn}")
        for talk in talks:
            talk.messages = talk.messages[:4]
            talk.say("Instead of two")
        for talk in talks:
            assert talk.events()[-2]["discarded"] == [3, 4]
            assert sent_ids(stand, talk)[-1] == rendered(talk.messages[:-1])
            require_consistent(stand, talk)


def test_a_rollback_below_what_is_cached_reads_it_again(tito: Stand) -> None:
    talk = chatted(tito, 3, rollback_window=3)
    tito.server.stop()
    tito.server.start()
    talk.messages = talk.messages[:4]
    talk.say("Instead of the third")
    talk.messages = talk.messages[:2]
    talk.say("Instead of the second")
    first, talk.messages = talk.messages[0], []
    talk.add(first)
    assert sent_ids(tito, talk)[-1] == rendered(talk.messages[:1])
    require_consistent(tito, talk)
