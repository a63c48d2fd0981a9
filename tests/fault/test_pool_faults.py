"""What happens to jobs and to the worker pool when processes die, hang or run out of memory."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from helpers.pools import LOOPS, MIB, Gate, all_at_work, children, gone, running

from workers.channel import Reason
from workers.child import ALARM_MARGIN_S
from workers.pool import Crashed, NoWorker

pytestmark = [pytest.mark.anyio, pytest.mark.long]

TESTS = Path(__file__).parent.parent


ON_BOTH_LOOPS = pytest.mark.parametrize("anyio_backend", LOOPS, ids=["asyncio", "uvloop"])


@pytest.fixture
def anyio_backend() -> Any:
    """The service's own, but for `ON_BOTH_LOOPS`."""
    return LOOPS[1]


@pytest.fixture
def mark(tmp_path: Path) -> str:
    """A path; `…_once` jobs do what they are named for unless it exists, and make it."""
    return str(tmp_path / "mark")


async def test_a_job_whose_child_is_killed_is_done_by_another(mark: str) -> None:
    body = os.urandom(3 * MIB)
    async with running(2) as pool:
        assert await pool.run(f"die_once {mark}".encode(), body) == body
        assert (pool.counters().jobs, os.path.exists(mark)) == (1, True)


@ON_BOTH_LOOPS
async def test_a_child_killed_from_outside_in_mid_job(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    async with running(1) as pool:
        job = asyncio.create_task(pool.run(gate.job, b""))
        await gate.reached()
        (first,) = children()
        os.kill(first, signal.SIGKILL)
        assert await asyncio.to_thread(gone, first, 5)
        gate.open()
        await gate.reached()
        assert children() != {first}
        gate.open(b"second attempt")
        assert await job == b"second attempt"
        assert pool.counters().crashes == 1


@pytest.mark.parametrize(
    ("job", "reason", "message"),
    [
        ("die", Reason.DIED, "died"),
        ("exit 0", Reason.DIED, "died"),
        ("fault of mine", Reason.FAULT, "failed"),
        ("allocate 300000000", Reason.MEMORY, "ran out of memory"),
    ],
)
async def test_a_job_that_ends_two_children_is_given_up(job: str, reason: Reason, message: str) -> None:
    async with running(2, memory_bytes=200 * MIB) as pool:
        with pytest.raises(Crashed) as caught:
            await pool.run(job.encode(), b"content")
        assert caught.value.reasons == [reason, reason]
        assert str(caught.value) == f"a worker {message}; then a worker {message}"
        assert await pool.run(b"echo", b"well") == b"well"


@ON_BOTH_LOOPS
@pytest.mark.parametrize("job", ["stop", "doze"])
async def test_a_job_past_its_deadline_is_given_up(job: str) -> None:
    async with running(2, deadline_s=0.5) as pool:
        with pytest.raises(Crashed, match=r"a worker took longer than 0\.5 s; then a worker took longer than 0\.5 s"):
            await pool.run(job.encode(), b"")


async def test_memory_is_counted_beside_program_and_content() -> None:
    async with running(1, memory_bytes=100 * MIB) as pool:
        assert await pool.run(f"allocate {50 * MIB}".encode(), b"") == str(50 * MIB).encode()
        body = os.urandom(90 * MIB)
        assert await pool.run(b"echo", body) == body
        with pytest.raises(Crashed, match="ran out of memory"):
            await pool.run(f"allocate {110 * MIB}".encode(), body)


async def test_a_fault_is_logged_by_type_and_place_not_by_content(capfd: pytest.CaptureFixture[str], mark: str) -> None:
    async with running(1) as pool:
        assert await pool.run(f"fault_once {mark}".encode(), b"a secret") == b"a secret"
    told = capfd.readouterr().err
    assert "KeyError at" in told
    assert "pool_jobs.py:" in told
    assert mark not in told
    assert "secret" not in told


async def test_jobs_of_a_pool_without_patience_end_with_its_last_child(tmp_path: Path) -> None:
    """An export makes its rows itself then, and does not wait for the next child."""
    gate = Gate(tmp_path / "gate")
    async with running(1, patience_s=0) as pool:
        while not pool.counters().alive:
            await asyncio.sleep(0.01)
        jobs = [asyncio.create_task(pool.run(job, b"")) for job in (gate.job, b"echo")]
        await gate.reached()
        (child,) = children()
        os.kill(child, signal.SIGKILL)
        assert [type(ended) for ended in await asyncio.gather(*jobs, return_exceptions=True)] == [NoWorker] * 2
        with pytest.raises(NoWorker):
            await pool.run(b"echo", b"")
    gate.close()


@ON_BOTH_LOOPS
async def test_the_pool_is_whole_again_after_all_of_it_was_killed(tmp_path: Path) -> None:
    async with running(3) as pool:
        for _ in range(2):
            await all_at_work(pool, tmp_path)
            killed = children()
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            await all_at_work(pool, tmp_path)
            assert not killed & children()


async def test_a_child_that_never_began_with_a_job_is_no_attempt(tmp_path: Path) -> None:
    """Two that were stopped while idle take the job one after the other; a third may still try it twice."""
    async with running(2, deadline_s=3.0) as pool:
        await all_at_work(pool, tmp_path)
        stopped = children()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        assert await pool.run(f"die_once {tmp_path / 'mark'}".encode(), b"content") == b"content"
        assert pool.counters().crashes >= len(stopped)


async def test_a_child_that_dies_while_it_starts_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_module(
        monkeypatch,
        tmp_path,
        "frail",
        f"""
        import os
        if not os.path.exists({str(tmp_path / "mark")!r}):
            open({str(tmp_path / "mark")!r}, "w").close()
            os._exit(7)
        def echo(job, body):
            return bytes(body)
    """,
    )
    async with running(1, function="frail:echo") as pool:
        assert await pool.run(b"", b"content") == b"content"
        assert pool.counters().crashes == 1


async def test_children_that_cannot_start_are_tried_at_growing_intervals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_module(monkeypatch, tmp_path, "hopeless", "raise SystemExit(7)")
    async with running(2, function="hopeless:any") as pool:
        waiting = asyncio.create_task(pool.run(b"", b""))
        while pool.counters().crashes < 7:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        counters = pool.counters()
        assert (counters.alive, counters.waiting) == (0, 0)
    pauses = Counter(re.findall(r"the next one starts in (\S+) s", caplog.text))
    assert set(pauses.values()) <= {1, 2}, "each of the two doubles its own"
    assert {"0.05", "0.10", "0.20"} <= set(pauses)


async def test_a_child_ignores_the_signals_that_its_group_gets() -> None:
    async with running(2) as pool:
        await pool.run(b"echo", b"")
        before = await pool.run(b"pid", b"")
        for sent in (signal.SIGINT, signal.SIGTERM):
            os.kill(int(before), sent)
        assert await pool.run(b"pid", b"") == before
        assert pool.counters().crashes == 0


def write_module(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, text: str) -> None:
    """A module that children find because this process would."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(folder)


@contextmanager
def owner_with_children(path: Path, deadline_s: float) -> Iterator[tuple[subprocess.Popen[bytes], int, set[int]]]:
    """A process with a pool: it, its child that spins in C code, all its children. Whatever is left is killed."""
    os.mkfifo(path)
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}
    owner = subprocess.Popen([sys.executable, "-m", "helpers.pool_owner", str(path), str(deadline_s)], env=environment)
    found: set[int] = set()
    try:
        spinning = int(path.read_text())
        found = children(owner.pid)
        yield owner, spinning, found
    finally:
        owner.kill()
        owner.wait()
        for pid in found:
            if not gone(pid, 0):
                os.kill(pid, signal.SIGKILL)


def memory_of(pid: int) -> list[str]:
    """A line for each piece that a process has mapped, with its file's name."""
    return Path(f"/proc/{pid}/maps").read_text().splitlines()


def test_nothing_is_left_of_a_pool_whose_owner_is_killed(tmp_path: Path) -> None:
    with owner_with_children(tmp_path / "pipe", 600) as (owner, spinning, pids):
        assert spinning in pids
        assert len(pids) == 2
        assert not [line for pid in (owner.pid, *pids) for line in memory_of(pid) if "/dev/shm/" in line]
        owner.kill()
        owner.wait()
        assert all(gone(pid, 60) for pid in pids)


def test_a_child_ends_itself_behind_the_deadline(tmp_path: Path) -> None:
    """Where its parent neither ends nor does its duty: stopped, it watches no deadline."""
    with owner_with_children(tmp_path / "pipe", 1) as (owner, spinning, _):
        owner.send_signal(signal.SIGSTOP)
        assert gone(spinning, ALARM_MARGIN_S + 10)
        owner.send_signal(signal.SIGCONT)
