"""The tables, alike on SQLite and PostgreSQL.

The key of what is of a session begins with it, so that PostgreSQL can distribute by it. `events`
is the truth; `sessions` and `open_turns` can be rebuilt from it; `turns`, `blobs` and `chunks` hold the
content that events refer to; `refused_replies` are for diagnosis; `snapshots` may be emptied at any time.
`fleet_events` is of no session. Features have tables of their own (`app.composition`).

Order over all sessions is (`tx`, `position`). SQLite has one writer, which numbers `position` without a
gap. PostgreSQL takes `position` from a sequence, which is not commit-ordered, and stamps the transaction
id: a reader stays below the oldest transaction that still runs and so never skips a late commit.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Identity,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    String,
    Table,
    Text,
    false,
    text,
)

from app.store.damage import Content
from app.store.dialect import current_tx, now

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

SESSION_ID = String(128)

SHORT_LIVED = {"autovacuum_vacuum_scale_factor": 0, "autovacuum_vacuum_threshold": 10000}
"""For tables whose rows exist for a short time: PostgreSQL's vacuum must not wait until a share of a mostly empty table
is dead."""

metadata = MetaData(naming_convention=NAMING)

store_meta = Table(
    "store_meta",
    metadata,
    Column("key", String(160), primary_key=True),
    Column("value", Text, nullable=False),
)
"""`epoch`: an export cursor names it; the restore of a backup or of all runs raises it. `epoch:<run>`, if there is one:
likewise, raised by the restore of that run's checkpoint, which also raises `epoch:*`, that of exports of all runs.
`log_epoch`: `<epoch>=<epoch of the log>` while they differ, since a checkpoint's restore leaves the log and its
positions as they are. `release`: that which brought the store to its revision. `objects`: the URL of the object
storage, if the store has any; `objects_owner`: the store's name there. `webhook:…`: how far a receiver of webhooks has
been told."""

incarnations = Table(
    "incarnations",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), Identity(), primary_key=True),
    Column("host", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("release", Text, nullable=False),
)
"""The processes that have served this store, and their releases; times are the database's own clock. Releases read the
rows of others, before and after a migration: these columns stay."""

leases = Table(
    "leases",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("holder", BigInteger),
    Column("fence", BigInteger, nullable=False),
    Column("until", Double, nullable=False),
)
"""Which process does a background work (`store.incarnations`): `holder` is its incarnation, null once released. A row
stays, since `fence` only grows; `until` is the database's clock."""

_OF_ROOT = text("root_id IS NOT NULL")
_OPEN_OF_ROOT = text("root_id IS NOT NULL AND status = 'open'")
_OPEN = text("status = 'open'")
_TAGGED = text("tags IS NOT NULL")
NAMED = text("name IS NOT NULL")

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", SESSION_ID, primary_key=True),
    Column("version", BigInteger, nullable=False),
    Column("status", String(16), nullable=False),
    Column("open_turns", Integer, nullable=False),
    Column("turns", Integer, nullable=False),
    Column("group_id", Text),
    Column("reward", Double),
    Column("created_at", Double, nullable=False),
    Column("updated_at", Double, nullable=False),
    Column("body_hash", String(32), nullable=False),
    Column("closed_at", Double),
    Column("attempt", Integer),
    Column("weight_version", BigInteger),
    Column("engine", Text),
    Column("root_id", SESSION_ID),
    Column("last_turn", Integer, server_default="0", nullable=False),
    Column("note", Text),
    Column("tags", Text),
    Column("spent_turns", Integer, server_default="0", nullable=False),
    Column("spent_tokens", BigInteger, server_default="0", nullable=False),
    Column("name", SESSION_ID),
    Column("generation", Integer),
    Column("run", SESSION_ID, nullable=False),
    Column("group_size", Integer),
    Column("failed", String(16)),
    Column("evaluation", Boolean, server_default=false(), nullable=False),
    Column("annotated", Text),
    Column("engine_errors", Integer, server_default="0", nullable=False),
    Column("tool_errors", Integer, server_default="0", nullable=False),
    Index("ix_sessions_created_at_session_id", "created_at", "session_id"),
    Index("ix_sessions_group_id_run", "group_id", "run"),
    Index("ix_sessions_run_created_at_session_id", "run", "created_at", "session_id"),
    Index("ix_sessions_open_run", "run", sqlite_where=_OPEN, postgresql_where=_OPEN),
    Index("ix_sessions_closed_at_session_id", "closed_at", "session_id"),
    Index("ix_sessions_weight_version", "weight_version"),
    Index("ix_sessions_run_weight_version", "run", "weight_version"),
    Index("ix_sessions_root_id", "root_id", sqlite_where=_OF_ROOT, postgresql_where=_OF_ROOT),
    Index("ix_sessions_open_root_id", "root_id", sqlite_where=_OPEN_OF_ROOT, postgresql_where=_OPEN_OF_ROOT),
    Index("ix_sessions_tagged", "created_at", "session_id", sqlite_where=_TAGGED, postgresql_where=_TAGGED),
    Index("ix_sessions_name", "name", "run", "generation", unique=True, sqlite_where=NAMED, postgresql_where=NAMED),
    sqlite_with_rowid=False,
    postgresql_with={"fillfactor": 50},
)
"""The head of each log; `version` is its last seq, `turns` counts committed ones, `last_turn` is the highest number
given to a turn.

Each turn updates it twice; with room beside it in its page none of its indexes is touched (99 % of the updates,
against a quarter in full pages). `weight_version` is the largest of its committed turns, discarded ones too, that is
a number; null where none is. `engine` is that of its newest committed turn, and has no index: each turn may change it.

`note` is a person's, null where there is none; `tags` are joined as `domain.notes` says, null where there are none.

`root_id` is the root of its rollout: the last session that its line of parents names, which need not be there (yet);
null where it names no parent. It follows from several logs: see `store.rollouts`.

`spent_turns` and `spent_tokens` are what its turns have used of limits (`features.budgets`): 0 where none held.

`run` is the training run that it belongs to: its root's.

`name` is what a client calls it, null where none chose a name; `generation` counts the sessions of a run's name from 1.
No two processes can begin the same one.

`failed` is the kind of its failure, null where it did not fail or a reward has come since; its message is in the log.

`annotated` are the names of the session's own annotations, sorted and joined as the tags; null where it has none.
`engine_errors` and `tool_errors` as in `domain.session.Session`.
"""

erased_runs = Table(
    "erased_runs",
    metadata,
    Column("run", SESSION_ID, primary_key=True),
    Column("upto", Double, nullable=False),
)
"""Runs that were erased with all of their sessions; `upto` is when the last of these was created. Those up to then are
not the run's that has the name now (`store.rollouts.is_of_run`)."""

open_turns = Table(
    "open_turns",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("turn", Integer, nullable=False),
    Column("parent_turn", Integer, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("body_hash", String(32), nullable=False),
    Column("retry_key", String(32)),
    Column("opened_at", Double, nullable=False),
    Column("adapter", Text),
    Column("reserved", BigInteger),
    PrimaryKeyConstraint("session_id", "fence"),
    sqlite_with_rowid=False,
    postgresql_with=SHORT_LIVED,
)
"""The claims. A linear session has at most one; the table does not say so, because a tree has many. `reserved` are the
tokens that the turn may sample, of limits that hold for it: given back with the row. Null: none holds."""

events = Table(
    "events",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("type", String(32), nullable=False),
    Column("version", SmallInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("data", Content, nullable=False),
    Column("tx", BigInteger, server_default=current_tx(), nullable=False),
    Column("position", BigInteger, Identity(), nullable=False),
    PrimaryKeyConstraint("session_id", "seq"),
    Index("ix_events_tx_position", "tx", "position"),
)
"""The log. `data` is the event's JSON; `at` is seconds since the epoch by the service's clock."""

fleet_events = Table(
    "fleet_events",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("key", Text, nullable=False),
    Column("type", String(32), nullable=False),
    Column("version", SmallInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("data", Content, nullable=False),
    Index("ix_fleet_events_key_seq", "key", "seq"),
)
"""The log of what is of no session: engines, and the gates of adapters and of the whole fleet (`domain.fleet`).

One stream for all processes, `seq` without a gap; two who append at once conflict on it. The last event of a `key`
says all there is to know of that engine or gate. `at` is the database's clock.
"""

turns = Table(
    "turns",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("turn", Integer, nullable=False),
    Column("parent_turn", Integer, nullable=False),
    Column("segment", Integer, nullable=False),
    Column("choice_index", SmallInteger, nullable=False),
    Column("protocol", String(16), nullable=False),
    Column("tokens", Content),
    Column("exchange", Content),
    Column("written_at", Double, server_default=now(), nullable=False),
    Column("absorbed", Integer, server_default="0", nullable=False),
    PrimaryKeyConstraint("session_id", "turn", "choice_index"),
)
"""A committed turn's content, null once erased: its tokens, and its messages and reply. A small turn's tokens are
in `exchange`, and `tokens` is null. `written_at` is the database's clock; `absorbed` counts the late attempts at its
request that were given its reply."""

blobs = Table(
    "blobs",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("number", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("hash", String(64), nullable=False),
    Column("location", Text),
    Column("data", Content),
    PrimaryKeyConstraint("session_id", "number"),
)
"""What a session stores once: metadata, parameters, tools. `location` names an object store's copy."""

chunks = Table(
    "chunks",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("number", Integer, nullable=False),
    Column("kind", String(16), nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("hash", String(32), nullable=False),
    Column("tombstoned_by", BigInteger),
    Column("location", Text),
    Column("data", Content),
    PrimaryKeyConstraint("session_id", "fence", "number"),
)
"""Rows of replay payloads, keyed by the turn that brought them: its fence, and a number within it.

A chunk is in `data`, or it is the object `location` (`features.objects`). A tombstone has no `data` and names the event
that made it; its object is gone, or waits for its deletion in `dead_objects`. Large chunks in the
database are written before the commit that refers to them; what a turn that came to nothing left there goes with its
claim.
"""

annotation_columns = Table(
    "annotation_columns",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("turn", Integer, nullable=False),
    Column("name", String(64), nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("data", Content, nullable=False),
    PrimaryKeyConstraint("session_id", "turn", "name", "seq"),
)
"""Columns of numbers for a turn's tokens, as compressed frames, each by the event that wrote it. The next one under the
name takes its place; the earlier row stays only while a checkpoint has it."""

refused_replies = Table(
    "refused_replies",
    metadata,
    Column("session_id", SESSION_ID, nullable=False),
    Column("fence", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("data", Content, nullable=False),
    PrimaryKeyConstraint("session_id", "fence"),
)
"""The beginning of replies that were refused, as compressed frames; `size` is that of the whole reply."""

snapshots = Table(
    "snapshots",
    metadata,
    Column("session_id", SESSION_ID, primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("format", String(32), nullable=False),
    Column("data", Content, nullable=False),
)
"""A fold of the first `seq` events, in the format of the release named; any other format is ignored."""
