"""What of a request no engine is sent is told in the reply, in a retry's, and in the log; the rest goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from integration.places import Places
from integration.stand import SPOKEN, Stand, error_of, tool_of, user
from integration.tito import checked, tokenizer_folder
from ops.simulator.process import SimulatorProcess

TOLD = "x-turnlog-left-out"
SERVERS = {
    "chat": {"type": "web_search"},
    "messages": {"type": "web_search_20250305", "name": "web_search"},
    "responses": {"type": "web_search"},
}
FORCED: dict[str, Any] = {
    "chat": {"type": "web_search"},
    "messages": {"type": "tool", "name": "web_search"},
    "responses": {"type": "web_search"},
}
LEFT_OUT = ["server_tool:tools[1]"]


@pytest.mark.parametrize("protocol", SPOKEN)
def test_a_servers_tool_is_left_out_of_the_prompt_and_told(stand: Stand, protocol: str) -> None:
    talk = stand.talk(protocol)
    key = {"idempotency-key": "once"}
    fields: dict[str, Any] = {
        "tools": [tool_of(protocol), SERVERS[protocol]],
        "sim": {"tool_calls": False},
    }
    first = talk.chat([user("Hello")], headers=key, **fields)
    again = talk.chat([user("Hello")], headers=key, **fields)
    streamed = talk.chat([user("Hello")], headers=key, stream=True, **fields)
    assert [one.headers[TOLD] for one in (first, again, streamed)] == [", ".join(LEFT_OUT)] * 3
    assert again.headers["x-turnlog-replayed"] == "true"
    [sent] = stand.engine_requests(talk.id)
    assert [one["function"]["name"] for one in sent["body"]["tools"]] == ["look"]

    plain = talk.chat([user("Other")], tools=[tool_of(protocol)], sim={"tool_calls": False})
    assert TOLD not in plain.headers
    alone = stand.talk(protocol)
    alone.say("Hello", tools=[SERVERS[protocol]])
    assert "tools" not in stand.engine_requests(alone.id)[-1]["body"]
    assert alone.committed()[0]["left_out"] == ["server_tool:tools[0]"]
    assert alone.state()["records"][0]["left_out"] == ["server_tool:tools[0]"]
    assert alone.tree()["turns"][0]["left_out"] == ["server_tool:tools[0]"]

    forced = talk.chat([user("Hello")], tool_choice=FORCED[protocol], **fields)
    assert error_of(forced) == (400, "unsupported")


def deaf(template: str) -> str:
    """Renders no message of a developer."""
    old = "{%- for message in messages -%}"
    assert old in template
    return template.replace(old, "{%- for message in messages if message.role != 'developer' -%}")


@pytest.fixture
def deaf_stand(sglang: SimulatorProcess, tmp_path: Path, places: Places) -> Any:
    pytest.importorskip("transformers")
    environment = {"TURNLOG_TOKENIZER": str(tokenizer_folder(tmp_path / "deaf", deaf))}
    with checked(places.new("deaf"), sglang.base_url, environment=environment) as made:
        yield made


def test_a_message_that_the_template_renders_as_nothing_is_told(deaf_stand: Stand) -> None:
    talk = deaf_stand.talk()
    key = {"idempotency-key": "once"}
    rule = {"role": "developer", "content": "Be brief"}
    sent = [{"role": "system", "content": "S"}, rule, user("Hello")]
    replies = [talk.chat(sent, headers=key) for _ in range(2)]
    assert [one.headers[TOLD] for one in replies] == ["silent_message:messages[1]"] * 2
    assert talk.committed()[0]["left_out"] == ["silent_message:messages[1]"]
    talk.messages = [*sent, *talk.spoken.added(replies[0].json())]
    assert TOLD not in talk.say("On").headers
    assert talk.add(rule, user("And on")).headers[TOLD] == "silent_message:messages[6]"
    assert talk.add({"role": "system", "content": "Late"}, user("Still")).headers.get(TOLD) is None


def test_another_prompt_is_refused_by_name_where_the_server_builds_it(tito: Stand) -> None:
    talk = tito.talk()
    fields: dict[str, list[Any]] = {
        "add_generation_prompt": [False, True, None],
        "chat_template": ["{{ messages }}", None],
        "documents": [[{"text": "x"}], [], None],
    }
    for name, (refused, *accepted) in fields.items():
        response = talk.chat([user("Hello")], **{name: refused})
        assert error_of(response) == (400, "unsupported")
        assert response.json()["error"]["message"].startswith(name)
        for value in accepted:
            talk.say("Hello", **{name: value})


def test_a_stream_that_has_begun_is_told_by_a_comment(stand: Stand, sglang: SimulatorProcess, places: Places) -> None:
    environment = {"TURNLOG_STREAM_KEEPALIVE_S": "0.05"}
    with checked(places.new("impatient"), sglang.base_url, environment=environment) as impatient:
        talk = impatient.talk("responses")
        response = talk.chat([user("Hello")], stream=True, tools=[SERVERS["responses"]], sim={"latency_s": 0.5})
    assert TOLD not in response.headers
    assert f": {TOLD}: server_tool:tools[0]\n" in response.text
