"""A chat template with arguments, refusals and moods of its own: what is honoured, what is refused, what is slow."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest

from integration.places import Places
from integration.stand import Stand, Talk, error_of, until, user
from integration.tito import GENERATION, checked, require_consistent, sent_ids, text_of, tokenizer_folder
from ops.simulator.process import SimulatorProcess

NO_THOUGHT = "<think>\n\n</think>\n\n"
SLOW = "SLOWLY"
LOOPS = 200

_OPENING = f"""\
{{%- if messages[-1].content == '{SLOW}' -%}}
    {{%- for one in range({LOOPS}) -%}}{{%- for other in range(100000) -%}}{{%- endfor -%}}{{%- endfor -%}}
{{%- endif -%}}
{{%- for message in messages -%}}
    {{%- if 'unspeakable' in message.content -%}}
        {{{{- raise_exception('such words are not rendered') -}}}}
    {{%- endif -%}}
    {{%- if 'indivisible' in message.content -%}}{{{{- 1 // 0 -}}}}{{%- endif -%}}
{{%- endfor -%}}
"""
_ENDING = (
    "{%- if add_generation_prompt and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}"
)


def replaced(template: str, old: str, new: str) -> str:
    assert template.count(old) == 1
    return template.replace(old, new)


def moody(template: str) -> str:
    """Arguments `enable_thinking` (the generation prompt), `loud` (what users said), `clear_thinking` (reasoning)."""
    said = "{{- text(message.content) + "
    shouted = "{{- (text(message.content) | upper if loud else text(message.content)) + "
    template = replaced(template, said, shouted)
    kept = "{%- if message.reasoning_content and (loop.last or not clear_thinking) -%}"
    template = replaced(template, "{%- if message.reasoning_content -%}", kept)
    return _OPENING + template + _ENDING


def trimming(template: str) -> str:
    """Renders what the policy said without the space around it."""
    return replaced(template, "set content = text(message.content)", "set content = text(message.content) | trim")


@pytest.fixture(scope="module")
def shared_moody(sglang: SimulatorProcess, tmp_path_factory: pytest.TempPathFactory, places: Places) -> Iterator[Stand]:
    environment = {
        "TURNLOG_TOKENIZER": str(tokenizer_folder(tmp_path_factory.mktemp("moody"), moody)),
        "TURNLOG_ON_DISCONNECT": "abort_after:0",
    }
    with checked(places.new("moody"), sglang.base_url, environment=environment) as made:
        yield made


@pytest.fixture
def stand(shared_moody: Stand) -> Stand:
    assert shared_moody.sim.post("/sim/reset").status_code == 200
    return shared_moody


def test_an_argument_of_the_generation_prompt_is_honoured_in_each_turn(stand: Stand) -> None:
    talk = stand.talk()
    for enabled in (False, True, False):
        talk.say("Hello", chat_template_kwargs={"enable_thinking": enabled}, sim={"reasoning": False})
    talk.say("And without", sim={"reasoning": False})
    endings = [text_of(ids).rpartition(GENERATION)[2] for ids in sent_ids(stand, talk)]
    assert endings == [NO_THOUGHT, "", NO_THOUGHT, ""]
    assert len(talk.rows()) == 1
    require_consistent(stand, talk)
    [found] = talk.state()["metadata"]["tito_session_mismatch"]
    assert found["type"] == "special_token_count"
    assert "[<think>]" in found["actual_text"]


def test_an_argument_that_would_rewrite_history_is_400(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    sent = [*talk.messages, user("On")]
    response = talk.chat(sent, chat_template_kwargs={"loud": True})
    assert error_of(response) == (400, "invalid_request")
    assert "chat_template_kwargs" in response.json()["error"]["message"]
    assert (talk.generations(), talk.types()[-1]) == (1, "TurnRejected")
    talk.say("On", chat_template_kwargs={"loud": False})
    require_consistent(stand, talk)


def test_the_same_argument_from_the_first_turn_on_is_honoured(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello", chat_template_kwargs={"loud": True})
    talk.say("again", chat_template_kwargs={"loud": True})
    one, two = sent_ids(stand, talk)
    assert "user\nHELLO<|im_end|>" in text_of(one)
    assert "user\nAGAIN<|im_end|>" in text_of(two)
    assert error_of(talk.chat([*talk.messages, user("on")])) == (400, "invalid_request")
    assert talk.state()["metadata"]["tito_session_mismatch"] == []
    require_consistent(stand, talk)


def test_a_rollback_of_the_first_turn_may_choose_again(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    talk.messages = []
    talk.say("Hello", chat_template_kwargs={"loud": True})
    assert talk.types()[-2:] == ["RolledBack", "TurnCommitted"]
    assert "HELLO" in text_of(sent_ids(stand, talk)[-1])
    require_consistent(stand, talk)


@pytest.mark.parametrize("arguments", [{"tokenize": True}, {"clear_thinking": True}, [], "x"])
def test_arguments_that_are_not_a_clients_are_400(stand: Stand, arguments: Any) -> None:
    talk = stand.talk()
    assert error_of(talk.chat([user("Hello")], chat_template_kwargs=arguments)) == (400, "invalid_request")
    assert talk.generations() == 0
    talk.say("Hello", chat_template_kwargs=None)
    talk.say("Hello", chat_template_kwargs={"clear_thinking": False})


def test_a_number_that_is_none_is_400(stand: Stand) -> None:
    talk = stand.talk()
    body = '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a":1e999}}'
    assert error_of(stand.http.post(talk.chat_path, content=body)) == (400, "invalid_request")


def test_what_the_template_refuses_is_400_with_the_templates_words_alone(stand: Stand) -> None:
    talk = stand.talk()
    assert error_of(talk.chat([user("unspeakable at once")])) == (400, "invalid_request")
    talk.say("Hello")
    before = talk.state()
    response = talk.chat([*talk.messages, user("an unspeakable secret")])
    assert error_of(response) == (400, "invalid_request")
    assert "such words are not rendered" in response.text
    assert "secret" not in response.text
    response = talk.chat([*talk.messages, user("an indivisible secret")])
    assert error_of(response) == (400, "invalid_request")
    assert "secret" not in response.text
    assert talk.state()["records"] == before["records"]
    assert talk.types()[-2:] == ["TurnOpened", "TurnRejected"]
    assert talk.generations() == 1
    talk.say("On")
    require_consistent(stand, talk)


def test_a_rollback_that_the_template_refuses_keeps_the_old_turn(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("One")
    talk.say("Two")
    before = talk.state()["records"]
    assert error_of(talk.chat([*talk.messages[:2], user("unspeakable")])) == (400, "invalid_request")
    assert talk.state()["records"] == before
    assert "RolledBack" not in talk.types()
    talk.say("Three")
    require_consistent(stand, talk)


def test_words_that_the_template_would_render_otherwise_are_told_and_kept(
    sglang: SimulatorProcess, tmp_path: Path, places: Places
) -> None:
    environment = {"TURNLOG_TOKENIZER": str(tokenizer_folder(tmp_path / "tokenizer", trimming))}
    with checked(places.new("stand"), sglang.base_url, environment=environment) as stand:
        talk = stand.talk()
        talk.say("Space", sim={"text": "  in front", "reasoning": False})
        talk.say("On", sim={"text": "none", "reasoning": False})
        [found] = talk.state()["metadata"]["tito_session_mismatch"]
        assert (found["type"], found["expected_text"], found["actual_text"]) == (
            "assistant_text",
            "assistant\nin front",
            "assistant\n  in front",
        )
        ids = talk.state()["metadata"]["accumulated_token_ids"]
        start = found["actual_start"]
        assert text_of(ids[start : start + found["actual_length"]]) == found["actual_text"]
        require_consistent(stand, talk)


def begin_slowly(stand: Stand, talk: Talk, **fields: Any) -> Future[httpx.Response]:
    call: Future[httpx.Response] = stand.meanwhile(talk.chat, [user(SLOW)], **fields)
    until(lambda: talk.types()[-1] == "TurnOpened")
    return call


@pytest.mark.parametrize("text", [SLOW, "straße and words " * 60_000], ids=["template", "tokenizer"])
def test_others_are_answered_before_a_slow_prompt_is_made(stand: Stand, text: str) -> None:
    """How soon: docs/benchmarks.md."""
    talk = stand.talk()
    call = stand.meanwhile(talk.chat, [user(text)])
    until(lambda: talk.types()[-1] == "TurnOpened")
    for _ in range(5):
        assert stand.http.get("/health").status_code == 200
    assert stand.engine_requests(talk.id) == [], "the prompt was made first"
    assert call.result().status_code == 200


def test_a_second_chat_meanwhile_is_busy_and_a_marked_one_joins(stand: Stand) -> None:
    talk = stand.talk()
    call = begin_slowly(stand, talk, headers={"idempotency-key": "k"})
    assert error_of(talk.chat([user("Other")])) == (409, "session_busy")
    joined = talk.chat([user(SLOW)], headers={"idempotency-key": "k"})
    assert joined.content == call.result().content
    assert (talk.generations(), len(talk.committed())) == (1, 1)


def test_a_client_that_leaves_meanwhile_ends_the_turn_before_the_engine_hears_of_it(stand: Stand) -> None:
    talk = stand.talk()
    body = {"model": "simulator", "messages": [user(SLOW)]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(stand.server.base_url + talk.chat_path, json=body, timeout=0.4)
    until(lambda: talk.types()[-1] == "TurnAbandoned")
    assert talk.events()[-1]["reason"] == "disconnect"
    assert stand.sim.get("/sim/requests", params={"last": 9}).json() == []
    talk.say("Something else")
    assert [one["body"]["messages"] for one in stand.engine_requests(talk.id)] == [talk.messages[:1]]
    require_consistent(stand, talk)
