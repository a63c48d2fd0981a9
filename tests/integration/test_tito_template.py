"""A chat template with arguments, refusals and moods of its own: what is honoured, what is refused, what is slow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from integration.places import Places
from integration.stand import Stand, error_of, until, user
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


@pytest.mark.parametrize("arguments", [{"tokenize": True}, {"clear_thinking": True}, [], "x"])
def test_arguments_that_are_not_a_clients_are_400(stand: Stand, arguments: Any) -> None:
    talk = stand.talk()
    assert error_of(talk.chat([user("Hello")], chat_template_kwargs=arguments)) == (400, "invalid_request")
    assert talk.generations() == 0
    talk.say("Hello", chat_template_kwargs=None)
    talk.say("Hello", chat_template_kwargs={"clear_thinking": False})


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
