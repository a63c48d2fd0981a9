"""Large requests are read one at a time, the shorter ones first, whoever leaves meanwhile."""

from __future__ import annotations

import asyncio
import threading

import pytest

from app.turn.large_bodies import BYTES_A_SECOND, LargeBodies, large_bytes

pytestmark = pytest.mark.anyio


class Held:
    """Work that a test lets go on; `order` is that in which it began."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = threading.Event()

    def work(self, name: str, fails: bool = False) -> str:
        self.order.append(name)
        assert self.go.wait(20)
        if fails:
            raise ValueError(name)
        return name


async def begun(held: Held) -> None:
    async with asyncio.timeout(20):
        while not held.order:
            await asyncio.sleep(0.001)


async def test_the_short_go_first_and_one_at_a_time() -> None:
    lane, held = LargeBodies(), Held()
    sizes = {"first": 9 << 20, "long": 9 << 20, "short": 1 << 20, "middle": 4 << 20}
    calls = [asyncio.create_task(lane.run(size, lambda name=name: held.work(name))) for name, size in sizes.items()]
    await begun(held)
    assert held.order == ["first"]
    assert await lane.run(0, lambda: "a small one waits for nobody") is not None
    held.go.set()
    assert await asyncio.gather(*calls) == list(sizes)
    assert held.order == ["first", "short", "middle", "long"]


async def test_whoever_leaves_or_fails_is_in_nobodys_way() -> None:
    lane, held = LargeBodies(), Held()
    at_work = asyncio.create_task(lane.run(1, lambda: held.work("left while it was read", fails=True)))
    await begun(held)
    waiting = asyncio.create_task(lane.run(1, lambda: held.work("left while it waited")))
    last = asyncio.create_task(lane.run(BYTES_A_SECOND, lambda: held.work("last", fails=True)))
    await asyncio.sleep(0)
    for leaves in (at_work, waiting):
        leaves.cancel()
    gone = await asyncio.gather(at_work, waiting, return_exceptions=True)
    assert [type(one) for one in gone] == [asyncio.CancelledError] * 2
    assert held.order == ["left while it was read"], "its thread goes on, and the next one waits for that"
    held.go.set()
    with pytest.raises(ValueError, match="last"):
        await last
    assert await lane.run(1, lambda: "free again") == "free again"


@pytest.mark.parametrize(
    ("body", "is_large"),
    [(b"x" * (512 << 10), False), (b"x" * (513 << 10), True), (b"[" + b"1," * 8001 + b"1]", True)],
)
def test_what_is_large(body: bytes, is_large: bool) -> None:
    assert large_bytes(body) == (len(body) if is_large else 0)
