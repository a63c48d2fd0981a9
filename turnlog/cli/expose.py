"""`turnlog expose`: runs a forwarder, and has sessions begin with the public address that it prints."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO
from urllib.parse import urlsplit

import typer

from turnlog.cli.remote import connected, remote
from turnlog.cli.running import INTERRUPTED, Failure, UsageError, say, wants_json
from turnlog.client.address import TOKENS
from turnlog.errors import NotFound, NotTurnlog, TurnlogError, Unavailable, Unreachable

if TYPE_CHECKING:
    from turnlog.client._sync.transport import Transport

LEASE_S, RENEW_S = 120.0, 40.0
"""How long an address stands after an `expose` that was killed, and how often one that lives renews it."""

FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S = 1.0, 30.0, 60.0
"""The pauses before a forwarder that has died is started again; after so long a life the first one."""

SILENT_S = 30.0
"""A forwarder that has printed no address by then: the command says what to do."""

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_S, TAKE_BACK_S, CHECK_S = 5.0, 2.0, 20.0
LONGEST_LINE = 1 << 16

PATTERNS = {
    "cloudflared": r"https://[a-z0-9-]+\.trycloudflare\.com",
    "ngrok": r"\burl=(https?://\S+)",
    "bore": r"listening at (\S+)",
}
"""Forwarders that print other addresses before their own, or theirs without a scheme."""

_URL = re.compile(r"https?://[^\s\"'<>|,;()\[\]]+")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def expose(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(help="The forwarder and its arguments, after `--`.")],
    public_url: Annotated[
        str | None,
        typer.Option(
            help="The public address, if the forwarder does not print it; {} in it stands for what --pattern finds."
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        typer.Option(
            help="A regular expression that finds the address in the forwarder's output; its first group, if any."
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Also expose a server that requires no token.")] = False,
) -> None:
    """Make the server reachable from elsewhere: run a forwarder, and give sessions the address that it prints.

    If the forwarder dies, it is restarted; a new address replaces the old one. At the end the address is withdrawn.
    """
    named = pattern or (None if public_url else PATTERNS.get(Path(command[0]).name))
    if public_url is not None and "{}" in public_url and pattern is None:
        raise UsageError("--public-url with {} needs a --pattern that finds what {} stands for")
    try:
        finds = re.compile(named) if named else None
    except re.error as error:
        raise UsageError(f"--pattern: {error}") from None
    server = remote(ctx)
    try:
        if not insecure:
            _require_tokens(server.read("GET", "/public-url"))
    except NotFound as error:
        raise Failure(f"the server takes no public address: add public_url to its TURNLOG_FEATURES ({error})") from None
    given = None if public_url is None else public_url.rstrip("/")
    exposing = _Exposing(server, command, given, finds, wants_json(ctx), insecure=insecure)
    hangs_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN  # not under nohup
    ends = [number for number in ENDS if hangs_up or number != signal.SIGHUP]
    before = {number: signal.signal(number, exposing.interrupt) for number in ends}
    try:
        exposing.run()
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        exposing.end(ctx.obj.url, ctx.obj.token)
        for number, handler in before.items():
            signal.signal(number, handler)


def _require_tokens(told: Mapping[str, Any]) -> None:
    """Raises Failure."""
    if not told["needs_token"]:
        raise Failure(
            "the server requires no token: whoever finds the address could read and change everything. Set "
            "TURNLOG_ADMIN_TOKEN at the server, or pass --insecure"
        )


class _Exposing:
    """A forwarder, one life after the other, and the address that is set for it."""

    def __init__(
        self,
        server: Transport,
        command: list[str],
        given: str | None,
        pattern: re.Pattern[str] | None,
        as_json: bool,
        *,
        insecure: bool,
    ) -> None:
        self._server = server
        self._insecure = insecure
        self._command = command
        self._name = Path(command[0]).name
        self._given = given
        self._pattern = pattern
        self._as_json = as_json
        self._process: subprocess.Popen[bytes] | None = None
        self._told: queue.SimpleQueue[str | int | typer.Exit] = queue.SimpleQueue()
        """Lines that the forwarder prints, then its exit code; what ends the command."""
        self._address: str | None = None
        self._is_new = True
        self._renew_at = 0.0
        self._is_interrupted = False

    def run(self) -> None:
        """Raises Failure for a forwarder that ends before it has an address, TurnlogError."""
        if self._given is not None and "{}" not in self._given:
            self._set(self._given)
        wait_s = FIRST_WAIT_S
        while True:
            began = time.monotonic()
            code = self._live()
            how = f"{self._name} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
            if self._address is None:
                raise Failure(f"{how} before it printed an address: --pattern REGEX or --public-url URL may help")
            wait_s = FIRST_WAIT_S if time.monotonic() - began > STEADY_S else wait_s
            say(f"{how}; restarting it in {wait_s:.0f} s")
            self._until(time.monotonic() + wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def interrupt(self, number: int, frame: object) -> None:
        """A signal ends the command where it waits for what is told. An exception here could leave a lock taken, or be
        lost in a callback; a second signal raises it all the same, for a server that does not answer.
        """
        end = typer.Exit(INTERRUPTED if number == signal.SIGINT else 0)
        if self._is_interrupted:
            raise end
        self._is_interrupted = True
        self._told.put(end)

    def end(self, url: str, token: str | None) -> None:
        """Take the address back, and end the forwarder with what it has started."""
        if self._address is not None:
            try:
                with contextlib.closing(connected(url, token, TAKE_BACK_S)) as server:
                    server.call("DELETE", "/public-url", parameters={"url": self._address})
                say(f"{self._address} is withdrawn")
            except TurnlogError as error:
                say(f"{self._address} could not be withdrawn, new sessions get it for {LEASE_S:.0f} s more: {error}")
        process = self._process
        if process is None or process.poll() is not None:
            return
        _kill(process, signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            _kill(process, signal.SIGKILL)
            process.wait()

    def _live(self) -> int:
        """Run the forwarder until it ends; its exit code. Raises Failure if there is no such program."""
        environment = {name: value for name, value in os.environ.items() if name not in TOKENS}
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, env=environment, process_group=0
            )
        except OSError as error:
            raise Failure(f"{self._command[0]} could not be started: {error.strerror}") from None
        self._process, self._is_new = process, True
        assert process.stdout is not None and process.stderr is not None  # noqa: PT018
        out = sys.stderr.buffer if self._as_json else sys.stdout.buffer
        readers = [
            threading.Thread(target=self._pass_on, args=pair, daemon=True)
            for pair in ((process.stdout, out), (process.stderr, sys.stderr.buffer))
        ]
        threading.Thread(target=self._await, args=(process, readers), daemon=True).start()
        hint_at: float | None = time.monotonic() + SILENT_S
        while True:
            told = self._next(hint_at)
            if isinstance(told, int):
                return told
            if told is not None and (found := self._found(_ESCAPE.sub("", told))) is not None:
                self._set(found)
            if self._address is not None:
                hint_at = None
            elif hint_at is not None and time.monotonic() > hint_at:
                say(f"{self._name} has printed no address: pass --pattern REGEX to find it, or --public-url URL")
                hint_at = None

    def _pass_on(self, stream: BinaryIO, out: BinaryIO) -> None:
        with stream:
            while line := stream.readline(LONGEST_LINE):
                with contextlib.suppress(OSError):
                    out.write(line)
                    out.flush()
                self._told.put(line.decode(errors="replace"))

    def _await(self, process: subprocess.Popen[bytes], readers: list[threading.Thread]) -> None:
        for reader in readers:
            reader.start()
        code = process.wait()
        _kill(process, signal.SIGKILL)  # what it has started may hold its port, and its output
        for reader in readers:
            reader.join(END_S)
        self._told.put(code)

    def _next(self, until: float | None) -> str | int | None:
        """What the forwarder tells next; None after `until`. The address is renewed meanwhile. Raises typer.Exit."""
        while True:
            now = time.monotonic()
            if self._address is not None and now >= self._renew_at:
                self._put(self._address)
                continue
            wakes = [at for at in (until, self._renew_at if self._address is not None else None) if at is not None]
            try:
                told = self._told.get(timeout=max(0.0, min(wakes) - now) if wakes else None)
            except queue.Empty:
                if until is not None and time.monotonic() >= until:
                    return None
                continue
            if isinstance(told, typer.Exit):
                raise told
            return told

    def _until(self, moment: float) -> None:
        while self._next(moment) is not None:
            pass

    def _found(self, line: str) -> str | None:
        """The address in a line of the forwarder's, if it is one to take."""
        if self._pattern is not None:
            match = self._pattern.search(line)
            if match is None:
                return None
            text = match[1] if match.re.groups else match[0]
            if self._given is not None:
                return self._given.replace("{}", text)
            return _read(text if "://" in text else f"http://{text}")
        if self._given is not None:
            return None
        for text in _URL.findall(line):
            url = _read(text.rstrip(".:!?"))
            if url is None or _is_local(url):
                continue
            if self._is_new or self._address is None or _are_akin(url, self._address):
                return url
        return None

    def _set(self, address: str) -> None:
        self._is_new = False
        if address == self._address:
            return
        self._put(address)
        say(f"the url of new sessions begins with {address}")
        if self._as_json:
            from turnlog.cli.output import machine

            machine({"url": address})
        # Made here: a thread that loads certificates while the process ends has crashed it.
        asking = connected(address, None, CHECK_S, has_answered=True)
        threading.Thread(target=_check, args=(address, asking), daemon=True).start()

    def _put(self, address: str) -> None:
        """Raises TurnlogError where another try does not help."""
        before, self._address, wait_s = self._address, address, RENEW_S  # also if this is interrupted before the reply
        try:
            told = self._server.read("PUT", "/public-url", body={"url": address, "lease_s": LEASE_S})
            if not self._insecure:
                _require_tokens(told)  # It may have been started again without them.
        except (Unreachable, Unavailable, NotTurnlog) as error:
            say(f"the server did not accept the address: {error}")
            wait_s = FIRST_WAIT_S
        except TurnlogError:
            self._address = before
            raise
        self._renew_at = time.monotonic() + wait_s


def _kill(process: subprocess.Popen[Any], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _read(text: str) -> str | None:
    """The address, or None if it is none below which a session could be."""
    from turnlog.client.address import address

    try:
        return address(text)
    except ValueError:
        return None


def _is_local(url: str) -> bool:
    """Does the address lead to this machine, wherever it is asked for?"""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def _are_akin(one: str, other: str) -> bool:
    """Are these two addresses of one forwarder: another port, or another first part of the name?"""
    first, second = (urlsplit(url).hostname or "" for url in (one, other))
    return first == second or first.partition(".")[2] == second.partition(".")[2] != ""


def _check(address: str, asking: Transport) -> None:
    """Say so if what is at the address is not a server of ours. It may not be reached from here, and still be right."""
    try:
        with contextlib.closing(asking):
            if asking.read("GET", "/health").get("session_server_instance_id") is not None:
                return
            why = "another service is there"
    except TurnlogError as error:
        why = str(error)
    say(f"{address} does not answer as this server from here ({why}); if it is not the forwarder's, pass --pattern")
