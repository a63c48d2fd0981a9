"""Which headers pass, each way."""

from __future__ import annotations

import pytest

from app.upstream.headers import HOP_BY_HOP, OURS, to_client, to_engine


def test_credentials_and_routing_of_the_client_never_reach_the_engine() -> None:
    client = [
        ("authorization", "Bearer client"),
        ("cookie", "a=b"),
        ("x-api-key", "k"),
        ("x-smg-routing-key", "elsewhere"),
        ("host", "h"),
        ("content-length", "7"),
        ("accept-encoding", "gzip"),
        ("traceparent", "00-1"),
    ]
    sent = to_engine(client, "s1", None)
    assert dict(sent) == {
        "traceparent": "00-1",
        "content-type": "application/json",
        "accept-encoding": "identity",
        "x-smg-routing-key": "s1",
    }
    assert len(sent) == 4


def test_our_own_key_goes_to_the_engine() -> None:
    assert dict(to_engine([("authorization", "x")], "s", "ours"))["authorization"] == "Bearer ours"


@pytest.mark.parametrize("name", sorted(HOP_BY_HOP | OURS))
@pytest.mark.parametrize("case", [str.lower, str.title, str.upper])
def test_framing_and_hop_by_hop_end_here(name: str, case: type[str]) -> None:
    assert to_client([(case(name), "x"), ("X-Own", "1")]) == [("x-own", "1")]


def test_what_connection_names_ends_here_too() -> None:
    assert to_client([("Connection", "close, X-Private"), ("X-PRIVATE", "1"), ("X-Own", "A")]) == [("x-own", "A")]


def test_repeated_headers_of_the_engine_stay_in_order() -> None:
    assert to_client([("Vary", "a"), ("vary", "b")]) == [("vary", "a"), ("vary", "b")]
