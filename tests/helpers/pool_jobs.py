"""What the pool's tests have its children run: `act` does what the job's first word says. Imports little."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from workers.parse import Rejected


def act(job: memoryview, body: memoryview) -> bytes:
    """The job is `<word> <argument>`, the argument mostly a path."""
    word, _, argument = bytes(job).decode().partition(" ")
    result: bytes = globals()[f"_{word}"](argument, body)
    return result


def _echo(argument: str, body: memoryview) -> bytes:
    return bytes(body)


def _pid(argument: str, body: memoryview) -> bytes:
    return str(os.getpid()).encode()


def _reject(argument: str, body: memoryview) -> bytes:
    raise Rejected(argument)


def _hold(argument: str, body: memoryview) -> bytes:
    """Until somebody has opened the pipe of that name and closed it again; what was written into it."""
    return Path(argument).read_bytes()


def _write(argument: str, body: memoryview) -> bytes:
    Path(argument).write_bytes(body)
    return b""


def _first_time(argument: str) -> bool:
    try:
        os.close(os.open(argument, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _die(argument: str, body: memoryview) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b"still alive"


def _die_once(argument: str, body: memoryview) -> bytes:
    return _die(argument, body) if _first_time(argument) else bytes(body)


def _stop(argument: str, body: memoryview) -> bytes:
    os.kill(os.getpid(), signal.SIGSTOP)
    return b"went on"


def _exit(argument: str, body: memoryview) -> bytes:
    os._exit(int(argument))


def _spin(argument: str, body: memoryview) -> bytes:
    """In C code that keeps the GIL; if an argument is given, after it has written its pid to that path."""
    if argument:
        Path(argument).write_text(str(os.getpid()))
    return str(3 ** (10**9)).encode()


def _doze(argument: str, body: memoryview) -> bytes:
    time.sleep(3600)
    return b""


def _allocate(argument: str, body: memoryview) -> bytes:
    return str(len(bytearray(int(argument)))).encode()


def _inflate(argument: str, body: memoryview) -> bytes:
    return bytes(int(argument))


def _fault(argument: str, body: memoryview) -> bytes:
    raise KeyError(argument)


def _fault_once(argument: str, body: memoryview) -> bytes:
    return _fault(argument, body) if _first_time(argument) else bytes(body)


def _leak(argument: str, body: memoryview) -> bytes:
    """Keep a view of the body for ever."""
    _leaked.append(body[:1])
    return bytes(body)


_leaked: list[memoryview] = []
