"""The worker pool at its ordinary work, with real processes, on both event loops."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.pools import LOOPS, MIB, Gate, all_at_work, children, running

from workers.channel import KEEP_BYTES, PIECE_BYTES
from workers.parse import Rejected
from workers.pool import Pool, QueueFull, Stopped

pytestmark = pytest.mark.anyio


@pytest.fixture(params=LOOPS, ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


async def until(task: asyncio.Task[bytes]) -> None:
    """Let the loop go round until the task waits for something."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()


async def test_content_of_any_size_comes_back_whole() -> None:
    """Behind a job of any length, also where the job keeps a view of it."""
    async with running() as pool:
        for size in (0, 1, 100 << 10, PIECE_BYTES, PIECE_BYTES + 1, KEEP_BYTES, 60 * MIB, 3, 9 * MIB, 20 * MIB):
            body = os.urandom(size)
            assert await pool.run(b"echo", body) == await pool.run(b"echo", bytearray(body)) == body
            if 0 < size <= 20 * MIB:
                assert await pool.run(b"leak", body) == body
        for length in range(1, 20):
            assert await pool.run(b"echo " + b"j" * length, b"body") == b"body"
        assert pool.counters().crashes == 0


async def test_many_jobs_at_once_each_get_their_own_result() -> None:
    bodies = [os.urandom(1 + (17 * number) % 3000) * (200 if number % 10 == 0 else 1) for number in range(300)]
    async with running(3, max_waiting=300) as pool:
        assert await asyncio.gather(*(pool.run(b"echo", body) for body in bodies)) == bodies
        counters = pool.counters()
    assert (counters.jobs, counters.busy, counters.waiting, counters.crashes) == (300, 0, 0, 0)


async def test_a_rejection_arrives_with_its_message_and_costs_no_child() -> None:
    async with running() as pool:
        pid = await pool.run(b"pid", b"")
        with pytest.raises(Rejected, match=r"^choices are missing: é$"):
            await pool.run("reject choices are missing: é".encode(), b"secret")
        assert await pool.run(b"pid", b"") == pid
        assert pool.counters().crashes == 0


async def test_waiting_is_bounded_and_in_order(gate: Gate) -> None:
    order: list[int] = []

    async def numbered(number: int) -> None:
        await pool.run(b"echo", b"")
        order.append(number)

    async with running(1, max_waiting=3) as pool:
        held = asyncio.create_task(pool.run(gate.job, b""))
        await gate.reached()
        waiting = [asyncio.create_task(numbered(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert pool.counters().waiting == 3
        with pytest.raises(QueueFull):
            await pool.run(b"echo", b"")
        gate.open()
        await asyncio.gather(held, *waiting)
        assert order == [0, 1, 2]
        assert await pool.run(b"echo", b"there is room again") == b"there is room again"


async def test_a_cancelled_job_is_finished_and_its_result_dropped_or_not_begun(gate: Gate, tmp_path: Path) -> None:
    async with running() as pool:
        held = asyncio.create_task(pool.run(gate.job, b""))
        await gate.reached()
        unwanted = asyncio.create_task(pool.run(f"write {tmp_path / 'trace'}".encode(), b"x"))
        following = asyncio.create_task(pool.run(b"echo", b"mine"))
        await until(following)
        for task in (held, unwanted):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (pool.counters().busy, pool.counters().waiting) == (1, 1)
        gate.open(b"not mine")
        assert await following == b"mine"
        assert not (tmp_path / "trace").exists()
        assert (pool.counters().crashes, pool.counters().busy) == (0, 0)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 5, 8, 12, 40, 80])
async def test_a_cancellation_at_any_step_leaves_the_channel_in_order(turns: int) -> None:
    """Also while content is copied, in both directions: `turns` are turns of the loop."""
    body = os.urandom(6 * PIECE_BYTES)
    async with running(1) as pool:
        await pool.run(b"echo", b"")
        large = asyncio.create_task(pool.run(b"echo", body))
        for _ in range(turns):
            await asyncio.sleep(0)
        large.cancel()
        following = [asyncio.create_task(pool.run(b"echo", str(n).encode())) for n in range(3)]
        assert await asyncio.gather(*following) == [b"0", b"1", b"2"]
        await asyncio.wait([large])
        assert (pool.counters().crashes, pool.counters().busy) == (0, 0)


async def test_the_loop_goes_round_while_a_large_body_is_copied() -> None:
    body = os.urandom(40 * MIB)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with running() as pool:
        await pool.run(b"echo", b"")
        counting = asyncio.create_task(count())
        async with asyncio.timeout(30):
            await pool.run(b"write /dev/null", body)
        counting.cancel()
    assert turns >= len(body) // PIECE_BYTES


async def test_children_know_no_setting_and_hold_no_descriptor_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TURNLOG_UPSTREAM_API_KEY", "sk-of-the-engine")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-host")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    with (tmp_path / "database").open("w") as database:
        os.set_inheritable(database.fileno(), True)
        async with running(3) as pool:
            await all_at_work(pool, tmp_path)
            for pid in children():
                names = {entry.partition("=")[0] for entry in Path(f"/proc/{pid}/environ").read_text().split("\0")}
                assert {"PATH", "PYTHONPATH", "LC_ALL", "OMP_NUM_THREADS"} < names
                assert not [name for name in names if "KEY" in name or name.startswith(("TURNLOG_", "PYTEST_"))]
                assert "sk-" not in Path(f"/proc/{pid}/cmdline").read_text()
                files = sorted(Path(f"/proc/{pid}/fd").iterdir(), key=lambda fd: int(fd.name))
                files = [fd for fd in files if "libffi" not in os.readlink(fd)]  # a newer one opens itself
                kinds = [os.readlink(fd).partition(":")[0] for fd in files]
                assert sorted(kinds[3:]) == ["/memfd", "/memfd", "socket"]  # Python's mmap keeps a duplicate
                assert [kinds[0], kinds[1]] == ["pipe", "/dev/null"]
                assert len({fd.stat().st_ino for fd, kind in zip(files, kinds, strict=True) if kind == "/memfd"}) == 1


async def test_stop_lets_running_and_waiting_jobs_end(gate: Gate) -> None:
    pool = Pool(1, deadline_s=60, memory_bytes=512 * MIB, function="helpers.pool_jobs:act")
    pool.start()
    held = asyncio.create_task(pool.run(gate.job, b""))
    await gate.reached()
    waiting = asyncio.create_task(pool.run(b"echo", b"waited"))
    stopping = asyncio.create_task(pool.stop(60))
    await asyncio.sleep(0)
    with pytest.raises(Stopped):
        await pool.run(b"echo", b"too late")
    assert not stopping.done()
    gate.open(b"done")
    assert await asyncio.gather(held, waiting) == [b"done", b"waited"]
    await stopping
    assert pool.counters().alive == 0
    assert children() == set()


async def test_stop_without_grace_ends_jobs_that_run_and_wait(gate: Gate) -> None:
    async with running() as pool:
        held = asyncio.create_task(pool.run(gate.job, b""))
        await gate.reached()
        waiting = asyncio.create_task(pool.run(b"echo", b""))
        await until(waiting)
        await pool.stop(0.01)
        for task in (held, waiting):
            with pytest.raises(Stopped):
                await task


async def test_stop_leaves_nothing() -> None:
    never_started = Pool(2, deadline_s=1, memory_bytes=MIB)
    await never_started.stop(1)
    with pytest.raises(Stopped):
        await never_started.run(b"", b"")
    gc.collect()
    loop_alone = set(os.listdir("/proc/self/fd")), threading.active_count()
    async with running(3) as pool:
        await asyncio.gather(*(pool.run(b"echo", bytes(MIB)) for _ in range(9)))
    async with running(2):
        pass  # stopped before a child was ready
    assert children() == set()
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == loop_alone
