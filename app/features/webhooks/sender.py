"""Sends the notices: one process at a time, each receiver by a task of its own that waits for no other."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import logging
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from app.crash_points import reach
from app.domain.fleet import EngineDied, Fleet
from app.domain.patterns import webhook_key
from app.domain.selection import Selection, selection_of
from app.errors import AppError
from app.features.webhooks import rows
from app.features.webhooks.rows import LEASE, BeginCursors, Cursor, MoveCursor, Notice, Pending
from app.fleet.member import Member
from app.process import cancelled
from app.settings import Network
from app.store.incarnations import ReleaseLease, TakeLease
from app.upstream.client import JSON, ONCE, target_of
from app.upstream.http import Connections, EngineError

if TYPE_CHECKING:
    from app.services import Services

log = logging.getLogger("turnlog.webhooks")

EVERY_S, RETRY_S = 1.0, 5.0
"""Pauses between two looks at the log, and after one that failed; another process is asked for the lease as often."""

LEASE_S = 30.0

CONNECT_S, ANSWER_S = 5.0, 15.0
"""How long a receiver may take; an attempt ends before the lease does."""

WRITE_EVERY_S = 30.0
"""How often a cursor is written that passed nothing to deliver."""

GATED_S = 10.0
"""No session counts as stuck until so long after a gate has opened: its turn may have waited there."""

SAME_DEATH_S = 60.0
"""Processes that find an engine dead within this time have found the same death."""

REMEMBERED = 3 * rows.PAGE
"""Ids of notices that a receiver has just got, as many as one read finds: where it fails in the middle, those before
are not sent again."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""Pauses after a failed attempt: each twice as long as the one before."""

NAT64 = ip_network("64:ff9b::/96")


class Undelivered(Exception):
    """The receiver did not answer 2xx."""


class Receiver:
    """One address, and which sessions it is told about (`wanted`). Nothing of it is shown or stored but its host and
    port: its path may be a secret."""

    def __init__(self, url: str, may_connect: partial[bool]) -> None:
        self.url, _, told = url.partition("#")
        self.wanted = selection_of(told) if told else Selection()
        parts = urlsplit(self.url)
        self.shown = parts.netloc
        self.key = hashlib.sha256(url.encode()).hexdigest()[:32]
        self.connections = Connections(CONNECT_S, None if _is_named(parts.hostname or "") else may_connect)
        self.cursor: Cursor | None = None
        self.quiet_from: float | None = None
        self.wrote_at = 0.0
        self.failures = 0
        self.delivered: OrderedDict[str, None] = OrderedDict()

    async def post(self, headers: list[tuple[str, str]], body: bytes) -> None:
        """Raises Undelivered. A redirect is not followed, and the answer's body is not read."""
        try:
            origin, target = target_of(self.url)
            connection = await self.connections.connect(origin)
            try:
                connection.begin(self.connections.loop.time() + ANSWER_S)
                lines = [*headers, JSON, ("user-agent", "turnlog"), ("content-length", str(len(body))), ONCE]
                head = f"POST {target}" + "".join(f"{name}: {value}\r\n" for name, value in lines)
                connection.transport.write(f"{head}\r\n".encode("latin-1") + body)
                await connection.head()
                status = connection.status
            finally:
                connection.transport.abort()
        except EngineError as error:
            raise Undelivered(f"{type(error).__name__}: {error}") from error
        if not 200 <= status < 300:
            raise Undelivered(f"it answered {status}")


class Sender:
    """Runs from `start` to `stop`, in every process; the one with the lease sends."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        self._services = services
        self._stuck_s = settings.webhook_stuck_s
        self._public_url = settings.public_url
        self._keys = [webhook_key(secret) for secret in settings.webhook_secret]
        may_connect = partial(_may_connect, networks=settings.webhook_networks)
        self._receivers = [Receiver(url, may_connect) for url in settings.webhooks]
        self._fence: int | None = None  # of the lease, while this process has it
        self._ask_lease_at = 0.0
        self._noted: dict[str, float | None] = {}  # deaths of engines: since when
        self._tasks: list[asyncio.Task[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """New receivers are told what happens from now on. Raises StoreFull, StoreUnavailable."""
        present = await self._services.database.read(rows.present)
        await self._services.writer.submit(BeginCursors([one.key for one in self._receivers], present))

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="turnlog-webhooks")

    async def stop(self) -> None:
        await cancelled(self._task)
        await cancelled(*self._tasks)
        for receiver in self._receivers:
            await receiver.connections.close()
        if self._fence is not None:
            with contextlib.suppress(AppError):
                await self._services.writer.submit(ReleaseLease(LEASE, self._fence))

    async def _run(self) -> None:
        while True:
            try:
                await self._note_deaths()
                await self._keep_lease()
            except AppError as error:
                log.warning("webhooks wait for the store: %s", error)
            except Exception:
                log.exception("unexpected error in the sender of webhooks")
            await asyncio.sleep(EVERY_S)

    async def _note_deaths(self) -> None:
        """Every process checks the engines for itself; who finds one dead first notes it for all."""
        for url, member in list(self._services.engines.members.items()):
            if member.health != "dead" or self._noted.get(url) == member.since:
                continue
            reason = member.last_error or ""

            def decide(fleet: Fleet, member: Member = member, reason: str = reason) -> EngineDied | None:
                if self._services.clock() - fleet.died.get(member.url, 0.0) < SAME_DEATH_S:
                    return None
                return EngineDied(member.url, reason, member.run)

            if await self._services.fleet.append(decide) is not None:
                reach("after_engine_died")
            self._noted[url] = member.since

    async def _keep_lease(self) -> None:
        """Renew the lease in time, or ask for it, and run the receivers' tasks while it is held."""
        now = asyncio.get_running_loop().time()
        if now < self._ask_lease_at:
            return
        incarnation, lease_s = self._services.registration.incarnation(), self._services.recovery.lease_to_judge_by()
        fence = await self._services.writer.submit(TakeLease(LEASE, incarnation, LEASE_S, lease_s))
        self._ask_lease_at = now + (RETRY_S if fence is None else LEASE_S / 3)
        if self._fence == fence:
            return
        await cancelled(*self._tasks)
        self._fence = fence
        for receiver in self._receivers:
            self._count(receiver, 0)  # another process counts those that wait now
        self._tasks = [] if fence is None else [asyncio.create_task(self._serve(one, fence)) for one in self._receivers]

    async def _serve(self, receiver: Receiver, fence: int) -> None:
        """Deliver to one receiver, in the order of the log, until another process has the lease."""
        receiver.cursor, receiver.wrote_at = None, self._services.clock()
        while True:
            pause = EVERY_S
            try:
                if not await self._step(receiver, fence):
                    return
                self._count(receiver, 0)
            except Undelivered as error:
                self._count(receiver, receiver.failures + 1)
                pause = pause_s(receiver.failures)
                log.warning("a webhook to %s is retried in %g s: %s", receiver.shown, pause, error)
            except AppError as error:
                log.warning("webhooks wait for the store: %s", error)
                pause = RETRY_S
            except Exception:
                log.exception("unexpected error in a webhook to %s", receiver.shown)
                pause = RETRY_S
            await asyncio.sleep(pause)

    async def _step(self, receiver: Receiver, fence: int) -> bool:
        """Deliver what one read finds. False: another process has the lease. Raises Undelivered, StoreUnavailable,
        StoreFull."""
        database, now = self._services.database, self._services.clock()
        cursor = receiver.cursor or await database.read(partial(rows.cursor_of, receiver=receiver.key))
        if cursor is None:
            cursor = await database.read(rows.present)
        while True:
            found = await self._pending(receiver, cursor, now)
            for notice in found.notices:
                if notice.id not in receiver.delivered:
                    await self._deliver(receiver, notice)
            reached = found.cursor
            if self._stuck_s is None:
                reached = msgspec.structs.replace(reached, quiet=reached.finished)
            is_due = bool(found.notices) or now >= receiver.wrote_at + WRITE_EVERY_S
            if is_due and reached != receiver.cursor:
                if not await self._services.writer.submit(MoveCursor(fence, receiver.key, reached)):
                    return False
                receiver.wrote_at = now
            has_moved, cursor = reached != cursor, reached
            receiver.cursor = reached
            if not has_moved:
                return True

    async def _pending(self, receiver: Receiver, cursor: Cursor, now: float) -> Pending:
        upto = (await self._services.log_end.now()).synced
        old_before = None  # Events written earlier count as quiet; there can be none yet, or a gate explains it.
        shut = self._services.fleet.fleet.shut_after(now - GATED_S)
        if self._stuck_s is not None and None not in shut:
            quiet, limit = receiver.quiet_from, now - self._stuck_s
            old_before = limit if quiet is None or quiet < limit else None
        read = partial(rows.pending, cursor=cursor, upto=upto, old_before=old_before, wanted=receiver.wanted, shut=shut)
        found = await self._services.database.read(read, one_moment=True)
        if old_before is not None:
            receiver.quiet_from = found.quiet_from
        return found

    async def _deliver(self, receiver: Receiver, notice: Notice) -> None:
        """Raises Undelivered."""
        body = notice.body(self._public_url)
        await receiver.post(signed(self._keys, notice.id, int(self._services.clock()), body), body)
        reach("after_webhook_sent")
        receiver.delivered[notice.id] = None
        if len(receiver.delivered) > REMEMBERED:
            receiver.delivered.popitem(last=False)
        self._services.metrics.add("turnlog_webhooks_total", "delivered")

    def _count(self, receiver: Receiver, failures: int) -> None:
        receiver.failures = failures
        if failures:
            self._services.metrics.add("turnlog_webhooks_total", "failed")
        waiting = sum(bool(one.failures) for one in self._receivers)
        self._services.metrics.set("turnlog_webhooks_waiting", waiting)


def _is_named(host: str) -> bool:
    """Does the setting itself name the address, without a look-up that somebody else could answer?"""
    with contextlib.suppress(ValueError):
        return bool(ip_address(host))
    return host == "localhost"


def _may_connect(address: str, networks: tuple[Network, ...]) -> bool:
    """Is it a public address, or in a network that the operator has named? One that stands for an IPv4 address is that
    one: `::ffff:127.0.0.1` is loopback."""
    found = ip_address(address)
    if isinstance(found, IPv6Address):
        translated = IPv4Address(found.packed[-4:]) if found in NAT64 else None
        found = found.ipv4_mapped or found.sixtofour or translated or found
    is_local = found.is_multicast or found.is_reserved or (isinstance(found, IPv6Address) and found.is_site_local)
    return (found.is_global and not is_local) or any(found in network for network in networks)


def signed(keys: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> list[tuple[str, str]]:
    """The headers of an attempt at `timestamp`, in seconds since the epoch, with a signature by each key:
    https://www.standardwebhooks.com, version 1.0."""
    content = f"{message_id}.{timestamp}.".encode() + body
    made = (base64.b64encode(hmac.digest(key, content, "sha256")).decode() for key in keys)
    return [
        ("webhook-id", message_id),
        ("webhook-timestamp", str(timestamp)),
        ("webhook-signature", " ".join(f"v1,{signature}" for signature in made)),
    ]


def pause_s(failures: int) -> float:
    """How long to wait after so many failed attempts in a row, at least one."""
    return min(FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30), LONGEST_PAUSE_S)
