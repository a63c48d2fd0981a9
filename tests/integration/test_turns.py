"""One turn: its order of refusals, its claim, and how a history joins the session."""

from __future__ import annotations

import json

from integration.stand import CHAT, FIRST_TURN, HOURS, LATER_TURN, Stand, error_of, until, user

SLOW = {"latency_s": HOURS}
"""A generation that ends when the test says so."""


def test_a_turn_commits_and_its_reply_is_the_engines(stand: Stand) -> None:
    talk = stand.talk()
    response = talk.say("Hello")
    assert response.json()["choices"][0]["meta_info"]["output_token_logprobs"]
    assert response.headers["x-turnlog-turn"] == "1"
    assert talk.types() == ["SessionCreated", *FIRST_TURN]


DEEP = b"[" * 200 + b"]" * 200
HI = b'{"role": "user", "content": "x"}'
BAD_BODIES = (
    *(b"", b"[]", b"{}", b'{"messages": []}', b'{"messages": [1]}', b'{"messages": ' + DEEP * 250 + b"}"),
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    *(b'{"messages": [%b], %b}' % (HI, more) for more in (b'"n": 2', b'"stream": 1', b'"extra": ' + DEEP)),
    b'{"messages": [%b], "temperature": NaN}' % HI,
)


def test_a_bad_body_is_400_and_never_reaches_the_engine(stand: Stand) -> None:
    talk = stand.talk()
    for content in BAD_BODIES:
        response = stand.http.post(talk.chat_path, content=content)
        assert error_of(response) in ((400, "invalid_request"), (400, "unsupported")), content[:60]
        assert response.headers["x-should-retry"] == "false"
    assert (talk.generations(), talk.types()) == (0, ["SessionCreated"])


def test_not_found_comes_before_a_bad_body_before_busy_before_the_history(stand: Stand) -> None:
    unknown = stand.known("never-seen")
    assert error_of(stand.http.post(unknown.chat_path, content="{"))[0] == 404
    odd_key = {"idempotency-key": "x" * 300}
    assert error_of(stand.http.post(unknown.chat_path, content="{", headers=odd_key))[0] == 404
    talk = stand.talk(rollback_window=0)
    talk.say("Hello")
    call = stand.meanwhile(talk.say, "Slow", sim=SLOW)
    stand.until_generating(talk, 2)
    assert error_of(stand.http.post(talk.chat_path, content="{")) == (400, "invalid_request")
    mismatching = [user("Other"), {"role": "assistant", "content": "never said"}, user("x")]
    assert error_of(talk.chat(mismatching)) == (409, "session_busy")
    assert error_of(talk.chat([user("Instead")])) == (409, "session_busy")
    stand.end()
    call.result()
    assert error_of(talk.chat(mismatching)) == (400, "history_mismatch")


def test_of_many_simultaneous_chats_one_runs(stand: Stand) -> None:
    talk = stand.talk()
    calls = [stand.meanwhile(talk.chat, [user(f"Number {n}")], sim=SLOW) for n in range(8)]
    stand.until_generating(talk)
    until(lambda: sum(call.done() for call in calls) == 7)
    stand.end()
    statuses = sorted(call.result().status_code for call in calls)
    assert statuses == [200] + [409] * 7
    assert (stand.stats()["started"], len(talk.committed())) == (1, 1)


def test_delete_during_a_turn_waits_for_nothing(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    call = stand.meanwhile(talk.chat, [*talk.messages, user("Slow")], sim={"latency_s": 15})
    stand.until_generating(talk, 2)
    finished = stand.stats()["finished"]
    assert stand.http.delete(talk.path).status_code == 204
    assert error_of(call.result()) == (404, "session_closed")
    until(lambda: stand.stats()["in_flight"] == 0)
    assert stand.stats()["finished"] == finished, "the engine was told, and nobody waited for it"
    assert len(talk.committed()) == 1
    assert talk.types()[-1] in ("SessionClosed", "TurnAbandoned")
    [row] = talk.rows()
    assert len(row["turns"]) == 1


def test_a_session_in_a_header_is_created_on_first_use(stand: Stand) -> None:
    names = (
        "x-turnlog-session-id",
        "x-dynamo-session-id",
        "x-session-id",
        "session-id",
        "x-claude-code-session-id",
        "x-multi-turn-session-id",
    )
    for name in names:
        talk = stand.known(f"by-{name}")
        messages = [user("Hello")]
        for _ in range(2):
            response = stand.http.post("/v1/chat/completions", json={"messages": messages}, headers={name: talk.id})
            assert response.status_code == 200, response.text
            messages += [response.json()["choices"][0]["message"], user("On")]
        assert talk.types() == ["SessionCreated", *FIRST_TURN, *LATER_TURN]


def test_a_session_header_is_judged_like_an_id(stand: Stand) -> None:
    body = {"messages": [user("x")]}
    assert error_of(stand.http.post("/v1/chat/completions", json=body))[0] == 400
    for bad in ("..", "a/b", "a b", "x" * 129):
        response = stand.http.post("/v1/chat/completions", json=body, headers={"x-session-id": bad})
        assert error_of(response)[0] == 400
    closed = stand.talk()
    stand.http.delete(closed.path)
    response = stand.http.post("/v1/chat/completions", json=body, headers={"x-session-id": closed.id})
    assert error_of(response) == (404, "session_closed")


def test_another_conversation_is_told_what_to_do_and_the_log_says_so_once(stand: Stand) -> None:
    for _ in range(2):
        talk = stand.talk()
        talk.say("Hello")
        refused = talk.chat([{"role": "system", "content": "Sum up."}, user("All of it")])
        assert error_of(refused) == (400, "history_mismatch")
        said = refused.json()["error"]["message"]
        assert "another conversation: 0 of 2 messages match" in said
        assert 'Create the session with history="tree"' in said
        assert "or a session for each conversation" in said
    logged = [json.loads(line) for line in stand.server.log_path.read_text().splitlines() if "history=" in line]
    assert [line["level"] for line in logged if "Create the session with" in line["event"]] == ["warning"]


def test_a_body_is_json_whatever_its_content_type(stand: Stand) -> None:
    for content_type in (None, "text/plain", "application/x-www-form-urlencoded"):
        headers = {"content-type": content_type} if content_type else {}
        made = stand.http.post("/sessions", content="{}", headers=headers).json()
        path = f"/sessions/{made['session_id']}{CHAT}"
        body = json.dumps({"messages": [user("Hi")]})
        assert stand.http.post(path, content=body, headers=headers).status_code == 200


def test_delete_during_a_turn_tells_the_engine_to_abort(stand: Stand) -> None:
    talk = stand.talk()
    call = stand.meanwhile(talk.chat, [user("Slow")], sim={"latency_s": 15})
    stand.until_generating(talk)
    rid = stand.engine_requests(talk.id)[-1]["body"]["rid"]
    stand.http.delete(talk.path)
    assert call.result().status_code == 404

    def aborts() -> list[str]:
        seen = stand.sim.get("/sim/requests", params={"last": 50}).json()
        return [one["body"]["rid"] for one in seen if one["path"] == "/abort_request"]

    until(lambda: rid in aborts(), 3)
