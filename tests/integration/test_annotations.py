"""Annotations: where they are seen, what is refused, how long they last, and that an erasure takes them away."""

from __future__ import annotations

import io
import json
import uuid
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from app.features.annotations.bodies import NPY, SAFETENSORS
from app.features.annotations.rules import MAX_NOTE, MAX_TAGS, MAX_VALUE
from integration.stand import Stand, error_of

THREE: dict[str, Any] = {"completion_tokens": 3}


def binary(stand: Stand, path: str, body: bytes, kind: str, **parameters: Any) -> httpx.Response:
    return stand.http.put(path, content=body, headers={"content-type": kind}, params=parameters)


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def listed(stand: Stand, tag: str) -> dict[str, tuple[str | None, list[str]]]:
    """The sessions with a tag, in the list for clients; the page's list has the same."""
    reply = stand.http.get("/sessions", params={"tag": tag})
    assert reply.status_code == 200, reply.text
    found = {one["session_id"]: (one["note"], one["tags"]) for one in reply.json()["sessions"]}
    page = stand.http.get("/ui/api/sessions", params={"tag": tag}).json()
    assert {one["session_id"]: (one["note"], one["tags"]) for one in page["sessions"]} == found
    assert page["total"] == len(found)
    return found


def test_a_note_is_seen_wherever_its_session_is(stand: Stand) -> None:
    tag, talk, other = f"loop {uuid.uuid4().hex}", stand.talk(), stand.talk()
    talk.say("Hello")
    talk.noted(note="Look at turn 1.", tags=[tag, "é, ü", tag])
    other.noted(tags=[f"{tag}!"])
    tags = sorted({tag, "é, ü"})
    given = talk.state()["session"]
    assert (given["note"], given["tags"]) == ("Look at turn 1.", tags)
    [row] = talk.rows()
    assert (row["note"], row["tags"], "annotations" in row) == ("Look at turn 1.", tags, False)
    assert listed(stand, tag) == {talk.id: ("Look at turn 1.", tags)}
    assert listed(stand, "é, ü").keys() >= {talk.id}
    assert listed(stand, tag[:-1]) == {}
    view = stand.http.get(f"/ui/api/sessions/{talk.id}").json()
    assert (view["note"], view["tags"]) == ("Look at turn 1.", tags)
    forks = stand.http.post(f"{talk.path}/fork", json={"turn": 1}).json()["sessions"]
    assert stand.known(forks[0]["session_id"]).state()["session"]["note"] is None
    talk.noted(note="", tags=[])
    given = talk.state()["session"]
    assert (given["note"], given["tags"], listed(stand, tag)) == (None, [], {})
    assert stand.get(f"{talk.path}/annotations")["annotations"] == []


def test_columns_of_each_form_are_aligned_to_the_tokens_of_rows(stand: Stand) -> None:
    """Turns that branches share, columns over a part of the tokens, cut rows, and turns without any."""
    talk = stand.talk(history="tree")
    talk.say("One", sim=THREE)
    talk.say("Two", sim=THREE)
    del talk.messages[2:]
    talk.say("Another", sim=THREE)
    first, second, third = (turn["suffix_tokens"] for turn in talk.committed())
    talk.column(1, "teacher", [-0.1, None, -0.3], writer="teacher")
    own = np.arange(second + 3, dtype=np.float32)
    path = f"{talk.path}/turns/2/annotations/teacher"
    assert binary(stand, path, npy(own), NPY, over="own").status_code == 200
    masked = {"values": np.array([7, 8, 9], np.int32), "mask": np.array([True, False, True])}
    path = f"{talk.path}/turns/3/annotations/labels"
    assert binary(stand, path, save(masked), SAFETENSORS, over="output", writer="judge").status_code == 200
    before = talk.rows()
    left, right = talk.rows(columns="teacher,labels,nothing")
    assert [{**row, "columns": 0, "column_masks": 0} for row in (left, right)] == [
        {**row, "columns": 0, "column_masks": 0} for row in before
    ], "nothing else changes"
    shared = [0.0] * first + [-0.1, 0.0, -0.3]
    there = [0] * first + [1, 0, 1]
    assert left["columns"] == {"teacher": shared + own.tolist(), "labels": None, "nothing": None}
    assert left["column_masks"] == {"teacher": there + [1] * len(own), "labels": None, "nothing": None}
    assert right["columns"]["teacher"] == shared + [0.0] * (third + 3)
    assert right["columns"]["labels"] == [0] * (first + 3 + third) + [7, 0, 9]
    assert right["column_masks"]["labels"][-3:] == [1, 0, 1]
    cut, _ = talk.rows(columns="teacher", max_seq_len=first + 3 + second + 1, truncate="token")
    assert cut["columns"]["teacher"] == left["columns"]["teacher"][:-2]
    trl, _ = talk.rows(columns="teacher", shape="trl")
    assert trl["columns"]["teacher"] == left["columns"]["teacher"]
    [fork] = stand.http.post(f"{talk.path}/fork", json={"turn": 2}).json()["sessions"]
    [copied] = stand.known(fork["session_id"]).rows(columns="teacher")
    assert copied["columns"] == {"teacher": left["columns"]["teacher"]}
    for wrong in ({"shape": "atropos"}, {"format": "atif"}, {"columns": "a b"}):
        reply = stand.http.get("/export", params={"session_id": talk.id, "columns": "teacher", **wrong})
        assert error_of(reply) == (400, "invalid_request")


DEEP = "[" * 70 + "]" * 70
VALUES: dict[str, tuple[str, str]] = {
    "nothing": ("{}", "must not be null"),
    "empty": ("", "the body"),
    "null": ('{"value": null}', "must not be null"),
    "both": ('{"value": 1, "values": [1, 2, 3], "over": "output"}', "exclude"),
    "unknown field": ('{"value": 1, "other": 2}', "other"),
    "infinite": ('{"value": [1e999]}', "value.0"),
    "not a number": ('{"value": {"a": NaN}}', "value.a"),
    "too large a number": ('{"value": 18446744073709551616}', "64 bits"),
    "too deep": (f'{{"value": {DEEP}}}', "deeper"),
    "too long": (json.dumps({"value": "x" * MAX_VALUE}), str(MAX_VALUE)),
    "too long before all else": (f'{{"value": {{"{"x" * MAX_VALUE}": [1e999]}}}}', str(MAX_VALUE)),
    "a writer": ('{"value": 1, "writer": "a\\nb"}', "writer"),
    "over alone": ('{"value": 1, "over": "own"}', "over"),
    "no over": ('{"values": [1, 2, 3]}', "over"),
    "another over": ('{"values": [1, 2, 3], "over": "all"}', "over"),
    "another type": ('{"values": [1, 2, 3], "over": "output", "dtype": "float64"}', "dtype"),
    "too few": ('{"values": [1, 2], "over": "output"}', "2 numbers; turn 1 has 3 sampled tokens"),
    "of the others": ('{"values": [1, 2, 3], "over": "own"}', "new tokens"),
    "a text": ('{"values": [1, "2", 3], "over": "output"}', "values.1"),
    "a bool": ('{"values": [1, 2, true], "over": "output"}', "values.2"),
    "past float32": ('{"values": [1, 1e39, 3], "over": "output"}', "values.1"),
    "infinity": ('{"values": [Infinity, 2, 3], "over": "output"}', "values.0"),
    "a fraction": ('{"values": [1, 2, 3.5], "over": "output", "dtype": "int32"}', "values.2"),
    "past int32": ('{"values": [1, 2147483648, 3], "over": "output", "dtype": "int32"}', "values.1"),
    "past all": ('{"values": [1, 1' + "0" * 400 + ', 3], "over": "output"}', "values"),
}
OF_SESSION: dict[str, tuple[str, str, str]] = {
    "a column": ("values", '{"values": [1], "over": "output"}', "turn"),
    "a note that is no text": ("note", '{"value": 1}', "note"),
    "a long note": ("note", json.dumps({"value": "x" * (MAX_NOTE + 1)}), str(MAX_NOTE)),
    "a note with NUL": ("note", '{"value": "a\\u0000b"}', "NUL"),
    "a tag alone": ("tags", '{"value": "a"}', "tags"),
    "a number": ("tags", '{"value": [1]}', "tags"),
    "an empty tag": ("tags", '{"value": [""]}', "tags"),
    "a tag of lines": ("tags", '{"value": ["a\\n"]}', "tags"),
    "a long tag": ("tags", json.dumps({"value": ["x" * 129]}), "tags"),
    "many tags": ("tags", json.dumps({"value": [str(number) for number in range(MAX_TAGS + 1)]}), "tags"),
}
FLOATS = np.array([1, 2, 3], np.float32)
FILES: dict[str, tuple[bytes, str, str]] = {
    "no file": (b"", NPY, "npy"),
    "no npy": (b"[1, 2, 3]", NPY, "npy"),
    "cut": (npy(FLOATS)[:-1], NPY, "11 bytes"),
    "of objects": (npy(np.array([None] * 3)), NPY, "|O"),
    "float64": (npy(FLOATS.astype(np.float64)), NPY, "<f8"),
    "big endian": (npy(FLOATS.astype(">f4")), NPY, ">f4"),
    "three dimensions": (npy(FLOATS.reshape(3, 1, 1)), NPY, "shape"),
    "NaN": (npy(np.array([1, np.nan, 3], np.float32)), NPY, "values.1"),
    "four numbers": (npy(np.ones(4, np.float32)), NPY, "4 numbers"),
    "huge": (npy(FLOATS).replace(b"(3,), }   ", b"(9999,), }"), NPY, "12 bytes"),
    "no header": (npy(FLOATS).replace(b"(3,)", b"(3.)"), NPY, "npy"),
    "no safetensors": (b"\xff" * 64, SAFETENSORS, "safetensors"),
    "a header past the end": ((9).to_bytes(8, "little") + b"{}", SAFETENSORS, "valid safetensors"),
    "no JSON": ((2).to_bytes(8, "little") + b"{]", SAFETENSORS, "safetensors"),
    "another tensor": (save({"value": FLOATS}), SAFETENSORS, "value"),
    "half": (save({"values": FLOATS.astype(np.float16)}), SAFETENSORS, "F32"),
    "a short mask": (save({"values": FLOATS, "mask": np.ones(2, np.uint8)}), SAFETENSORS, "mask"),
    "a mask of floats": (save({"values": FLOATS, "mask": FLOATS}), SAFETENSORS, "mask"),
    "infinite": (save({"values": FLOATS + np.float32(np.inf)}), SAFETENSORS, "values.0"),
}


def test_what_is_refused_says_why_and_leaves_no_event(stand: Stand) -> None:
    talk = stand.talk()
    talk.say("One", sim=THREE)
    before = talk.types()
    of_turn, own = f"{talk.path}/turns/1/annotations", {"content-type": "application/json"}
    replies = {
        name: (stand.http.put(f"{of_turn}/x", content=given, headers=own), why) for name, (given, why) in VALUES.items()
    }
    for name, (kind, given, why) in OF_SESSION.items():
        replies[name] = stand.http.put(f"{talk.path}/annotations/{kind}", content=given), why
    for name, (body, media, why) in FILES.items():
        replies[f"a file: {name}"] = binary(stand, f"{of_turn}/x", body, media, over="output"), why
    replies["a file without over"] = binary(stand, f"{of_turn}/x", npy(FLOATS), NPY), "over"
    replies["a bad name"] = stand.http.put(f"{of_turn}/a.b", json={"value": 1}), "name"
    for name, (reply, why) in replies.items():
        assert error_of(reply) == (400, "invalid_request"), name
        assert why in reply.json()["error"]["message"], (name, reply.text)
    for path, code in (
        (f"{talk.path}/turns/2/annotations/x", "not_found"),
        ("/sessions/never-seen/annotations/x", "session_not_found"),
    ):
        for method, body in (("GET", None), ("PUT", {"value": 1}), ("DELETE", None)):
            assert error_of(stand.http.request(method, path, json=body)) == (404, code)
    assert talk.types() == before


def test_a_closed_session_is_annotated_and_an_erased_one_has_nothing_left(stand: Stand) -> None:
    word, talk = uuid.uuid4().hex, stand.talk()
    talk.say("Hello", sim=THREE)
    talk.noted(note=f"A note of {word}")
    assert stand.http.delete(talk.path).status_code == 204
    talk.noted(tags=[word])
    talk.annotate("judge", {word: word}, turn=1, writer=word)
    talk.column(1, "values", [1, 2, 3])
    assert listed(stand, word) == {talk.id: (f"A note of {word}", [word])}
    [row] = talk.rows(columns="values")
    assert (row["tags"], row["columns"]["values"][-3:]) == ([word], [1.0, 2.0, 3.0])
    assert stand.get(f"{talk.path}/turns/1/annotations/judge")["value"] == {word: word}
    assert stand.http.delete(talk.path, params={"erase": True}).status_code == 204
    assert error_of(talk.annotate("note", "Again")) == (404, "session_closed")
    assert error_of(stand.http.get(f"{talk.path}/annotations")) == (404, "session_closed")
    assert listed(stand, word) == {}
    assert talk.id not in {one["session_id"] for one in stand.get("/sessions", annotated="note")["sessions"]}
    assert word not in stand.http.get(f"{talk.path}/events").text
    left = [event for event in talk.events() if event["type"] == "AnnotationWritten"]
    assert [(event["name"], event.get("erased", False)) for event in left] == [
        *(("note", True), ("tags", True), ("judge", True), ("values", False)),
    ]
