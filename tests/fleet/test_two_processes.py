"""A session goes on at another process and stays with its engine."""

from __future__ import annotations

import pytest

from fleet.stands import Fleet


def test_a_session_keeps_its_engine_at_both_processes(fleet: Fleet) -> None:
    first, second = fleet.apis
    talk = first.talk()
    talk.say("Hello")
    other = second.known(talk.id)
    other.messages = talk.messages
    other.say("And then?")
    engines = {url for url, _ in fleet.chats(talk.id)}
    assert len(engines) == 1
    bound = [event for event in talk.events() if event["type"] == "AffinityBound"]
    assert [event["engine"] for event in bound] == list(engines)


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize(
    ("reply", "returned"), [("<think>hm</think>Hi", [{"role": "assistant", "content": "Hi"}]), ("", [])]
)
def test_a_reply_comes_back_otherwise_to_a_process_that_has_not_seen_it(
    fleet: Fleet, history: str, reply: str, returned: list[dict[str, str]]
) -> None:
    talks = [fleet.apis[0].talk(history=history)]
    talks.append(fleet.apis[1].known(talks[0].id))
    sent: list[dict[str, str]] = []
    for number in range(5):
        sent.append({"role": "user", "content": f"{number}"})
        response = talks[number % 2].chat(sent, sim={"text": reply})
        assert response.status_code == 200, response.text
        sent += returned
    assert [event["parent"] for event in talks[0].committed()] == [0, 1, 2, 3, 4]
    assert {event["branch"] for event in talks[0].committed()} == {0}
