"""Which session leaves a full cache next."""

from __future__ import annotations

from app.sessions.cache import Eviction


def of(*names: str) -> Eviction:
    made = Eviction()
    for name in names:
        made.add(name)
    return made


def test_ended_sessions_go_first() -> None:
    order = of("a", "b", "c", "d")
    order.add("c", is_ended=True)
    order.add("b", is_ended=True)
    assert order.next("a") == "c"
    assert order.next("c") == "b"
    order.discard("c")
    order.discard("b")
    assert order.next("a") == "d"


def test_any_other_one_goes_and_never_the_one_in_use() -> None:
    names = [f"s{number}" for number in range(8)]
    order = of(*names)
    assert {order.next("s3") for _ in range(500)} == {*names} - {"s3"}
    assert {order.next("s7") for _ in range(500)} == {*names} - {"s7"}
    assert {order.next("of another cache") for _ in range(500)} == {*names}


def test_what_was_discarded_is_not_drawn() -> None:
    order = of("a", "b", "c")
    for name in ("a", "a", "nobody"):
        order.discard(name)
    assert {order.next("") for _ in range(100)} == {"b", "c"}
    order.discard("c")
    assert (order.next(""), order.next("b"), len(order)) == ("b", None, 1)
    order.discard("b")
    assert (order.next(""), len(order)) == (None, 0)
