"""A session at two processes on one PostgreSQL: what one has acknowledged the other answers for."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import httpx
import pytest
from integration.stand import Talk, error_of, held, until, user

from fleet.stands import Fleet

RETRY = {"x-stainless-retry-count": "1"}


# what one process has acknowledged, the other refuses to nobody


def previous_response(here: Talk, there: Talk) -> httpx.Response:
    answer = there.say("More").json()
    return here.chat([user("And?")], previous_response_id=answer["id"])


def item_reference(here: Talk, there: Talk) -> httpx.Response:
    there.say("More", sim={"tool_calls": False})
    item = there.messages[-1]
    return here.chat([*there.messages[:-1], {"type": "item_reference", "id": item["id"]}, user("And?")])


def read_response(here: Talk, there: Talk) -> httpx.Response:
    answer = there.say("More").json()
    return here._stand.http.get(f"{here.chat_path}/{answer['id']}")


def read_input_items(here: Talk, there: Talk) -> httpx.Response:
    answer = there.say("More").json()
    return here._stand.http.get(f"{here.chat_path}/{answer['id']}/input_items")


def continued(here: Talk, there: Talk) -> httpx.Response:
    there.say("More")
    return here.chat([*there.messages, user("And?")])


def rolled_back(here: Talk, there: Talk) -> httpx.Response:
    """It goes back one turn from what there is, and two from what the process knows."""
    before = there.messages
    there.say("More")
    there.say("Instead", headers={"idempotency-key": "instead"})
    return here.chat([*before, user("More"), there.messages[-3], user("Other")])


def forked(here: Talk, there: Talk) -> httpx.Response:
    turn = int(there.say("More").headers["x-turnlog-turn"])
    return here._stand.http.post(f"{here.path}/fork", json={"turn": turn})


def rewarded(here: Talk, there: Talk) -> httpx.Response:
    turn = int(there.say("More").headers["x-turnlog-turn"])
    return here._stand.http.put(f"{here.path}/reward", json={"reward": 1.0, "turn": turn})


def _checkpoint(talk: Talk) -> str:
    name = f"of-{talk.id}"
    assert talk._stand.http.post("/checkpoints", json={"name": name}).status_code in (200, 201)
    return name


def _restore(talk: Talk, name: str) -> None:
    response = talk._stand.http.post(f"/checkpoints/{name}/restore")
    assert response.status_code == 200, response.text


def reopened(here: Talk, there: Talk) -> httpx.Response:
    """This process has seen it closed; the store was taken back to before that."""
    name = _checkpoint(there)
    assert there._stand.http.delete(there.path).status_code == 204
    assert error_of(here.chat(here.messages)) == (404, "session_closed")
    _restore(there, name)
    return here.chat([*there.messages, user("And?")])


def given_back(here: Talk, there: Talk) -> httpx.Response:
    """This process knows a turn to be undone that was given back since."""
    before = _checkpoint(there)
    there.say("More")
    after = f"{before}-after"
    assert there._stand.http.post("/checkpoints", json={"name": after}).status_code in (200, 201)
    _restore(there, before)
    assert error_of(here.chat([*there.messages, user("And?")])) == (409, "restored")
    _restore(there, after)
    return here.chat([*there.messages, user("And?")])


def key_undone(here: Talk, there: Talk) -> httpx.Response:
    """This process knows the key of a turn that was undone since."""
    name = _checkpoint(there)
    key = {"idempotency-key": "once"}
    assert here.chat([*there.messages, user("More")], headers=key).status_code == 200
    _restore(there, name)
    return here.chat([*there.messages, user("Other")], headers=key)


def taken_back(here: Talk, there: Talk) -> httpx.Response:
    """This process knows more turns than there are since the store was taken back."""
    name = _checkpoint(there)
    assert here.chat([*there.messages, user("More")]).status_code == 200
    _restore(there, name)
    return here.chat([*there.messages, user("Other")])


Case = Callable[[Talk, Talk], httpx.Response]

NEGATIVES: dict[Case, str] = {
    **dict.fromkeys((previous_response, item_reference, read_response, read_input_items), "responses"),
    **dict.fromkeys((continued, rolled_back, forked, rewarded, reopened, given_back, key_undone, taken_back), "chat"),
}


@pytest.mark.parametrize("history", ["linear", "tree"])
@pytest.mark.parametrize("case", NEGATIVES, ids=lambda case: case.__name__)
def test_no_process_refuses_what_another_has_acknowledged(fleet: Fleet, case: Case, history: str) -> None:
    first, second = fleet.apis
    there = first.talk(NEGATIVES[case], history=history)
    there.say("Hello")
    here = second.known(there.id, there.protocol)
    here.messages = there.messages
    # It has the session in its cache from here on.
    assert here.chat(here.messages[:1], headers=RETRY).status_code == 200
    response = case(here, there)
    assert response.status_code == 200, response.text


def test_a_reply_is_known_by_its_calls_at_another_process(fleet: Fleet) -> None:
    """Claude Code sends other arguments back than it got: a process that has not seen the turn must not branch off."""
    first, second = fleet.apis
    there = first.talk("messages", history="tree")
    there.say("Hello")
    here = second.known(there.id, there.protocol)
    assert here.chat(there.messages[:1], headers=RETRY).status_code == 200
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    there.say("Weather?", tools=[tool], sim={"tool_calls": True})
    calls = [block for block in there.messages[-1]["content"] if block["type"] == "tool_use"]
    for call in calls:
        call["input"] = {"trimmed": True}
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "Rain"} for call in calls]
    response = here.chat([*there.messages, {"role": "user", "content": results}], tools=[tool])
    assert response.status_code == 200, response.text
    told = [event.get("branch_cause") for event in there.committed()]
    assert told == ["start", "drift", None], "the tools are new in the second turn"


# a marked retry at the other process, while the first still generates


@pytest.mark.parametrize("history", ["linear", "tree"])
def test_a_marked_retry_waits_for_the_turn_at_another_process(fleet: Fleet, history: str) -> None:
    """Also where the process of the retry has not heard of the turn."""
    first, second = fleet.apis
    there = first.talk(history=history)
    there.say("Hello")
    here = second.known(there.id)
    assert here.chat(there.messages[:1], headers=RETRY).status_code == 200
    sent = [*there.messages, user("Slow")]
    call = fleet.meanwhile(there.chat, sent, sim={"latency_s": 1.0})
    until(lambda: len(fleet.chats(there.id)) == 2)
    again = here.chat(sent, headers=RETRY, sim={"latency_s": 1.0})
    assert again.status_code == 200, again.text
    assert again.content == call.result().content
    assert len(fleet.chats(there.id)) == 2
    _is_in_the_loss_once(there)


def test_a_marked_retry_of_another_agent_does_not_wait(fleet: Fleet) -> None:
    first, second = fleet.apis
    talk = first.talk(history="tree")
    sent = [user("Slow")]
    with held(*(engine.sim for engine in fleet.engines)):
        call = fleet.meanwhile(talk.chat, sent)
        until(lambda: len(fleet.chats(talk.id)) == 1)
        other = fleet.meanwhile(second.known(talk.id).chat, sent, headers={**RETRY, "x-turnlog-agent-id": "b"})
        until(lambda: len(fleet.chats(talk.id)) == 2)
    assert other.result().status_code == 200
    assert call.result().content != other.result().content


def _is_in_the_loss_once(talk: Talk) -> None:
    """Each committed turn's tokens."""
    [row] = talk.rows(branches="all")
    assert [span["turn"] for span in row["turns"]] == [event["turn"] for event in talk.committed()]
    assert sum(row["loss_mask"]) == sum(event["output_tokens"] for event in talk.committed())


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


def test_two_processes_begin_one_name_of_a_run(fleet: Fleet) -> None:
    """By headers and a creation at one moment, in two runs: a session each, and a generation after each end."""
    name = uuid.uuid4().hex
    body = {"model": "simulator", "messages": [user("Hello")]}

    def turn(at: int, run: str) -> str:
        headers = {"x-session-id": name, "x-turnlog-run": run}
        reply = fleet.apis[at].http.post("/v1/chat/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return str(reply.headers.get("x-turnlog-session-id", name))

    def created(at: int, run: str) -> str:
        reply = fleet.apis[at].http.post("/sessions", json={"session_id": name, "run": run, "history": "tree"})
        return str(reply.json()["session_id"] if reply.status_code == 200 else error_of(reply))

    every: dict[str, list[str]] = {"exp-1": [], "exp-2": []}
    for number in (1, 2):
        calls = {
            run: [fleet.meanwhile(way, at, run) for at in (0, 1) for way in (turn, turn, created)[: 4 - number]]
            for run in every
        }
        for run, ids in every.items():
            told = {call.result() for call in calls[run]} - {str((409, "session_exists"))}
            assert len(told) == 1, told
            ids += told
        for at, run in enumerate(every):
            ended = fleet.apis[at].http.post(
                "/finish_session", params={"session_id": name}, headers={"x-turnlog-run": run}
            )
            assert (ended.json()["session_id"], ended.json()["generation"]) == (every[run][-1], number)
    assert len({*every["exp-1"], *every["exp-2"]}) == 4
    for api in fleet.apis:
        listed = api.get("/sessions", name=name)["sessions"]
        assert sorted((one["run"], one["generation"]) for one in listed) == [
            (run, number) for run in every for number in (1, 2)
        ]
