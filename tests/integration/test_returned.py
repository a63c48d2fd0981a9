"""Replies that come back in another spelling, or not at all, continue their row: over a restart, in each protocol."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from integration.places import Places
from integration.stand import Message, Stand, Talk, standing, user
from integration.tito import require_consistent, require_sound

OPENED = "<think>\nhm\n</think>\n\nHi there"
CLOSED_ALONE = "hm\n</think>\n\nHi there"
SILENT = ""
ONLY_REASONING = "<think>hm"


def chat(**fields: Any) -> list[Message]:
    return [{"role": "assistant", **fields}]


def blocks(*content: Message) -> list[Message]:
    return [{"role": "assistant", "content": list(content)}]


def said(text: str) -> Message:
    return {"type": "text", "text": text}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}
REASONED = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def item(text: str) -> Message:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


class Case(NamedTuple):
    """What the engine says, and what the client makes of it in the next request."""

    protocol: str
    reply: str
    returned: list[Message]


CASES: Mapping[str, Case] = {
    "stripped": Case("chat", OPENED, chat(content="Hi there")),
    "moved": Case("chat", OPENED, chat(content="Hi there", reasoning_content="hm")),
    "moved to reasoning": Case("chat", OPENED, chat(content="Hi there", reasoning="hm")),
    "more line breaks": Case("chat", OPENED, chat(content="<think>\n\nhm\n\n</think>\n\n\nHi there")),
    "parts": Case("chat", OPENED, chat(content=[{"type": "thinking", "thinking": "hm"}, said("Hi there")])),
    "closing tag": Case("chat", CLOSED_ALONE, chat(content="Hi there")),
    "closing tag, opened": Case("chat", CLOSED_ALONE, chat(content="<think>\nhm\n</think>\n\nHi there")),
    "a thinking block": Case("messages", OPENED, blocks(THOUGHT, said("Hi there"))),
    "a text block": Case("messages", CLOSED_ALONE, blocks(said("Hi there"))),
    "a reasoning item": Case("responses", OPENED, [REASONED, item("Hi there")]),
    "a message item": Case("responses", CLOSED_ALONE, [item("Hi there")]),
    "empty": Case("chat", SILENT, []),
    "empty, kept": Case("chat", SILENT, chat(content=None)),
    "reasoning alone": Case("chat", ONLY_REASONING, []),
    "reasoning alone, moved": Case("chat", ONLY_REASONING, chat(content="", reasoning_content="hm")),
    "empty message, kept": Case("messages", SILENT, blocks()),
    "empty response": Case("responses", SILENT, []),
}


@pytest.fixture(scope="module", params=["capture", "tito"])
def own(request: pytest.FixtureRequest, places: Places) -> Iterator[Stand]:
    environment = {"TURNLOG_TOKENIZER": request.getfixturevalue("tokenizer")} if request.param == "tito" else {}
    with standing(places.new("returned"), "--seed", "5", environment=environment) as made:
        yield made
        require_sound(made)


def go_on(talk: Talk, case: Case, text: str) -> None:
    """A turn; the client keeps what it makes of the reply."""
    sent = [*talk.messages, user(text)]
    response = talk.chat(sent, sim={"text": case.reply})
    assert response.status_code == 200, response.text
    talk.messages = [*sent, *case.returned]


@pytest.mark.long
def test_a_reply_continues_its_row_however_it_comes_back(own: Stand) -> None:
    talks: list[tuple[str, Case, Talk]] = [
        (f"{name}, {history}", case, own.talk(case.protocol, history=history))
        for name, case in CASES.items()
        for history in ("linear", "tree")
    ]
    for text in ("One", "Two", "Three"):
        for _, case, talk in talks:
            go_on(talk, case, text)
        if text != "Three":
            own.server.kill()
            own.server.start()
    for name, case, talk in talks:
        committed = talk.committed()
        assert [event["parent"] for event in committed] == [0, 1, 2], name
        assert [event["branch"] for event in committed] == [0, 0, 0], name
        assert [event["new_messages"] for event in committed] == [1, 1, 1], name
        assert "RolledBack" not in talk.types(), name
        rows = talk.rows()
        assert len(rows) == 1, name
        assert [message["content"] for message in rows[0]["messages"]][1::2] == [case.reply] * 3, name
        sent = own.engine_requests(talk.id)[-1]["body"]["messages"]
        assert [message["content"] for message in sent if message["role"] == "assistant"] == [case.reply] * 2, name
        if committed[0].get("sent_ids"):
            require_consistent(own, talk)
