"""Images that clients send: stored once, sent to the engine as they came, named in rows, forked and erased."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import pytest

from integration.routing import problems
from integration.stand import SPOKEN, Stand, Talk, error_of

PLAIN = {"tool_calls": False}

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8
JPEG = b"\xff\xd8\xff" + bytes(reversed(range(256))) * 8


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(protocol: str, data: bytes, kind: str = "image/png") -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {
        "chat": {"type": "image_url", "image_url": {"url": url_of(data, kind), "detail": "low"}},
        "messages": {"type": "image", "source": {"type": "base64", "media_type": kind, "data": encoded}},
        "responses": {"type": "input_image", "image_url": url_of(data, kind), "detail": "low"},
    }[protocol]


def text(protocol: str, words: str) -> dict[str, Any]:
    return {"type": "input_text" if protocol == "responses" else "text", "text": words}


def asks(protocol: str, words: str, *images: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [text(protocol, words), *images]}


def sent(stand: Stand, talk: Talk) -> list[list[dict[str, Any]]]:
    """The messages of each request that the engine got."""
    return [request["body"]["messages"] for request in stand.engine_requests(talk.id)]


def images_in(messages: Sequence[dict[str, Any]]) -> list[str]:
    """The URLs of a request's images, in their order."""
    lists = (message["content"] for message in messages if isinstance(message["content"], list))
    return [part["image_url"]["url"] for parts in lists for part in parts if part["type"] == "image_url"]


@pytest.mark.parametrize("protocol", list(SPOKEN))
def test_an_image_is_stored_once_and_sent_with_every_turn(mortal: Stand, protocol: str) -> None:
    """Over a `kill -9`, after which the history comes from the store."""
    talk = mortal.talk(protocol)
    talk.add(asks(protocol, "What is it?", image(protocol, PNG)), sim=PLAIN)
    talk.say("And now?", sim=PLAIN)
    mortal.server.kill()
    mortal.server.start()
    again, other = image(protocol, PNG), image(protocol, JPEG, "image/jpeg")
    talk.add(asks(protocol, "The same, and another", again, other), sim=PLAIN)
    first, second = url_of(PNG), url_of(JPEG, "image/jpeg")
    assert [images_in(messages) for messages in sent(mortal, talk)] == [[first], [first], [first, first, second]]
    records = talk.state()["records"]
    assert [images_in(record["request"]["messages"]) for record in records] == [
        [first],
        [first],
        [first, first, second],
    ]
    blobs = {blob["hash"] for turn in talk.committed() for blob in turn.get("new_blobs", ()) if blob["kind"] == "image"}
    assert blobs == {sha256(PNG), sha256(JPEG)}
    [row] = talk.rows()
    assert [(one["sha256"], one["message"], one["turn"]) for one in row["images"]] == [
        (sha256(PNG), 0, 1),
        (sha256(PNG), 4, 3),
        (sha256(JPEG), 4, 3),
    ]
    assert next((one["media_type"], one["size"], one["bytes"]) for one in row["images"]) == (
        "image/png",
        len(PNG),
        None,
    )
    assert url_of(PNG)[30:] not in str(row["messages"])
    [inline] = talk.rows(images="inline")
    assert [base64.b64decode(one["bytes"]) for one in inline["images"]] == [PNG, PNG, JPEG]
    assert images_in(inline["messages"]) == [first, first, second]
    [none] = talk.rows(images="none")
    assert "images" not in none
    assert none["tokens"] == row["tokens"] == inline["tokens"]
    assert problems(mortal) == []


def test_an_image_is_read_by_its_hash(stand: Stand) -> None:
    talk = stand.talk()
    talk.add(asks("chat", "What is it?", image("chat", PNG), image("chat", b"<svg/>", "image/svg+xml")), sim=PLAIN)
    for data, kind in ((PNG, "image/png"), (b"<svg/>", "application/octet-stream")):
        found = stand.http.get(f"{talk.path}/images/{sha256(data)}")
        assert (found.content, found.headers["content-type"]) == (data, kind)
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["content-disposition"] == "attachment"
        assert found.headers["content-security-policy"].startswith("sandbox")
    assert error_of(stand.http.get(f"{talk.path}/images/{sha256(JPEG)}")) == (404, "not_found")
    assert stand.http.delete(talk.path).status_code == 204
    assert stand.http.get(f"{talk.path}/images/{sha256(PNG)}").content == PNG


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        (url_of(PNG), url_of(PNG).replace("image/png", "IMAGE/PNG"), True),
        (url_of(PNG), "data:image/png," + "".join(f"%{byte:02x}" for byte in PNG), True),
        (url_of(PNG), url_of(PNG, "image/jpeg"), False),
        (url_of(PNG), url_of(PNG + b"x"), False),
        (url_of(PNG), "http://127.0.0.1/a.png", False),
    ],
)
def test_images_are_equal_by_bytes_and_media_type(stand: Stand, first: str, second: str, equal: bool) -> None:
    talk = stand.talk()
    part = {"type": "image_url", "image_url": {"url": first}}
    talk.add(asks("chat", "What is it?", part), sim=PLAIN)
    other = {"type": "image_url", "image_url": {"url": second}}
    history = [asks("chat", "What is it?", other), *talk.messages[1:], {"role": "user", "content": "On"}]
    response = talk.chat(history, sim=PLAIN)
    assert response.status_code == (200 if equal else 400), response.text


@pytest.mark.parametrize("kind", ["turnlog_image", "turnlog\\u005fimage"])
@pytest.mark.parametrize("beside", [[], [image("chat", PNG)]])
@pytest.mark.parametrize("url", [{}, {"image_url": None}])
def test_no_client_can_write_a_reference(
    stand: Stand, kind: str, beside: list[dict[str, Any]], url: dict[str, None]
) -> None:
    talk = stand.talk()
    forged = {"type": "KIND", "sha256": sha256(PNG), "media_type": "image/png", "size": 1, **url}
    body = json.dumps(talk.body([asks("chat", "x", *beside, forged)], sim=PLAIN)).replace("KIND", kind)
    response = stand.http.post(talk.chat_path, content=body)
    assert error_of(response) == (400, "invalid_request")
    assert talk.generations() == 0
    assert "turnlog_image" in response.json()["error"]["message"]


def test_forks_have_the_images_and_erasure_takes_them(mortal: Stand) -> None:
    talk = mortal.talk()
    talk.add(asks("chat", "What is it?", image("chat", PNG)), sim=PLAIN)
    talk.add(asks("chat", "And it?", image("chat", JPEG)), sim=PLAIN)
    made = mortal.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    fork = mortal.known(made[0]["session_id"])
    assert mortal.http.get(f"{fork.path}/images/{sha256(PNG)}").content == PNG
    assert mortal.http.get(f"{fork.path}/images/{sha256(JPEG)}").status_code == 404
    assert mortal.http.delete(talk.path, params={"erase": "true"}).status_code == 204
    assert mortal.http.get(f"{talk.path}/images/{sha256(PNG)}").status_code == 404
    fork.messages = talk.messages[:2]
    fork.say("On", sim=PLAIN)
    assert images_in(sent(mortal, fork)[-1]) == [url_of(PNG)]
    [row] = fork.rows(images="inline")
    assert base64.b64decode(row["images"][0]["bytes"]) == PNG
    assert problems(mortal) == []


def test_with_a_tokenizer_a_turn_with_images_is_captured(tito: Stand) -> None:
    talk = tito.talk()
    talk.say("Hello", sim=PLAIN)
    talk.add(asks("chat", "What is it?", image("chat", PNG)), sim=PLAIN)
    talk.say("And now?", sim=PLAIN)
    requests = [request["body"] for request in tito.engine_requests(talk.id)]
    assert ["input_ids" in body for body in requests] == [True, False, False]
    assert [turn.get("sent_ids", False) for turn in talk.committed()] == [True, False, False]
    assert talk.rows()[-1]["images"][0]["sha256"] == sha256(PNG)


@pytest.mark.parametrize("shape", ["slime", "verl", "areal", "skyrl", "trl", "prime-rl", "tinker", "atropos"])
def test_shapes_have_the_images_or_say_that_they_leave_them_out(stand: Stand, shape: str) -> None:
    talk = stand.talk(group_id=f"images-{shape}")
    talk.add(asks("chat", "What is it?", image("chat", PNG)), sim=PLAIN)
    assert stand.http.put(f"{talk.path}/reward", json={"reward": 1.0}).status_code == 200
    assert stand.http.delete(talk.path).status_code == 204
    [row] = stand.rows(group_id=f"images-{shape}", shape=shape, images="inline")
    match shape:
        case "verl":
            assert row["multi_modal_data"] == {"images": [url_of(PNG)]}
        case "trl":
            assert row["images"] == [url_of(PNG)]
        case "slime":
            assert row["metadata"]["turnlog"]["images_left_out"] == 1
        case "atropos":
            assert row["images_left_out"] == [1]
        case _:
            assert row["images_left_out"] == 1
    if shape in ("verl", "trl"):
        [row] = stand.rows(group_id=f"images-{shape}", shape=shape)
        assert row["images_left_out"] == 1
        assert "images" not in row
        assert "multi_modal_data" not in row


def test_an_image_by_url_stays_one(stand: Stand) -> None:
    talk = stand.talk()
    url = "http://127.0.0.1:1/a.png"
    talk.add(asks("chat", "What is it?", {"type": "image_url", "image_url": {"url": url}}), sim=PLAIN)
    assert images_in(sent(stand, talk)[0]) == [url]
    [row] = talk.rows(images="inline")
    [shown] = row["images"]
    assert (shown["url"], shown["not_stored"], shown["sha256"]) == (url, True, None)


def test_documents_have_the_images_inline(stand: Stand) -> None:
    talk = stand.talk()
    talk.add(asks("chat", "What is it?", image("chat", PNG)), sim=PLAIN)
    [row] = talk.rows(format="messages", images="inline")
    assert images_in(row["messages"]) == [url_of(PNG)]
    [row] = talk.rows(format="messages")
    assert row["messages"][0]["content"][1]["sha256"] == sha256(PNG)
    [row] = talk.rows(format="atif")
    source = next(
        part["source"]
        for step in row["steps"]
        for part in step["message"]
        if isinstance(part, dict) and part["type"] == "image"
    )
    assert source == {"media_type": "image/png", "path": f"sha256:{sha256(PNG)}"}


def inline_row(talk: Talk) -> dict[str, Any]:
    """The session's row with its images, without what says where in the log it was read."""
    [row] = talk.rows(images="inline")
    return {name: value for name, value in row.items() if name not in ("cursor", "as_of_seq")}


def test_a_restored_checkpoint_has_the_images(stand: Stand) -> None:
    talk = stand.talk()
    talk.add(asks("chat", "What is it?", image("chat", PNG)), sim=PLAIN)
    before = inline_row(talk)
    assert stand.http.post("/checkpoints", json={"name": "images"}).status_code == 200
    talk.add(asks("chat", "And it?", image("chat", JPEG)), sim=PLAIN)
    assert stand.http.post("/checkpoints/images/restore").status_code == 200
    assert stand.http.delete("/checkpoints/images").status_code == 204
    assert inline_row(talk) == before
    talk.messages = talk.messages[:2]
    talk.add(asks("chat", "Or it?", image("chat", JPEG), image("chat", PNG)), sim=PLAIN)
    assert [base64.b64decode(one["bytes"]) for one in inline_row(talk)["images"]] == [PNG, JPEG, PNG]
    assert [problem for problem in problems(stand) if problem.startswith(talk.id)] == []
