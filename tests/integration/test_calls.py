"""Calls that come back otherwise than the engine sampled them: by their ids, and by arguments that are no object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from integration.stand import SPOKEN, Message, Stand, Talk, tool_of, user

HISTORIES = ("linear", "tree")


PLAIN = {"tool_calls": False, "reasoning": False, "text": "Done."}
IN_EACH_PROTOCOL = pytest.mark.parametrize(
    ("protocol", "history"), [("chat", "linear"), ("messages", "tree"), ("responses", "tree")]
)

BAD_ARGUMENTS = ('{"cmd": "echo', "[1]", "null", '{"cmd": "a\tb"}', "", '{"a": NaN}', '{"a": "\\ud800"}')
SENT = {'{"cmd": "a\tb"}': '{"cmd":"a\\tb"}', '{"a": NaN}': '{"a":null}', '{"a": "\\ud800"}': '{"a":"\ufffd"}'}
"""What an engine is sent where that is not `{}`."""


def calling(*arguments: str, ids: list[str | int | None] | None = None) -> dict[str, Any]:
    calls = [{"name": "Bash", "arguments": text} for text in arguments]
    return {"calls": calls, "call_ids": ids or [], "reasoning": False, "text": ""}


def called(protocol: str, reply: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The calls of a reply as the protocol has them."""
    if protocol == "chat":
        return list(reply["choices"][0]["message"].get("tool_calls") or ())
    blocks = reply["content"] if protocol == "messages" else reply["output"]
    return [block for block in blocks if block["type"] in ("tool_use", "function_call")]


def tools(protocol: str) -> list[dict[str, Any]]:
    return [tool_of(protocol, "Bash", "cmd", "string")]


ID = {"chat": "id", "messages": "id", "responses": "call_id"}


def ids_of(protocol: str, reply: Mapping[str, Any]) -> list[Any]:
    return [call[ID[protocol]] for call in called(protocol, reply)]


def results(protocol: str, ids: list[Any], texts: list[str] | None = None) -> list[Message]:
    pairs = list(zip(ids, texts or [f"Result {number}" for number in range(len(ids))], strict=True))
    if protocol == "chat":
        return [{"role": "tool", "tool_call_id": call_id, "content": text} for call_id, text in pairs]
    if protocol == "responses":
        return [{"type": "function_call_output", "call_id": call_id, "output": text} for call_id, text in pairs]
    blocks = [{"type": "tool_result", "tool_use_id": call_id, "content": text} for call_id, text in pairs]
    return [{"role": "user", "content": blocks}]


def with_arguments(protocol: str, history: list[Message], text: str) -> list[Message]:
    """The history with these arguments in every call: what harnesses put in place of those that they cannot read."""

    def changed(value: Any) -> Any:
        if isinstance(value, list):
            return [changed(item) for item in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "tool_use":
            return {**value, "input": json.loads(text)}
        return {key: text if key == "arguments" else changed(item) for key, item in value.items()}

    found: list[Message] = changed(history)
    return found


def ask(talk: Talk, sim: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = talk.chat(talk.messages, tools=tools(talk.protocol), sim=sim, headers=headers)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    talk.messages = [*talk.messages, *talk.spoken.added(reply)]
    return reply


def engine_messages(stand: Stand, talk: Talk) -> list[Message]:
    """Those of the session's newest request."""
    found: list[Message] = stand.engine_requests(talk.id)[-1]["body"]["messages"]
    return found


def require_one_line(talk: Talk, turns: int) -> None:
    """Each turn continues the one before it, `drift` where the engine's prompt is another than the stored tokens."""
    tree = talk.tree()["turns"]
    assert [(turn["turn"], turn["parent"]) for turn in tree] == [(number, number - 1) for number in range(1, turns + 1)]
    assert {turn["cause"] for turn in tree} <= {"start", None, "drift"}


@IN_EACH_PROTOCOL
def test_arguments_that_are_no_object_end_no_session(stand: Stand, protocol: str, history: str) -> None:
    """Each of them comes back in each of three ways, in one protocol or another."""
    returns = ["as it was", "{}", "INVALID_JSON"] * len(BAD_ARGUMENTS)
    for arguments, returned in zip(BAD_ARGUMENTS, returns[list(SPOKEN).index(protocol) :], strict=False):
        talk = stand.talk(protocol, history=history)
        talk.messages = [user("Go")]
        first = ask(talk, calling(arguments))
        if returned != "as it was":
            other = "{}" if returned == "{}" else json.dumps({"INVALID_JSON": arguments})
            talk.messages = with_arguments(protocol, talk.messages, other)
        talk.messages += results(protocol, ids_of(protocol, first))
        ask(talk, PLAIN)
        talk.messages.append(user("And?"))
        ask(talk, PLAIN)
        require_one_line(talk, 3)
        [record, *_] = records = talk.state()["records"]
        [generated] = record["response"]["choices"][0]["message"]["tool_calls"]
        assert generated["function"]["arguments"] == arguments
        for sent in (engine_messages(stand, talk), records[-1]["request"]["messages"]):
            [call] = sent[1]["tool_calls"]
            assert call["function"]["arguments"] == SENT.get(arguments, "{}")
        assert all(turn["cause"] != "drift" for turn in talk.tree()["turns"][2:])


def test_both_kinds_are_known_after_a_kill(mortal: Stand) -> None:
    """And a reply that is given again behind it has the ids that it had."""
    talks = [mortal.talk(protocol, history="linear" if protocol == "chat" else "tree") for protocol in SPOKEN]
    sims = [calling('{"cmd": "echo', "{}", ids=["", ""]), calling("[1]", ids=[None])]
    for talk in talks:
        talk.messages = [user("Go")]
    key, twice = {"idempotency-key": "k"}, calling("{}", "{}", ids=["", "functions.Bash:0"])
    once = [
        (
            mortal.talk(protocol, history="tree"),
            {"tools": tools(protocol), "sim": twice, "stream": protocol != "messages"},
        )
        for protocol in SPOKEN
    ]
    given = [talk.chat([user("Go")], headers=key, **fields) for talk, fields in once]
    for sim in sims:
        for talk in talks:
            reply = ask(talk, sim)
            if sim is sims[0]:  # What came second goes back as it was.
                talk.messages = with_arguments(talk.protocol, talk.messages, "{}")
            talk.messages += results(talk.protocol, ids_of(talk.protocol, reply))
        mortal.server.kill()
        mortal.server.start()
    for talk in talks:
        ask(talk, PLAIN)
        require_one_line(talk, 3)
        sent = engine_messages(mortal, talk)
        assert [message.get("tool_call_id") for message in sent if message["role"] == "tool"] == ["", "", None]
        assert [[call.get("id") for call in message["tool_calls"]] for message in sent if "tool_calls" in message] == [
            ["", ""],
            [None],
        ]
    for (talk, fields), first in zip(once, given, strict=True):
        again = talk.chat([user("Go")], headers=key, **fields)
        assert (again.headers["x-turnlog-replayed"], again.content) == ("true", first.content)
        assert (b"toolu_" if talk.protocol == "messages" else b"call_") in first.content


ODD_IDS: dict[str, list[list[str | int | None]]] = {
    "empty": [["", ""], [""]],
    "null": [[None, None], [None]],
    "a number": [[7, 8], [7]],
    "repeated in a reply": [["a", "a"], ["b"]],
    "repeated in a later reply": [["call_0", "call_1"], ["call_0"]],
    "Kimi's": [["functions.Bash:0", "functions.Bash:1"], ["functions.Bash:0"]],
}


@pytest.mark.parametrize("ids", ODD_IDS)
@IN_EACH_PROTOCOL
def test_a_client_gets_ids_that_it_can_use_and_the_engine_its_own(
    stand: Stand, protocol: str, history: str, ids: str
) -> None:
    talk, given = stand.talk(protocol, history=history), ODD_IDS[ids]
    talk.messages = [user("Go")]
    replies = []
    for row in given:
        replies.append(ask(talk, calling(*["{}"] * len(row), ids=row)))
        talk.messages += results(protocol, ids_of(protocol, replies[-1]))
    ask(talk, PLAIN)
    require_one_line(talk, 3)
    assert len(talk.rows()) == 1
    found = [call_id for reply in replies for call_id in ids_of(protocol, reply)]
    assert all(isinstance(call_id, str) and call_id for call_id in found)
    if protocol == "chat":
        assert all(len(set(ids_of("chat", reply))) == len(ids_of("chat", reply)) for reply in replies)
        kept = ids in ("Kimi's", "repeated in a later reply")
        assert not kept or [ids_of("chat", reply) for reply in replies] == given
    else:
        assert len(set(found)) == len(found)
        assert all(set(call_id) <= ALPHABET for call_id in found)
    sent = engine_messages(stand, talk)
    assert [[call.get("id") for call in one["tool_calls"]] for one in sent if "tool_calls" in one] == given
    answered = [message.get("tool_call_id") for message in sent if message["role"] == "tool"]
    assert answered == [call_id for row in given for call_id in row]


ALPHABET = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-")


@pytest.mark.parametrize("second", SPOKEN)
@pytest.mark.parametrize("first", SPOKEN)
def test_ids_are_known_in_every_protocol(stand: Stand, first: str, second: str) -> None:
    """A session goes on in another protocol, whose client holds what the first one was given."""
    talk = stand.talk(first, history="tree")
    talk.messages = [user("Go")]
    given = ids_of(first, ask(talk, calling("{}", "[1]", ids=["", "functions.Bash:0"])))
    other = stand.known(talk.id, second)
    named = {"name": "Bash", "arguments": "{}"}
    other.messages = {
        "chat": [
            {"role": "assistant", "tool_calls": [{"id": i, "type": "function", "function": named} for i in given]}
        ],
        "messages": [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": i, "name": "Bash", "input": {}} for i in given],
            }
        ]
        if second == "messages"
        else [],
        "responses": [{"type": "function_call", "call_id": i, **named} for i in given],
    }[second]
    other.messages = [user("Go"), *other.messages, *results(second, given)]
    ask(other, PLAIN)
    require_one_line(talk, 2)
    sent = engine_messages(stand, talk)
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == ["", "functions.Bash:0"]


def test_a_reply_that_is_carried_into_another_conversation_is_known_there(stand: Stand) -> None:
    """After a compaction, and the engine is sent its own ids."""
    for protocol in SPOKEN:
        talk = stand.talk(protocol, history="tree")
        talk.messages = [user("Go")]
        given = ids_of(protocol, ask(talk, calling('{"cmd": "echo', ids=[""])))
        [made] = talk.messages[1:]
        made = with_arguments(protocol, [made], "{}")
        talk.messages = [user("So far: a summary"), *made, *results(protocol, given)]
        ask(talk, PLAIN)
        assert [(turn["parent"], turn["cause"], turn["carries"]) for turn in talk.tree()["turns"]] == [
            (0, "start", None),
            (0, "compaction", 1),
        ]
        [call, result] = [message for message in engine_messages(stand, talk) if message["role"] != "user"]
        assert (call["tool_calls"][0]["id"], result["tool_call_id"]) == ("", "")


@pytest.mark.parametrize("ids", ["empty", "a number", "repeated in a reply"])
def test_a_live_stream_has_the_ids_of_the_whole_reply(vllm_stand: Stand, ids: str) -> None:
    talk = vllm_stand.talk(stream_mode="live")
    sim = calling("{}", "{}", ids=ODD_IDS[ids][0])
    response = talk.chat([user("Go")], tools=tools("chat"), sim=sim, stream=True)
    assert response.headers["x-turnlog-stream-mode"] == "live"
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    pieces = [call for chunk in chunks for one in chunk["choices"] for call in one["delta"].get("tool_calls") or ()]
    given = [piece["id"] for piece in pieces if "id" in piece]
    assert len(set(given)) == 2
    assert all(given)
    made = [{"id": i, "type": "function", "function": {"name": "Bash", "arguments": "{}"}} for i in given]
    talk.messages = [user("Go"), {"role": "assistant", "content": None, "tool_calls": made}, *results("chat", given)]
    ask(talk, PLAIN)
    require_one_line(talk, 2)
    sent = engine_messages(vllm_stand, talk)
    assert [one.get("tool_call_id") for one in sent if one["role"] == "tool"] == ODD_IDS[ids][0]


@pytest.mark.parametrize("history", HISTORIES)
def test_litellm_spells_ids_with_underscores(stand: Stand, history: str) -> None:
    talk = stand.talk(history=history)
    talk.messages = [user("Go")]
    for number in range(3):
        ask(talk, calling("{}", ids=[f"functions.Bash:{number}"]))
        [call] = talk.messages[-1]["tool_calls"]
        assert call["id"] == f"functions.Bash:{number}"
        call["id"] = f"functions_Bash_{number}"
        talk.messages += results("chat", [f"functions_Bash_{number}"])
    ask(talk, PLAIN)
    require_one_line(talk, 4)
    assert len(talk.rows()) == 1
    sent = engine_messages(stand, talk)
    assert [message["tool_call_id"] for message in sent if message["role"] == "tool"] == [
        f"functions.Bash:{number}" for number in range(3)
    ]


@pytest.mark.parametrize("history", HISTORIES)
def test_langchain_puts_calls_that_it_cannot_read_behind_the_others(stand: Stand, history: str) -> None:
    talk = stand.talk(history=history)
    talk.messages = [user("Go")]
    given = ids_of("chat", ask(talk, calling('{"cmd": "echo', "{}")))
    talk.messages[-1]["tool_calls"].reverse()
    talk.messages += results("chat", given)
    ask(talk, PLAIN)
    require_one_line(talk, 2)
