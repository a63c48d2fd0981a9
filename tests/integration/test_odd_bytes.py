"""Bodies that are legal and unusual: line breaks between tokens, large ones where small are expected."""

from __future__ import annotations

import gzip
import json

import httpx
import pytest
import zstandard

from integration.stand import SPOKEN, Stand, error_of, user

MARK = b"\xef\xbb\xbf"


def with_half(value: object) -> bytes:
    """The JSON, with a half in place of each U+FFFD, behind a byte order mark."""
    return MARK + json.dumps(value).replace(r"\ufffd", r"\ud83d").encode()


@pytest.mark.parametrize("size", [0, 40_000])
@pytest.mark.parametrize("protocol", [*SPOKEN, "completions"])
def test_half_a_character_is_read_as_the_replacement_character(stand: Stand, protocol: str, size: int) -> None:
    """In each later request too; the reply comes as the client asks, and a retry is known."""
    tree = stand.talk(protocol if protocol in SPOKEN else "chat")
    path = f"{tree.path}/v1/completions" if protocol == "completions" else tree.chat_path
    text, parents, messages = "x" * size + "a\ufffd b", [], []
    for turn in range(3):
        messages.append(user(text))
        body = {"model": "simulator", "prompt": text} if protocol == "completions" else tree.body(messages)
        body |= {"sim": {"tool_calls": False}, "stream": turn == 2}
        key = {"idempotency-key": f"{protocol}-{size}-{turn}"}
        first, again = (stand.http.post(path, content=with_half(body), headers=key) for _ in range(2))
        assert (first.status_code, again.headers.get("x-turnlog-replayed")) == (200, "true"), first.text
        place = "prompt" if protocol == "completions" else f"{tree.spoken.history}[0]"
        assert first.headers["x-turnlog-left-out"].startswith(f"surrogate:{place}")
        assert first.headers["content-type"].startswith("text/event-stream" if turn == 2 else "application/json")
        if protocol == "completions":
            break
        if turn < 2:
            messages += tree.spoken.added(first.json())
        parents.append(tree.committed()[-1]["parent"])
    assert parents == list(range(len(parents)))
    route = {"path": "/v1/completions"} if protocol == "completions" else {}
    sent = json.dumps(stand.engine_requests(tree.id, **route)[-1]["body"])
    assert r"a\ufffd b" in sent
    assert r"\ud83d" not in sent


def test_the_limit_on_bodies_holds_on_every_route(tight: Stand) -> None:
    talk = tight.talk()
    large = json.dumps({"metadata": {"x": "y" * 30_000}})
    assert error_of(tight.http.post("/sessions", content=large)) == (413, "request_too_large")
    assert error_of(tight.http.put(f"{talk.path}/reward", content=large)) == (413, "request_too_large")


@pytest.mark.long
@pytest.mark.threat("request that blocks the event loop")
def test_a_request_that_holds_too_much_is_refused_on_every_route(stand: Stand) -> None:
    talk = stand.talk()
    keys = {f"key{number}": 1 for number in range(200_000)}
    turn = {"messages": [user("Hello")], **keys}
    refused = stand.http.post(talk.chat_path, json=turn)
    assert error_of(refused) == (400, "invalid_request")
    assert "more than 1000 fields" in refused.json()["error"]["message"]
    assert error_of(stand.http.post("/sessions/none/v1/chat/completions", json=turn)) == (404, "session_not_found")
    by_control = {"messages": [user("Hello")], "nvext": keys}
    assert error_of(stand.http.post("/v1/chat/completions", json=by_control)) == (400, "invalid_request")
    for method, path in (
        ("PUT", f"{talk.path}/reward"),
        ("POST", f"{talk.path}/samples"),
        ("POST", "/sessions"),
        ("POST", "/export/groups/ack"),
        ("POST", "/engines"),
        ("POST", "/fleet/pause"),
        ("POST", "/skyrl/v1/abort_lora_requests"),
    ):
        assert error_of(stand.http.request(method, path, json=keys)) == (413, "request_too_large"), path
    assert talk.types() == ["SessionCreated"]
    large = [user("a, " * 100_000), *(user(f"{number}, and so on") for number in range(2000))]
    assert talk.chat(large).status_code == 200
    assert talk.state()["records"][0]["request"]["messages"] == large


@pytest.mark.parametrize("encoding", ["gzip", "zstd", ""])
def test_a_compressed_request_is_the_same_request(stand: Stand, encoding: str) -> None:
    pack = {"gzip": gzip.compress, "zstd": zstandard.ZstdCompressor().compress, "": bytes}[encoding]
    headers = {"content-encoding": encoding}
    created = stand.http.post("/sessions", content=pack(b'{"group_id": "g"}'), headers=headers)
    talk = stand.known(created.json()["session_id"])
    body = json.dumps(talk.body([user("Hello")])).encode()
    key = {"idempotency-key": "once"}
    first = stand.http.post(talk.chat_path, content=pack(body), headers={**headers, **key})
    again = stand.http.post(talk.chat_path, content=body, headers=key)
    assert (first.status_code, again.content) == (200, first.content)
    [sent] = stand.engine_requests(talk.id)
    assert "content-encoding" not in sent["headers"]


@pytest.mark.threat("decompression bomb from a client")
def test_a_bomb_is_413_on_every_route(tight: Stand) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    for path in ("/sessions", tight.talk().chat_path, "/v1/messages/count_tokens"):
        # Over a connection of its own: the server may close it, since much of the body is left.
        refused = httpx.post(
            tight.server.base_url + path, content=bomb, headers={"content-encoding": "gzip"}, timeout=60
        )
        assert error_of(refused) == (413, "request_too_large"), path
    refused = tight.http.post("/sessions", content=b"x", headers={"content-encoding": "br"})
    assert error_of(refused) == (415, "unsupported_encoding")
    assert refused.headers["accept-encoding"] == "gzip, deflate, zstd"


def test_half_a_character_on_every_other_route(stand: Stand) -> None:
    made = stand.http.post("/sessions", content=with_half({"metadata": {"name": "a\ufffd b"}}))
    talk = stand.known(made.json()["session_id"])
    talk.say("Hello")
    for method, path, body in (
        ("PUT", f"{talk.path}/reward", {"reward": 1, "components": {"\ufffd": 1}}),
        ("PUT", f"{talk.path}/annotations/note", {"value": "a\ufffd b"}),
        ("POST", f"{talk.path}/samples", {"max_seq_len": None}),
    ):
        assert stand.http.request(method, path, content=with_half(body)).status_code == 200, path
    state = talk.state()
    assert state["session"]["metadata"] == {"name": "a\ufffd b"}
    assert stand.get(f"{talk.path}/annotations/note")["value"] == "a\ufffd b"
    count = {"model": "simulator", "messages": [user("a\ufffd b")]}
    counted = [
        stand.http.post("/v1/messages/count_tokens", content=content).json()
        for content in (with_half(count), json.dumps(count).encode())
    ]
    assert counted[0] == counted[1]


@pytest.mark.parametrize("count", ["9" * 5000, "²", "-1", "one", ""])
def test_a_strange_retry_count_is_no_fault_of_ours(stand: Stand, count: str) -> None:
    talk = stand.talk()
    headers = {"x-stainless-retry-count": count.encode()}
    response = stand.http.post(talk.chat_path, json={"messages": [user("Hello")]}, headers=headers)
    assert response.status_code == 200, response.text
