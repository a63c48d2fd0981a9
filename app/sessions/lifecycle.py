"""Creates, rewards and closes sessions."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from app.crash_points import reach
from app.domain import decide
from app.domain.canonical import digest
from app.domain.events import DEFAULT_RUN, BlobRef, CloseReason, Failure, SessionConfig, SessionCreated, SessionFinished
from app.domain.session import Session, engine_session_of, fold
from app.errors import (
    AlreadyFinished,
    AppError,
    InvalidRequest,
    Restored,
    RunMismatch,
    SessionChanged,
    SessionClosed,
    SessionEnded,
    SessionExists,
    SessionNotFound,
    SessionUnreadable,
    StoreDamaged,
    StoreFull,
    TooManySessions,
)
from app.process import FeatureFaults
from app.sessions.cache import CacheEntry, SessionCache, require_open
from app.sessions.event_log import Followers, wait_for_change
from app.store import rollouts
from app.store.dialect import NoRoom
from app.store.log import Appended, Operation, Refused, StoredBlob, VoidedClaim
from app.store.log_sessions import (
    AssignReward,
    Circular,
    Close,
    Create,
    Existing,
    Finish,
    JoinRollout,
    OfRun,
    ShareReward,
)
from app.store.ports import Database, Writer
from workers import codec

log = logging.getLogger("turnlog.sessions")

Clock = Callable[[], float]


class NewSession(msgspec.Struct, frozen=True):
    """A client's request for a session. `config` has the settings' defaults already. `name` is set where the client
    chose it (`Names`)."""

    session_id: str
    config: SessionConfig
    metadata: dict[str, Any] | None
    name: str | None = None
    generation: int | None = None


def made_session_id() -> str:
    """An id that nobody can guess: 32 hex digits, of which the first 12 are the time in milliseconds.

    Rows of sessions that run at one time are then neighbours in every index that begins with the session, and a group
    of turns changes a third fewer of SQLite's pages.
    """
    return f"{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


OnClose = Callable[[str, Sequence[VoidedClaim]], None]


class Sessions:
    """`clock` gives seconds since the epoch. `names_engine_sessions`: engines know sessions by an id, and are told when
    one is closed."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        cache: SessionCache,
        followers: Followers,
        clock: Clock,
        feature_faults: FeatureFaults,
        *,
        names_engine_sessions: bool = False,
    ) -> None:
        self._database = database
        self._writer = writer
        self._cache = cache
        self._followers = followers
        self._clock = clock
        self._feature_faults = feature_faults
        self._names_engine_sessions = names_engine_sessions
        self._on_close: list[OnClose] = []
        self.is_full = False
        self._making: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def on_close(self, callback: OnClose) -> None:
        """Call `callback` with a session's id and the claims that were ended, as soon as a close is on disk;
        a fault in it is logged and counted."""
        self._on_close.append(callback)

    async def create(self, new: NewSession) -> str:
        """Idempotent for the same id and body. The session's id, which is another one if its name is there under that.

        Raises SessionExists, SessionEnded, Restored, StoreFull, SessionClosed (the root of its rollout is),
        InvalidRequest (its parent descends from it), RunMismatch, RunClosed, RunOverBudget (its run is).
        """
        await self.require_room(new.session_id)
        blob = metadata_blob(new.metadata) if new.metadata else None
        named = None if new.config.run == DEFAULT_RUN else new.config.run  # the same session, whether it is named
        body_hash = hash_of(msgspec.structs.replace(new.config, run=named), new.metadata or {})
        ref = None if blob is None else metadata_ref(blob)
        event = SessionCreated(new.config, body_hash, ref, name=new.name, generation=new.generation)
        reach("before_create")
        outcome = await self._writer.submit(Create(new.session_id, self._clock(), event, blob))
        reach("after_create")
        if isinstance(outcome, Existing):
            _require_same(outcome, body_hash)
            return outcome.session_id
        if isinstance(outcome, Circular):
            raise InvalidRequest(
                f"session {new.config.parent} descends from session {new.session_id} and cannot be its parent"
            )
        if isinstance(outcome, OfRun):
            raise _of_other_run(new.session_id, outcome.run, new.config.of_run)
        if isinstance(outcome, NoRoom):
            raise outcome.error
        if isinstance(outcome, Refused):
            raise _of_closed_root(new.session_id, outcome.status)
        created = fold(new.session_id, outcome.events)
        assert created is not None
        self._cache.put(created)
        await asyncio.gather(*map(self._tell_adopted, outcome.adopted))
        if new.config.parent is not None:
            await self._join_rollout(created)
        return new.session_id

    async def _tell_adopted(self, session_id: str) -> None:
        """Write into a session's log that its root is there now. One that was erased has no rows that change."""
        await self.apply(JoinRollout(session_id, self._clock()))

    async def require_room(self, *session_ids: str) -> None:
        """Raises StoreFull if one of these sessions is new and the database is larger than its limit."""
        if self.is_full and any([await self._cache.get(session_id) is None for session_id in session_ids]):
            raise StoreFull("the database is larger than TURNLOG_MAX_DB_BYTES: no new sessions")

    async def _join_rollout(self, created: Session) -> None:
        """Apply to a new session what happened to its root meanwhile. Raises SessionClosed, RunMismatch."""
        session_id = created.session_id
        root = await self._database.read(partial(rollouts.standing, session_id=session_id))
        if root is None:
            return
        if root.run != created.config.of_run:  # Root and session were created at the same moment.
            await self.close_if_open(session_id)
            raise _of_other_run(session_id, root.run, created.config.of_run)
        if root.status != "open":
            await self._close_with_root(session_id)
            raise _of_closed_root(session_id, root.status)
        if root.reward is not None:
            await self._share_reward(session_id)
        config = await self.config_of(root.root_id)
        limits = None if config is None else config.limits
        has_limits = limits is not None and limits.per == "rollout" and root.root_id not in created.budgets
        if has_limits or (root.evaluation and created.config.evaluation is not True):
            await self._tell_adopted(session_id)

    async def config_of(self, session_id: str) -> SessionConfig | None:
        """A session in any state; None if it does not exist. Raises SessionUnreadable."""
        live = await self._cache.get(session_id)
        return None if live is None else live.session.config

    async def ensure(self, new: NewSession) -> None:
        """Create the session unless one with this id exists, in any state."""
        if await self._cache.get(new.session_id) is None:
            with contextlib.suppress(SessionExists):
                await self.create(new)

    async def ensure_agents(self, new: NewSession, most: int) -> None:
        """As `ensure`, for the holder of a session's token: at most `most` sessions may be below its root.

        This process counts and creates them one at a time; several processes may each create one too many. Raises
        TooManySessions.
        """
        assert new.config.parent is not None
        root = await self._database.read(partial(rollouts.root_below, parent=new.config.parent))
        async with self._making.setdefault(root, asyncio.Lock()):
            if await self._cache.get(new.session_id) is not None:
                return
            if await self._database.read(partial(rollouts.count_below, root_id=root, most=most)) >= most:
                raise TooManySessions(
                    f"session {root} has {most} sessions below it, the most that its token may create "
                    "(TURNLOG_MAX_AGENT_SESSIONS)"
                )
            await self.ensure(new)

    async def assign_reward(
        self, session_id: str, reward: float, components: dict[str, float], turn: int | None
    ) -> int:
        """The seq of the assignment. Raises SessionNotFound, SessionClosed (erased), InvalidRequest."""
        live = await self._cache.current(session_id)
        event = decide.assign_reward(live.session if live else None, session_id, reward, components, turn)
        outcome = await self.apply(AssignReward(session_id, self._clock(), event))
        reach("after_reward")
        appended = _require(session_id, outcome)
        if turn is None and appended.may_have_members:
            async for members in self.members(session_id, "open", "closed"):
                await asyncio.gather(*map(self._share_reward, members))
        return appended.events[-1].seq

    async def finish(self, session_id: str, *, producer_finished: bool, wait_s: float) -> Session:
        """Let no more turns be opened, and wait at most so long for those in flight; returns the session then.

        Idempotent. Raises SessionNotFound, SessionClosed, AlreadyFinished (with another `producer_finished`).
        """
        session = (await self.require(session_id)).session
        if session.finished is None:
            event = SessionFinished(secrets.token_hex(16), producer_finished)
            _require(session_id, await self.apply(Finish(session_id, self._clock(), event)))
            reach("after_finish")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        with self._followers.follow(session_id) as changed:
            while True:
                changed.clear()
                session = (await self.require(session_id)).session
                if session.finished is None or session.finished.producer_finished != producer_finished:
                    raise AlreadyFinished(f"session {session_id} is already finished, with another producer_finished")
                left = deadline - loop.time()
                if not session.open_turns or left <= 0 or self._followers.stopping:
                    return session
                await wait_for_change(changed, left)

    async def close(
        self,
        session_id: str,
        reason: CloseReason = "deleted",
        *,
        revision: int | None = None,
        failed: Failure | None = None,
    ) -> None:
        """Close the session, and its whole rollout if it is a root; with `revision`, only if it still has that one
        and no turn in flight. `failed`: that has failed. Raises SessionNotFound, SessionClosed, SessionChanged.

        A turn in flight can no longer commit.
        """
        closing = msgspec.structs.replace(self._closing(session_id, reason), failed=failed)
        while True:
            if revision is not None:
                session = (await self.require(session_id)).session
                if session.open_turns or session.revision != revision:
                    raise SessionChanged(
                        f"session {session_id} is at {session.revision} and has {len(session.open_turns)} turns "
                        f"in flight; the request named {revision}"
                    )
                closing = msgspec.structs.replace(closing, known=session.version)
            outcome = await self.apply(closing)
            if isinstance(outcome, Appended) or outcome.status != "open":
                break  # Else something was written to it meanwhile.
        reach("after_close")
        appended = _require(session_id, outcome)
        self._closed(session_id, appended)
        if appended.may_have_members:
            await self.close_members(session_id)

    def _closing(self, session_id: str, reason: CloseReason = "deleted") -> Close:
        """The operation that closes a session."""
        return Close(session_id, self._clock(), reason, self.engine_session(session_id))

    def engine_session(self, session_id: str) -> str | None:
        """The session's id at engines, if they know one."""
        return engine_session_of(session_id) if self._names_engine_sessions else None

    async def close_if_open(self, session_id: str) -> None:
        """As `close`; a session that has ended may still have members of its rollout that are open.

        Raises SessionNotFound.
        """
        outcome = await self.apply(self._closing(session_id))
        reach("after_close")
        may_have_members = True
        if isinstance(outcome, Appended):
            self._closed(session_id, outcome)
            may_have_members = outcome.may_have_members
        elif outcome.status is None:
            raise SessionNotFound.of(session_id)
        if may_have_members:
            await self.close_members(session_id)

    async def close_members(self, root_id: str) -> None:
        """Close the open sessions of the rollout of a closed root."""
        async for members in self.members(root_id, "open"):
            await asyncio.gather(*map(self._close_with_root, members))

    async def members(self, root_id: str, *status: str) -> AsyncIterator[list[str]]:
        """The sessions of a root's rollout without the root, ordered by id."""
        after = ""
        while page := await self._database.read(
            partial(rollouts.members, root_ids=[root_id], status=status, after=after, limit=PAGE)
        ):
            yield [session_id for session_id, _ in page]
            after = page[-1][0]

    async def _close_with_root(self, session_id: str) -> None:
        outcome = await self.apply(self._closing(session_id, "root"))
        reach("after_child_closed")
        if isinstance(outcome, Appended):
            self._closed(session_id, outcome)

    async def _share_reward(self, session_id: str) -> None:
        await self.apply(ShareReward(session_id, self._clock()))
        reach("after_reward_shared")

    async def finish_closing(self) -> int:
        """Close the sessions that a killed process left open in rollouts whose root is closed; returns their number."""
        count, after = 0, ("", "")
        while session_ids := await self._database.read(partial(rollouts.outliving, after=after, limit=PAGE)):
            await asyncio.gather(*(self._close_with_root(session_id) for _, session_id in session_ids))
            count, after = count + len(session_ids), session_ids[-1]
        return count

    async def finish_rewarding(self, run: str | None = None) -> None:
        """Assign their root's reward to sessions that a killed process left without it, of this run or (None) of all.
        One that cannot be read is left as it is."""
        after = ("", "")
        find = partial(rollouts.without_roots_reward, limit=PAGE, run=run)
        while session_ids := await self._database.read(partial(find, after=after)):
            await asyncio.gather(*(self._share_reward_if_readable(session_id) for _, session_id in session_ids))
            after = session_ids[-1]

    async def _share_reward_if_readable(self, session_id: str) -> None:
        try:
            await self._share_reward(session_id)
        except (SessionUnreadable, StoreDamaged) as error:
            self._database.unreadable.warn(session_id, error)

    def _closed(self, session_id: str, outcome: Appended) -> None:
        for callback in self._on_close:
            try:
                callback(session_id, outcome.voided)
            except Exception:  # noqa: BLE001 - the close is on disk: a feature's fault may not cost its reply
                self._feature_faults.note(callback)

    async def apply(self, operation: Operation[Appended | Refused]) -> Appended | Refused:
        """Run an operation on a session; the cache and the followers know of its events when this returns.

        Raises StoreUnavailable, StoreFull: it may be done all the same.
        """
        session_id = operation.session_id
        try:
            outcome = await self._writer.submit(operation)
        except AppError:
            self._cache.drop(session_id)
            raise
        if isinstance(outcome, Appended):
            self._cache.advance(session_id, outcome.events)
            self._followers.notify(session_id)
        else:
            self._cache.drop(session_id)
        return outcome

    async def require(self, session_id: str) -> CacheEntry:
        """The current state of an open session. Raises SessionNotFound, SessionClosed."""
        return require_open(await self._cache.current(session_id), session_id)


PAGE = 500
"""Sessions of a rollout read in one query."""


def _require(session_id: str, outcome: Appended | Refused) -> Appended:
    """Raises as `refusal`."""
    if isinstance(outcome, Refused):
        raise refusal(session_id, outcome.status)
    return outcome


def refusal(session_id: str, status: str | None) -> AppError:
    """The error for a session that cannot be written to."""
    if status is None:
        return SessionNotFound.of(session_id)
    if status == "undone":
        return Restored.of(session_id)
    return SessionClosed.of(session_id, f"is {status}")


def _of_other_run(session_id: str, of_rollout: str, own: str) -> RunMismatch:
    return RunMismatch(f"session {session_id}: its rollout belongs to run {of_rollout}, not to {own}")


def _of_closed_root(session_id: str, status: str | None) -> SessionClosed:
    return SessionClosed(f"session {session_id} cannot be created: the root of its rollout is {status}")


def metadata_blob(metadata: Mapping[str, Any]) -> StoredBlob:
    """The metadata of a new session, its first blob."""
    raw = msgspec.json.encode(metadata)
    return StoredBlob(0, "metadata", len(raw), hashlib.sha256(raw).hexdigest(), codec.compress(raw))


def metadata_ref(blob: StoredBlob) -> BlobRef:
    return BlobRef(0, "metadata", blob.size, blob.hash)


def hash_of(*creation: Any) -> str:
    """Distinguishes a repeated creation from a conflicting one."""
    return digest(msgspec.json.encode(creation, order="sorted"))


def _require_same(existing: Existing, body_hash: str) -> None:
    session_id = existing.session_id
    if existing.status == "undone":
        raise Restored.of(session_id)
    if existing.status != "open":
        raise SessionEnded(f"session {session_id} is {existing.status}; an id is never used again")
    if existing.body_hash != body_hash:
        raise SessionExists(f"session {session_id} exists and was created with another body")
