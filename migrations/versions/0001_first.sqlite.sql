-- The schema of 0.1.0 on SQLite. A released store has it: a later schema is a later migration.
-- Statements end with a semicolon at the end of a line.

CREATE TABLE affinities (
    control_id VARCHAR(128) NOT NULL,
    engine TEXT NOT NULL,
    state VARCHAR(16) NOT NULL,
    worker_session BOOLEAN NOT NULL,
    timeout_s DOUBLE NOT NULL,
    expires_at DOUBLE NOT NULL,
    incarnation BIGINT NOT NULL,
    session_id VARCHAR(128) NOT NULL,
    CONSTRAINT pk_affinities PRIMARY KEY (control_id)
);
CREATE INDEX ix_affinities_expires_at ON affinities (expires_at);

CREATE TABLE annotation_columns (
    session_id VARCHAR(128) NOT NULL,
    turn INTEGER NOT NULL,
    name VARCHAR(64) NOT NULL,
    seq BIGINT NOT NULL,
    data BLOB NOT NULL,
    CONSTRAINT pk_annotation_columns PRIMARY KEY (session_id, turn, name, seq)
);

CREATE TABLE archived (
    session_id VARCHAR(128) NOT NULL,
    file TEXT NOT NULL,
    root_id VARCHAR(128) NOT NULL,
    state VARCHAR(16) NOT NULL,
    name VARCHAR(128),
    generation INTEGER,
    frees_name BOOLEAN,
    run VARCHAR(128) NOT NULL,
    marks BLOB,
    CONSTRAINT pk_archived PRIMARY KEY (session_id, file)
);
CREATE INDEX ix_archived_file ON archived (file);
CREATE INDEX ix_archived_name ON archived (name) WHERE name IS NOT NULL;
CREATE INDEX ix_archived_root_id ON archived (root_id);
CREATE INDEX ix_archived_state ON archived (state) WHERE state IN ('writing', 'leaving', 'erasing');

CREATE TABLE blobs (
    session_id VARCHAR(128) NOT NULL,
    number INTEGER NOT NULL,
    kind VARCHAR(16) NOT NULL,
    size BIGINT NOT NULL,
    hash VARCHAR(64) NOT NULL,
    location TEXT,
    data BLOB,
    CONSTRAINT pk_blobs PRIMARY KEY (session_id, number)
);

CREATE TABLE checkpoint_groups (
    checkpoint_id BIGINT NOT NULL,
    run VARCHAR(128) NOT NULL,
    group_id TEXT NOT NULL,
    sessions INTEGER NOT NULL,
    erased INTEGER NOT NULL,
    unfinished INTEGER NOT NULL,
    arrived INTEGER NOT NULL,
    size INTEGER,
    completed_at DOUBLE,
    measured BOOLEAN NOT NULL,
    oldest_version BIGINT,
    consumer VARCHAR(128),
    lease_until DOUBLE,
    handed_out INTEGER NOT NULL,
    acked_at DOUBLE,
    evaluation BOOLEAN NOT NULL,
    CONSTRAINT pk_checkpoint_groups PRIMARY KEY (checkpoint_id, run, group_id)
);

CREATE TABLE checkpoint_sessions (
    session_id VARCHAR(128) NOT NULL,
    checkpoint_id BIGINT NOT NULL,
    seq BIGINT NOT NULL,
    is_done BOOLEAN NOT NULL,
    CONSTRAINT pk_checkpoint_sessions PRIMARY KEY (session_id, checkpoint_id)
) WITHOUT ROWID;

CREATE TABLE checkpoints (
    id INTEGER NOT NULL,
    run VARCHAR(128) NOT NULL,
    name VARCHAR(128),
    state VARCHAR(16) NOT NULL,
    cut VARCHAR(16) NOT NULL,
    created_at DOUBLE NOT NULL,
    sessions INTEGER NOT NULL,
    groups INTEGER NOT NULL,
    restores VARCHAR(128),
    metadata BLOB,
    CONSTRAINT pk_checkpoints PRIMARY KEY (id),
    CONSTRAINT uq_checkpoints_run_name UNIQUE (run, name)
);

CREATE TABLE chunks (
    session_id VARCHAR(128) NOT NULL,
    fence BIGINT NOT NULL,
    number INTEGER NOT NULL,
    kind VARCHAR(16) NOT NULL,
    size BIGINT NOT NULL,
    hash VARCHAR(32) NOT NULL,
    tombstoned_by BIGINT,
    location TEXT,
    data BLOB,
    CONSTRAINT pk_chunks PRIMARY KEY (session_id, fence, number)
);

CREATE TABLE dead_objects (
    session_id VARCHAR(128) NOT NULL,
    name TEXT NOT NULL,
    since DOUBLE NOT NULL,
    incarnation BIGINT,
    CONSTRAINT pk_dead_objects PRIMARY KEY (session_id, name)
);
CREATE INDEX ix_dead_objects_incarnation ON dead_objects (incarnation) WHERE incarnation IS NOT NULL;
CREATE INDEX ix_dead_objects_since ON dead_objects (since);

CREATE TABLE erased_runs (
    run VARCHAR(128) NOT NULL,
    upto DOUBLE NOT NULL,
    CONSTRAINT pk_erased_runs PRIMARY KEY (run)
);

CREATE TABLE events (
    session_id VARCHAR(128) NOT NULL,
    seq BIGINT NOT NULL,
    type VARCHAR(32) NOT NULL,
    version SMALLINT NOT NULL,
    at DOUBLE NOT NULL,
    data BLOB NOT NULL,
    tx BIGINT DEFAULT 0 NOT NULL,
    position BIGINT NOT NULL,
    CONSTRAINT pk_events PRIMARY KEY (session_id, seq)
);
CREATE INDEX ix_events_tx_position ON events (tx, position);

CREATE TABLE fleet_events (
    seq BIGINT NOT NULL,
    "key" TEXT NOT NULL,
    type VARCHAR(32) NOT NULL,
    version SMALLINT NOT NULL,
    at DOUBLE NOT NULL,
    data BLOB NOT NULL,
    CONSTRAINT pk_fleet_events PRIMARY KEY (seq)
);
CREATE INDEX ix_fleet_events_key_seq ON fleet_events ("key", seq);

CREATE TABLE group_changes (
    id INTEGER NOT NULL,
    run VARCHAR(128) NOT NULL,
    group_id TEXT NOT NULL,
    CONSTRAINT pk_group_changes PRIMARY KEY (id)
);

CREATE TABLE groups (
    run VARCHAR(128) NOT NULL,
    group_id TEXT NOT NULL,
    sessions INTEGER NOT NULL,
    erased INTEGER NOT NULL,
    unfinished INTEGER NOT NULL,
    arrived INTEGER NOT NULL,
    size INTEGER,
    completed_at DOUBLE,
    measured BOOLEAN NOT NULL,
    oldest_version BIGINT,
    consumer VARCHAR(128),
    lease_until DOUBLE,
    handed_out INTEGER NOT NULL,
    acked_at DOUBLE,
    evaluation BOOLEAN DEFAULT 0 NOT NULL,
    CONSTRAINT pk_groups PRIMARY KEY (run, group_id)
);
CREATE INDEX ix_groups_acked_at_run_group_id ON groups (acked_at, run, group_id);
CREATE INDEX ix_groups_consumer ON groups (consumer) WHERE acked_at IS NULL;
CREATE INDEX ix_groups_run_completed_at_group_id ON groups (run, completed_at, group_id) WHERE acked_at IS NULL AND completed_at IS NOT NULL;

CREATE TABLE incarnations (
    id INTEGER NOT NULL,
    host VARCHAR(255) NOT NULL,
    pid INTEGER NOT NULL,
    started_at DOUBLE NOT NULL,
    heartbeat_at DOUBLE NOT NULL,
    ended_at DOUBLE,
    release TEXT NOT NULL,
    CONSTRAINT pk_incarnations PRIMARY KEY (id)
);

CREATE TABLE leases (
    name VARCHAR(64) NOT NULL,
    holder BIGINT,
    fence BIGINT NOT NULL,
    until DOUBLE NOT NULL,
    CONSTRAINT pk_leases PRIMARY KEY (name)
);

CREATE TABLE open_turns (
    session_id VARCHAR(128) NOT NULL,
    fence BIGINT NOT NULL,
    turn INTEGER NOT NULL,
    parent_turn INTEGER NOT NULL,
    incarnation BIGINT NOT NULL,
    body_hash VARCHAR(32) NOT NULL,
    retry_key VARCHAR(32),
    opened_at DOUBLE NOT NULL,
    adapter TEXT,
    reserved BIGINT,
    CONSTRAINT pk_open_turns PRIMARY KEY (session_id, fence)
) WITHOUT ROWID;

CREATE TABLE refused_replies (
    session_id VARCHAR(128) NOT NULL,
    fence BIGINT NOT NULL,
    size BIGINT NOT NULL,
    data BLOB NOT NULL,
    CONSTRAINT pk_refused_replies PRIMARY KEY (session_id, fence)
);

CREATE TABLE run_tokens (
    number INTEGER NOT NULL,
    run VARCHAR(128) NOT NULL,
    is_valid BOOLEAN NOT NULL,
    CONSTRAINT pk_run_tokens PRIMARY KEY (number)
);
CREATE INDEX ix_run_tokens_run_number ON run_tokens (run, number);

CREATE TABLE runs (
    run VARCHAR(128) NOT NULL,
    status VARCHAR(16) NOT NULL,
    max_live BIGINT,
    max_tokens BIGINT,
    used_tokens BIGINT DEFAULT '0' NOT NULL,
    metadata BLOB,
    note BLOB,
    CONSTRAINT pk_runs PRIMARY KEY (run)
);

CREATE TABLE sessions (
    session_id VARCHAR(128) NOT NULL,
    version BIGINT NOT NULL,
    status VARCHAR(16) NOT NULL,
    open_turns INTEGER NOT NULL,
    turns INTEGER NOT NULL,
    group_id TEXT,
    reward DOUBLE,
    created_at DOUBLE NOT NULL,
    updated_at DOUBLE NOT NULL,
    body_hash VARCHAR(32) NOT NULL,
    closed_at DOUBLE,
    attempt INTEGER,
    weight_version BIGINT,
    engine TEXT,
    root_id VARCHAR(128),
    last_turn INTEGER DEFAULT '0' NOT NULL,
    note TEXT,
    tags TEXT,
    spent_turns INTEGER DEFAULT '0' NOT NULL,
    spent_tokens BIGINT DEFAULT '0' NOT NULL,
    name VARCHAR(128),
    generation INTEGER,
    run VARCHAR(128) NOT NULL,
    group_size INTEGER,
    failed VARCHAR(16),
    evaluation BOOLEAN DEFAULT 0 NOT NULL,
    annotated TEXT,
    engine_errors INTEGER DEFAULT '0' NOT NULL,
    tool_errors INTEGER DEFAULT '0' NOT NULL,
    CONSTRAINT pk_sessions PRIMARY KEY (session_id)
) WITHOUT ROWID;
CREATE INDEX ix_sessions_closed_at_session_id ON sessions (closed_at, session_id);
CREATE INDEX ix_sessions_created_at_session_id ON sessions (created_at, session_id);
CREATE INDEX ix_sessions_group_id_run ON sessions (group_id, run);
CREATE UNIQUE INDEX ix_sessions_name ON sessions (name, run, generation) WHERE name IS NOT NULL;
CREATE INDEX ix_sessions_open_root_id ON sessions (root_id) WHERE root_id IS NOT NULL AND status = 'open';
CREATE INDEX ix_sessions_open_run ON sessions (run) WHERE status = 'open';
CREATE INDEX ix_sessions_root_id ON sessions (root_id) WHERE root_id IS NOT NULL;
CREATE INDEX ix_sessions_run_created_at_session_id ON sessions (run, created_at, session_id);
CREATE INDEX ix_sessions_run_weight_version ON sessions (run, weight_version);
CREATE INDEX ix_sessions_tagged ON sessions (created_at, session_id) WHERE tags IS NOT NULL;
CREATE INDEX ix_sessions_weight_version ON sessions (weight_version);

CREATE TABLE snapshots (
    session_id VARCHAR(128) NOT NULL,
    seq BIGINT NOT NULL,
    format VARCHAR(32) NOT NULL,
    data BLOB NOT NULL,
    CONSTRAINT pk_snapshots PRIMARY KEY (session_id)
);

CREATE TABLE staged_tokens (
    session_id VARCHAR(128) NOT NULL,
    fence BIGINT NOT NULL,
    number INTEGER NOT NULL,
    part INTEGER NOT NULL,
    request_hash VARCHAR(64) NOT NULL,
    engine TEXT NOT NULL,
    weight_version TEXT,
    logprobs_of VARCHAR(16),
    data BLOB NOT NULL,
    CONSTRAINT pk_staged_tokens PRIMARY KEY (session_id, fence, number)
);

CREATE TABLE store_meta (
    "key" VARCHAR(160) NOT NULL,
    value TEXT NOT NULL,
    CONSTRAINT pk_store_meta PRIMARY KEY ("key")
);

CREATE TABLE turns (
    session_id VARCHAR(128) NOT NULL,
    turn INTEGER NOT NULL,
    parent_turn INTEGER NOT NULL,
    segment INTEGER NOT NULL,
    choice_index SMALLINT NOT NULL,
    protocol VARCHAR(16) NOT NULL,
    tokens BLOB,
    exchange BLOB,
    written_at DOUBLE DEFAULT ((julianday('now') - 2440587.5) * 86400.0) NOT NULL,
    absorbed INTEGER DEFAULT '0' NOT NULL,
    CONSTRAINT pk_turns PRIMARY KEY (session_id, turn, choice_index)
);
