"""Long requests whose beginning a session's cache knows are taken, repeated, rolled back and refused as short ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from app.domain.known_body import LONG_BODY
from integration.stand import Stand, Talk, error_of, user

LONG = "a long [task], {with} signs; " * (LONG_BODY // 20)


def send(
    stand: Stand, talk: Talk, body: str | bytes, headers: Mapping[str, str] = MappingProxyType({})
) -> httpx.Response:
    return stand.http.post(talk.chat_path, content=body, headers={"content-type": "application/json", **headers})


def compact(messages: list[dict[str, Any]], **fields: Any) -> str:
    return json.dumps({"model": "m", "messages": messages, **fields}, separators=(",", ":"))


def replied(reply: httpx.Response) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    message: dict[str, Any] = reply.json()["choices"][0]["message"]
    return message


def long_talk(stand: Stand, turns: int = 3, **session: Any) -> tuple[Talk, list[dict[str, Any]]]:
    """A session after some turns, and the messages of the next request but its question."""
    talk = stand.talk(**session)
    messages = [{"role": "system", "content": LONG}]
    for place in range(turns):
        messages.append(user(f"question {place}"))
        messages.append(replied(send(stand, talk, compact(messages))))
    return talk, messages


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_turns_whose_history_is_known(stand: Stand, history: str) -> None:
    """The engine gets, and the log keeps, what the client sent, however it is spelled."""
    talk, messages = long_talk(stand, history=history)
    asked = [*messages, user("last")]
    for fields in ({}, {"temperature": 0.5}, {"stop": ["x"]}):
        body = compact(asked, **fields)
        message = replied(send(stand, talk, body))
        sent = stand.engine_requests(talk.id)[-1]["body"]
        assert sent["messages"] == asked
        assert {name: sent[name] for name in fields} == fields
        asked = [*asked, message, user("more")]
    spelled = json.dumps({"messages": asked, "model": "m"}, indent=1)
    replied(send(stand, talk, spelled))
    assert stand.engine_requests(talk.id)[-1]["body"]["messages"] == asked
    assert [turn["base_messages"] for turn in talk.committed()] == [0, 3, 5, 7, 9, 11, 13]
    rows = talk.rows()
    assert len(rows[-1]["messages"]) == len(asked) + 1
    assert sum(sum(row["loss_mask"]) for row in rows) == sum(turn["output_tokens"] for turn in talk.committed())


REFUSED = {
    "no end": lambda body: body[:-1],
    "more behind the end": lambda body: body + b"}",
    "a comma at the end": lambda body: body.replace(b"}]}", b"},]}"),
    "two commas": lambda body: body.replace(
        b',{"role":"user","content":"last"}', b',,{"role":"user","content":"last"}'
    ),
    "no role": lambda body: body.replace(b'"role":"user","content":"last"', b'"content":"last"'),
    "no object": lambda body: body.replace(b'{"role":"user","content":"last"}', b"5"),
    "not UTF-8": lambda body: body.replace(b'"last"', b'"\xff"'),
    "too deep": lambda body: body.replace(b'"last"', b"[" * 150 + b"]" * 150),
    "two lists": lambda body: body[:-1] + b',"messages":[]}',
    "an invalid parameter": lambda body: body[:-1] + b',"stream":1}',
    "a number out of range": lambda body: body.replace(b'"last"', b"1e999"),
}


def test_what_follows_a_known_history_is_checked(stand: Stand) -> None:
    """The same refusal as in a session that knows nothing of the request."""
    talk, messages = long_talk(stand, turns=1)
    other, asked = stand.talk(), compact([*messages, user("last")]).encode()
    for name, spoiled in REFUSED.items():
        refused, unknown = send(stand, talk, spoiled(asked)), send(stand, other, spoiled(asked))
        assert error_of(refused) == error_of(unknown), name
        assert refused.status_code == 400, name
        assert refused.json()["error"]["message"] == unknown.json()["error"]["message"], name
    replied(send(stand, talk, asked))
