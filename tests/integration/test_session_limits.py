"""What a session may be given: metadata and rewards that are JSON, finite and not too large."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from integration.stand import Stand, error_of

LIMIT = 64 << 10
MOST_BODY = 1 << 20


def fresh() -> str:
    return f"s-{uuid.uuid4().hex}"


NO_JSON = (
    *((b'{"metadata": {"a": NaN}}', "metadata.a"), (b'{"metadata": {"a": {"b": 1e999}}}', "metadata.a.b")),
    (b'{"metadata": {"a": [1, {"b": [0.5, -Infinity]}]}}', "metadata.a.1.b.1"),
    *((b'{"attempt": NaN}', "attempt"), (b'{"rollback_window": 1e999}', "rollback_window")),
    (b'{"attempt": %s}' % (b"1" * 401), "attempt"),
    *((b'{"metadata": {"a": "\xff"}}', "the body"), (b'{"metadata": {"a": %s}}' % (b"1" * 5000), "the body")),
    (b'{"metadata": {"a": %s%s}}' % (b"[" * 3000, b"]" * 3000), "the body"),
)


def test_what_is_no_json_or_no_finite_number_is_refused_where_it_stands(stand: Stand) -> None:
    for content, place in NO_JSON:
        name = fresh()
        refused = stand.http.post("/sessions", content=b'{"session_id": "%s", %s' % (name.encode(), content[1:]))
        assert error_of(refused) == (400, "invalid_request")
        assert refused.json()["error"]["message"].startswith(f"{place}: ")
        assert stand.http.get(f"/sessions/{name}/events").status_code == 404


@pytest.mark.threat("oversized metadata or reward")
def test_metadata_has_a_limit_that_its_refusal_names(stand: Stand) -> None:
    most = "é" * ((LIMIT - len('{"a":""}')) // 2)
    assert stand.http.post("/sessions", json={"metadata": {"a": most}}).status_code == 200
    refused = stand.http.post("/sessions", json={"metadata": {"a": most + "e"}})
    assert error_of(refused) == (400, "invalid_request")
    assert refused.json()["error"]["message"] == f"metadata has {LIMIT + 1} bytes as JSON; the limit is {LIMIT}"


@pytest.mark.threat("oversized metadata or reward")
def test_a_reward_has_a_limit_that_its_refusal_names(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("Hello")
    path = f"{talk.path}/reward"
    name = "é" * ((LIMIT - len('{"reward":1.0,"components":{"":0.5}}')) // 2)
    assert stand.http.put(path, json={"reward": 1, "components": {name: 0.5}}).status_code == 200
    before = talk.types()
    refused = stand.http.put(path, json={"reward": 1, "components": {name + "e": 0.5}, "turn": 1})
    assert error_of(refused) == (400, "invalid_request")
    message = f"reward and components have {LIMIT + 1} bytes as JSON; the limit is {LIMIT}"
    assert refused.json()["error"]["message"] == message
    assert talk.types() == before
    [row] = talk.rows()
    assert row["reward_components"] == {name: 0.5}


def pieces_of(body: bytes) -> Iterator[bytes]:
    """Sent without a length."""
    yield from (body[at : at + 65536] for at in range(0, len(body), 65536))


@pytest.mark.threat("oversized metadata or reward")
@pytest.mark.parametrize("in_pieces", [False, True])
def test_a_large_body_is_refused_before_it_is_read_as_json(stand: Stand, in_pieces: bool) -> None:
    """45 MiB of components once became an event. What is refused need not even be JSON."""
    talk = stand.talk()
    body = b'{"reward": 1, "components": {' + b"x" * (45 << 20)
    calls = ((stand.http.put, f"{talk.path}/reward"), (stand.http.post, "/sessions"))
    for call, path in calls:
        refused = call(path, content=pieces_of(body) if in_pieces else body)
        assert error_of(refused) == (413, "request_too_large")
        sized = f"the body has {len(body)} bytes; the limit is {MOST_BODY}"
        message = f"the body has more than {MOST_BODY} bytes" if in_pieces else sized
        assert refused.json()["error"]["message"] == message
    assert talk.types() == ["SessionCreated"]


def test_a_body_may_be_longer_than_what_it_says(stand: Stand) -> None:
    """Escapes and white space, within reason."""
    talk = stand.talk()
    components = b'{"%s": 0.5}' % (b"\\u00e9" * 30_000)
    body = b'{"reward": 1, %s"components": %s}' % (b" " * 300_000, components)
    assert len(body) > 7 * LIMIT
    assert stand.http.put(f"{talk.path}/reward", content=body).status_code == 200
    assert talk.events()[-1]["components"] == {"é" * 30_000: 0.5}
