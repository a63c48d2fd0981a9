"""A bounded cache of sessions: their folds, and the messages and tokens that the next request repeats.

Correctness does not depend on it. A turn trusts an entry only if its version equals the one at which the claim was
taken. An entry can be dropped at any time and is read again from the log.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import ParamSpec, TypeVar, cast

import msgspec

from app.domain.calls import OddCalls, sampled_calls
from app.domain.decide import TurnBlobs
from app.domain.events import (
    COMPLETIONS,
    BlobsTombstoned,
    Recorded,
    SessionErased,
    SessionRestored,
    TurnCommitted,
    TurnOpened,
    UnknownEvent,
)
from app.domain.known_body import ContinuedBody, KnownBodies, KnownBody
from app.domain.retention import ChunkUses
from app.domain.rules import TreeIndex
from app.domain.session import Session, Turn, apply, encode_session
from app.errors import AppError, Restored, SessionClosed, SessionNotFound, SessionReclaimed, SessionUnreadable
from app.process import cancelled
from app.sessions import images
from app.store.content import load_frames, unpack_messages, unpack_tokens
from app.store.log_sessions import SaveSnapshot
from app.store.ports import Database, Writer, of_session
from app.store.sessions import (
    SNAPSHOT_FORMAT,
    ContentColumns,
    Frames,
    continues,
    decode_events,
    events_since,
    fold_rows,
    load_session,
)
from workers import codec
from workers.codec import CorruptContent, Messages
from workers.parse_prompt import Hasher, KnownText

ENTRY_BYTES = 7 << 10
TURN_BYTES = 1536
CHUNK_BYTES = 256
"""Approximate memory in bytes of an entry, of each of its turns, and of each chunk that its payloads name: what Python
allocates for them beside texts, and a tenth."""


class PrefixBuffer:
    """The items of one chain of turns from its beginning: `text`, in which turn `turns[n]` ends at `ends[n]`. A
    rollback cuts it; a commit appends to it.

    The next request's history or prompt is assembled from it, without a copy: if a turn still uses what it was given
    when the chain changes, the change is made to a copy.
    """

    def __init__(self) -> None:
        self.text = bytearray()
        self.turns: list[int] = []
        self.ends: list[int] = []

    def copy(self) -> PrefixBuffer:
        made = PrefixBuffer()
        made.text, made.turns, made.ends = self.text[:], self.turns[:], self.ends[:]
        return made

    def upto(self, turn: int) -> memoryview | None:
        """The items up to the end of turn `turn`; None if they are not in memory."""
        index = bisect.bisect_left(self.turns, turn)
        if index == len(self.turns) or self.turns[index] != turn:
            return None
        return memoryview(self.text)[: self.ends[index]].toreadonly()

    def extend(self, parent: int, turn: int, items: bytes, trimmed: int = 0) -> None:
        """Add a turn's items after those of `parent` (0: they begin a chain), without the parent's last `trimmed`
        items.

        If `parent` is not in memory, nothing is kept; the chain is read from the store when it is needed. Items can be
        trimmed only if they contain no commas. The ends of turns in the trimmed part are then unknown.
        """
        kept = bisect.bisect_right(self.turns, parent)
        known = parent == 0 or (kept > 0 and self.turns[kept - 1] == parent)
        kept = kept if known else 0
        del self.turns[kept:], self.ends[kept:]
        self._cut(self.ends[-1] if self.ends else 0)
        if not known:
            return
        if trimmed:
            for _ in range(trimmed):
                self._cut(max(self.text.rfind(b","), 0))
            while self.ends and self.ends[-1] > len(self.text):
                del self.turns[-1], self.ends[-1]
        added = b"," + items if self.text and items else items
        try:
            self.text += added
        except BufferError:
            self.text = self.text + added
        self.turns.append(turn)
        self.ends.append(len(self.text))

    def _cut(self, size: int) -> None:
        """Keep the first `size` bytes."""
        try:
            del self.text[size:]
        except BufferError:
            self.text = self.text[:size]


MOST_CHAINS = 64
MOST_CHAIN_BYTES = 16 << 20
"""How many chains are kept, and their size together: those whose turns were used last, at least one."""


class PrefixBuffers:
    """The chains of a session whose next requests are likely; `size` are the bytes of all."""

    def __init__(self) -> None:
        self._chains: list[PrefixBuffer] = []
        self.size = 0

    def upto(self, turn: int) -> memoryview | None:
        """The items up to the end of turn `turn`; None if they are not in memory."""
        chains = self._chains
        if chains and chains[-1].turns and chains[-1].turns[-1] == turn:
            return memoryview(chains[-1].text).toreadonly()
        for chain in reversed(chains):
            buffer = chain.upto(turn)
            if buffer is not None:
                self.use(chain)
                return buffer
        return None

    def extend(self, parent: int, turn: int, items: bytes, trimmed: int = 0) -> None:
        """Add a turn's items to the chain of `parent`, as `PrefixBuffer.extend`; other chains stay."""
        newest = self._chains[-1] if self._chains else None
        if newest is None or not newest.turns or newest.turns[-1] != parent or trimmed:
            chain = self._chain_to_extend(parent) or PrefixBuffer()
            chain.extend(parent, turn, items, trimmed)
            self.use(chain)
            return
        added = b"," + items if newest.text and items else items
        try:
            newest.text += added
        except BufferError:  # A turn still uses what it was given.
            newest.text = newest.text + added
        newest.turns.append(turn)
        newest.ends.append(len(newest.text))
        self.size += len(added)
        if len(self._chains) > 1 and self.size > MOST_CHAIN_BYTES:
            self.use(newest)

    def _chain_to_extend(self, parent: int) -> PrefixBuffer | None:
        """The chain that ends with `parent`, or a copy of one that has it."""
        if not parent:
            return None
        of_parent = [chain for chain in reversed(self._chains) if chain.upto(parent) is not None]
        ending = next((chain for chain in of_parent if chain.turns[-1] == parent), None)
        return ending or (of_parent[0].copy() if of_parent else None)

    def use(self, chain: PrefixBuffer) -> None:
        """Keep a chain, as the one that was used last."""
        if not self._chains or self._chains[-1] is not chain:
            self._chains = [*(other for other in self._chains if other is not chain), chain]
        self.size = sum(len(kept.text) for kept in self._chains)
        while len(self._chains) > MOST_CHAINS or (len(self._chains) > 1 and self.size > MOST_CHAIN_BYTES):
            self.size -= len(self._chains.pop(0).text)


class StoredContent:
    """Frames of turns that were read with the log: `exchanges` for the messages, `tokens` for the tokens
    (a small turn's are in its exchange). They are dropped when they are first asked for: the next turn
    needs them once, and finds its messages and tokens in memory then."""

    def __init__(self) -> None:
        self.exchanges: dict[int, bytes | None] = {}
        self.tokens: Frames = {}

    @property
    def size(self) -> int:
        """Bytes of all frames."""
        frames = [*self.exchanges.values(), *itertools.chain(*self.tokens.values())]
        return sum(len(frame) for frame in frames if frame is not None)


class CacheEntry:
    """A session's state, and its messages, tokens and newest requests as far as they are in memory.

    `newest_seen` is the number of the newest event that this process has appended. `committing` is held while a turn of
    a tree is committed here, so that this process's commits do not make each other stale. `pinned_upto` is the last
    event that a checkpoint has of the session, as far as this process has heard; 0 for none. `unread` is the stored
    content that was read with the log and that no turn has asked for yet. `newest_blobs` are the parameters that
    the newest turn here sent, the kinds and hashes of what else it stores once, and the numbers of these: most turns of
    a session repeat them.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.index = TreeIndex(session.turns)
        self.uses = ChunkUses(session.every_payload.values())
        self.pinned_upto = 0
        self.messages = PrefixBuffers()
        self.tokens = PrefixBuffers()
        self.bodies = KnownBodies()
        self.keyed = {turn.retry_key: turn.number for turn in session.turns if turn.retry_key is not None}
        self.newest_seen = 0
        self.newest_blobs: tuple[tuple[bytes, Sequence[tuple[str, str]]], TurnBlobs] | None = None
        self.unread = StoredContent()
        self._every_index: TreeIndex | None = None
        self.committing = asyncio.Lock()

    @property
    def every_index(self) -> TreeIndex:
        """As `index`, with the turns that are undone too."""
        if self._every_index is None:
            self._every_index = TreeIndex(self.session.every_turn)
        return self._every_index

    def advance(self, events: Iterable[Recorded]) -> bool:
        """Apply new events; False if they do not follow the entry's version, or a restore has changed what was known:
        the entry is out of date."""
        for recorded in events:
            before, event = self.session, recorded.event
            if recorded.seq != before.version + 1 or isinstance(event, SessionRestored):
                return False
            after = self.session = apply(before, recorded, before.session_id)
            if isinstance(event, TurnCommitted):
                turn = after.turns.newest
                assert turn is not None
                self.index.add(turn)
                if self._every_index is not None:
                    self._every_index.add(turn)
                if event.payloads:
                    self.uses.add(after.payloads[event.turn])
                if turn.retry_key is not None:
                    self.keyed[turn.retry_key] = turn.number
            elif isinstance(event, BlobsTombstoned):
                for number in event.turns:
                    self.uses.remove(before.every_payload.get(number, ()))
                    self.uses.add(after.every_payload.get(number, ()))
            elif isinstance(event, SessionErased):
                self.uses = ChunkUses()
        return True


class Eviction:
    """An ended session, which takes no more turns; else any one.

    Not the one that was used longest ago: where sessions take their turns one after another, it is the one whose turn
    is next. Turns that missed in a simulation of sessions of 20 turns each:

        intervals between turns    room for 7 of 10 live sessions    room for all
        even                       1.00, here 0.50                   0.58, here 0.00
        lognormal, sigma 0.5       0.55, here 0.39                   0.11, here 0.00
        lognormal, sigma 1.0       0.22, here 0.22                   0.06, here 0.00
        lognormal, sigma 1.5       0.08, here 0.07                   0.03, here 0.00

    The draws are the same in each process, so that a simulation can be repeated.
    """

    def __init__(self) -> None:
        self._random = random.Random(0)
        self._names: list[str] = []
        self._places: dict[str, int] = {}
        self._ended: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._names)

    def add(self, name: str, *, is_ended: bool = False) -> None:
        """Add a session, or note that one has ended."""
        if name not in self._places:
            self._places[name] = len(self._names)
            self._names.append(name)
        if is_ended:
            self._ended[name] = None

    def discard(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        last = self._names.pop()
        if last != name:
            self._names[place] = last
            self._places[last] = place
        self._ended.pop(name, None)

    def next(self, besides: str) -> str | None:
        """A session other than `besides`; None if there is none."""
        ended = next((name for name in self._ended if name != besides), None)
        if ended is not None:
            return ended
        count = len(self._names) - (besides in self._places)
        if not count:
            return None
        name = self._names[self._random.randrange(count)]
        # The last one stands in for `besides`.
        return self._names[-1] if name == besides else name


log = logging.getLogger("turnlog.cache")

SNAPSHOT_EVENTS = 1024
"""A snapshot is saved when a turn's commit has taken the log past a multiple of this many events, and after a read of
at least this many."""


def require_open(entry: CacheEntry | None, session_id: str) -> CacheEntry:
    """The entry, if the session exists and is open.

    Raises SessionNotFound, SessionClosed, SessionReclaimed, Restored.
    """
    if entry is None:
        raise SessionNotFound.of(session_id)
    if entry.session.status == "closed" and entry.session.is_reclaimed:
        raise SessionReclaimed.of(session_id, "was closed because it was idle")
    if entry.session.status == "undone":
        raise Restored.of(session_id)
    if entry.session.status != "open":
        raise SessionClosed.of(session_id, f"is {entry.session.status}")
    return entry


class Lookups(msgspec.Struct):
    """How often a lookup found its content in the cache, and how often it had to read it."""

    hits: int = 0
    misses: int = 0


class SessionCache:
    """Drops entries when the total, counted approximately, exceeds `max_bytes`: first their newest requests, which save
    some milliseconds, then whole entries, those of ended sessions first (`Eviction`).

    `with_tokens`: turns need the tokens of their history, as with a tokenizer.
    """

    def __init__(self, database: Database, writer: Writer, max_bytes: int, *, with_tokens: bool = False) -> None:
        self.database = database
        self._content = ContentColumns.TOKENS if with_tokens else ContentColumns.EXCHANGE
        self._writer = writer
        self._max_bytes = max_bytes
        self._entries: dict[str, CacheEntry] = {}
        self._sizes: dict[str, int] = {}
        self._whole = Eviction()
        self._with_bodies = Eviction()
        self._bytes = 0
        self._loading: dict[str, asyncio.Task[CacheEntry | None]] = {}
        self._saving: set[asyncio.Task[None]] = set()
        self._session_lookups = Lookups()
        self.lookups = {"session": self._session_lookups, "messages": Lookups(), "tokens": Lookups()}

    @property
    def sessions(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Approximate memory in bytes."""
        return self._bytes

    async def get(self, session_id: str) -> CacheEntry | None:
        """The session as this process knows it, for a turn: on a miss its content is read with the log."""
        live = self._entries.get(session_id)
        if live is None or live.session.version < live.newest_seen:
            return await self._get(session_id, self._content)
        self._session_lookups.hits += 1
        return live

    async def open(self, session_id: str) -> CacheEntry:
        """As `get`. Raises as `require_open`."""
        live = self._entries.get(session_id)
        if live is None or live.session.version < live.newest_seen or live.session.status != "open":
            return require_open(await self.get(session_id), session_id)
        self._session_lookups.hits += 1
        return live

    async def _get(self, session_id: str, content: ContentColumns) -> CacheEntry | None:
        live = self._entries.get(session_id)
        if live is not None and live.session.version < live.newest_seen:
            # Events were appended that follow others which this process has not seen.
            return await self.refresh(session_id)
        if live is not None:
            self._session_lookups.hits += 1
            return live
        self._session_lookups.misses += 1
        return await self._load(session_id, content)

    def known(self, session_id: str) -> Session | None:
        """The session as this process last saw it, if it is in the cache."""
        live = self._entries.get(session_id)
        return None if live is None else live.session

    async def current(self, session_id: str) -> CacheEntry | None:
        """The current session: from the cache with one API process, otherwise refreshed from the log."""
        if self.database.is_sqlite:
            return await self._get(session_id, ContentColumns.NONE)
        return await self.refresh(session_id)

    async def refresh(self, session_id: str) -> CacheEntry | None:
        """The session with the events that other processes have appended since. Raises SessionUnreadable."""
        live = self._entries.get(session_id)
        if live is None:
            return await self._load_anew(session_id)
        known = live.session
        rows = await events_since(self.database, session_id, known.version)
        # The last known event is read again: after a PostgreSQL crash it may be lost or replaced.
        still = continues(known, rows)
        # Meanwhile another task may have advanced the entry, by fewer events than were just read.
        now = live.session
        still &= all(row.at == now.last_event_at for row in rows if row.seq == now.version)
        newer = [row for row in rows if row.seq > now.version]
        if not (still and live.advance(_readable(session_id, decode_events, newer))):
            self.drop(session_id)
            return await self._load_anew(session_id)
        self._account(session_id, live)
        return live

    def advance(self, session_id: str, events: Sequence[Recorded]) -> None:
        """Apply events that this process has just written."""
        live = self._entries.get(session_id)
        if live is None:
            # A load in progress may have read the log before these events, so it must read again.
            self._loading.pop(session_id, None)
            return
        known = live.session.version
        new = [recorded for recorded in events if recorded.seq > known]
        if not new:
            return
        if new[0].seq > known + 1:
            live.newest_seen = max(live.newest_seen, new[-1].seq)
        elif not live.advance(new):
            self.drop(session_id)
        elif len(new) > 1 or not isinstance(new[0].event, TurnOpened):  # A claim alone takes no room.
            self._account(session_id, live)

    def continued(self, session_id: str, body: bytes, protocol: str) -> ContinuedBody | None:
        """The body as far as it is known from an earlier one of its session in this protocol."""
        live = self._entries.get(session_id)
        return None if live is None else live.bodies.continued(body, protocol)

    def remember(
        self,
        session_id: str,
        number: int,
        messages: bytes,
        tokens: bytes | None,
        layout: KnownBody | None = None,
        prefix_hasher: Hasher | None = None,
        text: KnownText | None = None,
    ) -> None:
        """Keep a committed turn's messages, the text of its tokens if known, and its body if it has a layout, for the
        next request. `prefix_hasher` is that of the body's messages, `text` the text of all tokens."""
        live = self._entries.get(session_id)
        if live is None:
            return
        turn = live.session.turns.newest
        if turn is None or turn.number != number:
            turn = live.session.turns.get(number)
        if turn is None:
            return
        if live.unread.exchanges or live.unread.tokens:
            live.unread = StoredContent()
        if turn.protocol not in COMPLETIONS:
            live.messages.extend(turn.history_parent, number, messages)
        if tokens is not None:
            trimmed = _trimmed(live.session, turn)
            live.tokens.extend(turn.token_parent, number, tokens, trimmed)
        if layout is not None and prefix_hasher is not None:
            continued = layout.continued
            layout.keep(turn.protocol, number, prefix_hasher, text)
            live.bodies.add(layout, continued, turn.history_parent)
            self._with_bodies.add(session_id)
        self._account(session_id, live)
        # So that a miss on a long session reads few events.
        if (turn.opened_seq - 1) // SNAPSHOT_EVENTS != live.session.version // SNAPSHOT_EVENTS:
            self._save_later(live.session)

    def drop(self, session_id: str) -> None:
        if self._entries.pop(session_id, None) is not None:
            self._bytes -= self._sizes.pop(session_id)
            self._whole.discard(session_id)
            self._with_bodies.discard(session_id)

    async def messages(self, live: CacheEntry, turn: int) -> bytes | memoryview:
        """The raw JSON of the history after turn `turn`, joined by commas. Raises SessionUnreadable."""
        kept = live.messages.upto(turn)
        if kept is not None:
            self.lookups["messages"].hits += 1
            return kept
        self.lookups["messages"].misses += 1
        session_id = live.session.session_id
        chain = live.session.message_chain(turn)
        numbers = [member.number for member in chain]
        exchanges, live.unread.exchanges = live.unread.exchanges, {}
        known: Frames = {number: (None, exchange) for number, exchange in exchanges.items()}
        saids = await self._messages(session_id, numbers, known)
        made = PrefixBuffer()
        stored = [message for member in chain for message in saids[member.number].messages]
        messages = iter(await images.put_back(self.database, live.session, stored))
        for member in chain:
            said = saids[member.number]
            own = itertools.islice(messages, len(said.messages))
            made.extend(member.history_parent, member.number, b",".join((*own, said.message)))
        live.messages.use(made)
        self._account(session_id, live)
        return made.upto(turn) or b""

    async def tokens(self, live: CacheEntry, turn: int) -> bytes:
        """The ids of all tokens after turn `turn` as decimal text, joined by commas. Raises SessionUnreadable."""
        kept = live.tokens.upto(turn)
        if kept is not None:
            self.lookups["tokens"].hits += 1
            return bytes(kept)
        self.lookups["tokens"].misses += 1
        session = live.session
        chain = session.token_chain(turn)
        numbers = [member.number for member in chain]
        known, live.unread.tokens = live.unread.tokens, {}
        frames = await self._frames(session.session_id, numbers, known, exchange=False)
        token_bytes = sum(len(tokens or exchange or b"") for tokens, exchange in frames.values())

        def loaded() -> PrefixBuffer:
            made = PrefixBuffer()
            tokens = unpack_tokens(frames, numbers)
            for member in chain:
                ids = tokens[member.number].suffix_ids + tokens[member.number].output_ids
                made.extend(member.token_parent, member.number, id_text(ids), _trimmed(session, member))
            return made

        try:
            made = loaded() if token_bytes <= SMALL_TOKENS else await asyncio.to_thread(loaded)
        except CorruptContent as error:
            raise self.database.unreadable.error(session.session_id, error) from error
        live.tokens.use(made)
        self._account(session.session_id, live)
        return bytes(made.upto(turn) or b"")

    async def read_odd_calls(self, live: CacheEntry) -> None:
        """Read the calls that clients may return otherwise, of turns that the indexes do not know them of.

        Raises SessionUnreadable.
        """
        if live.index.odd_calls.unread:
            await self._read_odd_calls(live, live.index.odd_calls)
        if live.session.undone and live.every_index.odd_calls.unread:
            await self._read_odd_calls(live, live.every_index.odd_calls)

    async def _read_odd_calls(self, live: CacheEntry, odd: OddCalls) -> None:
        session_id = live.session.session_id
        numbers = list(odd.unread)
        messages = await self._messages(session_id, numbers, {})
        for number in numbers:
            odd.learn(number, sampled_calls(messages[number].message))

    async def _messages(self, session_id: str, numbers: Sequence[int], known: Frames) -> Mapping[int, Messages]:
        frames = await self._frames(session_id, numbers, known, tokens=False)
        try:
            return await _off_loop(len(numbers), lambda: unpack_messages(frames, numbers))
        except CorruptContent as error:
            raise self.database.unreadable.error(session_id, error) from error

    async def _frames(
        self, session_id: str, numbers: Sequence[int], known: Frames, *, tokens: bool = True, exchange: bool = True
    ) -> Frames:
        """The frames of these turns, of which `known` were read with the log."""
        missing = [number for number in numbers if number not in known]
        if not missing:
            return known
        return known | await of_session(
            self.database, session_id, load_frames, missing, tokens=tokens, exchange=exchange
        )

    async def close(self) -> None:
        await cancelled(*self._loading.values(), *self._saving)

    async def _load_anew(self, session_id: str) -> CacheEntry | None:
        """As `_load`, but with a read that starts now: a read already in progress may miss acknowledged events."""
        task = self._loading.get(session_id)
        if task is None or task.done():
            return await self._load(session_id, ContentColumns.NONE)
        await self._load(session_id, ContentColumns.NONE)
        return await self.refresh(session_id)

    async def _load(self, session_id: str, content: ContentColumns) -> CacheEntry | None:
        """Concurrent misses of one session share one read, which continues if a request is cancelled."""
        task = self._loading.get(session_id)
        if task is None or task.done():  # A done one has not been taken out yet; it may have found nothing.
            task = self._loading[session_id] = asyncio.create_task(self._read(session_id, content))

            def ended(done: asyncio.Task[CacheEntry | None]) -> None:
                if self._loading.get(session_id) is done:
                    del self._loading[session_id]

            task.add_done_callback(ended)
        return await asyncio.shield(task)

    async def _read(self, session_id: str, content: ContentColumns) -> CacheEntry | None:
        own = asyncio.current_task()
        while True:
            loaded = await load_session(self.database, session_id, content)
            fold = partial(_readable, session_id, fold_rows, session_id, loaded.snapshot, loaded.rows)
            session = await _off_loop(len(loaded.rows), fold)
            newest = self._loading.get(session_id)
            if newest is own:
                if session is not None and len(loaded.rows) >= SNAPSHOT_EVENTS:
                    self._save_later(session)
                return None if session is None else self._put_read(session, loaded.frames, content)
            if newest is not None:
                return await newest
            self._loading[session_id] = cast("asyncio.Task[CacheEntry | None]", own)

    def _put_read(self, session: Session, frames: Frames, content: ContentColumns) -> CacheEntry:
        live = self.put(session)
        if live.session is session and frames:
            live.unread.exchanges = {number: exchange for number, (_, exchange) in frames.items()}
            if content is ContentColumns.TOKENS:
                live.unread.tokens = {
                    number: (tokens, exchange if tokens is None else None)
                    for number, (tokens, exchange) in frames.items()
                }
            self._account(session.session_id, live)
        return live

    def put(self, session: Session) -> CacheEntry:
        """Add a fold, unless the cache has a newer one."""
        session_id = session.session_id
        live = self._entries.get(session_id)
        if live is None or live.session.version < session.version:
            live = CacheEntry(session)
            self.drop(session_id)
            self._entries[session_id] = live
            self._sizes[session_id] = 0
            self._whole.add(session_id)
            self._account(session_id, live)
        return live

    def _account(self, session_id: str, live: CacheEntry) -> None:
        """Update the size of an entry that is still in the cache, and drop others if the cache is too large."""
        if self._entries.get(session_id) is not live:
            return
        session = live.session
        size = ENTRY_BYTES + TURN_BYTES * (session.turns.count + session.undone.count)
        size += CHUNK_BYTES * live.uses.references + live.messages.size + live.tokens.size + live.bodies.size
        if live.newest_blobs is not None:
            size += len(live.newest_blobs[0][0])
        if live.unread.exchanges or live.unread.tokens:
            size += live.unread.size
        self._bytes += size - self._sizes[session_id]
        self._sizes[session_id] = size
        if session.status != "open":
            self._whole.add(session_id, is_ended=True)
            if live.bodies.size:
                self._with_bodies.add(session_id, is_ended=True)
        if self._bytes <= self._max_bytes:
            return
        while self._bytes > self._max_bytes and (other := self._with_bodies.next(session_id)) is not None:
            self._drop_bodies(other)
        if self._bytes > self._max_bytes and live.bodies.size:
            self._drop_bodies(session_id)
        while self._bytes > self._max_bytes and (other := self._whole.next(session_id)) is not None:
            self.drop(other)

    def _drop_bodies(self, session_id: str) -> None:
        live = self._entries[session_id]
        self._bytes -= live.bodies.size
        self._sizes[session_id] -= live.bodies.size
        live.bodies = KnownBodies()
        self._with_bodies.discard(session_id)

    def _save_later(self, session: Session) -> None:
        task = asyncio.create_task(self._save(session))
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, session: Session) -> None:
        data = await asyncio.to_thread(lambda: codec.compress(encode_session(session)))
        operation = SaveSnapshot(session.session_id, session.version, SNAPSHOT_FORMAT, data)
        try:
            await self._writer.submit(operation)
        except AppError as error:
            log.warning("a snapshot of session %s could not be saved: %s", session.session_id, error)


def id_text(ids: bytes) -> bytes:
    """Token ids (little-endian int32) as a `PrefixBuffer` of tokens holds them."""
    return codec.render_ids(memoryview(ids).cast("i"), ",")[1:-1]


def _trimmed(session: Session, turn: Turn) -> int:
    return session.turn(turn.parent).token_count - turn.base_tokens if turn.base_tokens else 0


OFF_LOOP = 64
"""Up to this many rows are decoded on the event loop (about 1 ms), more on a thread."""

SMALL_TOKENS = 32 << 10
"""Stored tokens of up to so many bytes (about 2,000 sampled ones) are rendered on the event loop, more on a thread."""

P = ParamSpec("P")
T = TypeVar("T")


async def _off_loop(rows: int, work: Callable[[], T]) -> T:
    return work() if rows <= OFF_LOOP else await asyncio.to_thread(work)


def _readable(session_id: str, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return read(*args, **kwargs)
    except UnknownEvent as error:
        raise SessionUnreadable(f"session {session_id}: {error}") from error
