"""Bodies that are legal and unusual: line breaks between tokens, large ones where small are expected."""

from __future__ import annotations

import json

import pytest

from integration.stand import Stand, error_of, user


def test_a_pretty_printed_request_gives_one_line_in_the_export(stand: Stand) -> None:
    talk = stand.talk()
    body = json.dumps({"messages": [user("Hello")], "tools": []}, indent=2).replace("\n", "\r\n")
    assert stand.http.post(talk.chat_path, content=body).status_code == 200
    (row,) = talk.rows()
    assert row["messages"][0] == user("Hello")


@pytest.mark.parametrize("count", ["9" * 5000, "²", "-1", "one", ""])
def test_a_strange_retry_count_is_no_fault_of_ours(stand: Stand, count: str) -> None:
    talk = stand.talk()
    headers = {"x-stainless-retry-count": count.encode()}
    response = stand.http.post(talk.chat_path, json={"messages": [user("Hello")]}, headers=headers)
    assert response.status_code == 200, response.text


def test_the_limit_on_bodies_holds_on_every_route(tight: Stand) -> None:
    talk = tight.talk()
    large = json.dumps({"metadata": {"x": "y" * 30_000}})
    assert error_of(tight.http.post("/sessions", content=large)) == (413, "request_too_large")
    assert error_of(tight.http.put(f"{talk.path}/reward", content=large)) == (413, "request_too_large")


def test_a_label_with_a_nul_is_refused(stand: Stand) -> None:
    assert error_of(stand.http.post("/sessions", json={"group_id": "a\0b"})) == (400, "invalid_request")
