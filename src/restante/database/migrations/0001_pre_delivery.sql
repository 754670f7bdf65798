-- Why:   workspaces, the files staged for them, and the feed that tells them.
-- Works with: an empty database; there is no older release.

create table workspaces (
    id             uuid        not null primary key,
    name           text        not null,
    delivery_mode  text        not null check (delivery_mode in ('poll', 'push')),
    url            text,
    agent_card     json        not null,
    parent_id      uuid,
    status         text        not null default 'active' check (status in ('active', 'removed')),
    token_hash     bytea       unique check (octet_length(token_hash) = 32), -- null: revoked
    inbound_secret text        not null,
    active_tasks   integer     not null default 0 check (active_tasks >= 0),
    current_task   text        not null default '',
    created_at     timestamptz not null default clock_timestamp(),
    last_seen_at   timestamptz not null default clock_timestamp()
);

-- The counters of a workspace's feed, apart from the workspace itself: this row is locked for the
-- length of each commit, and a heartbeat must not wait for that.
create table feeds (
    workspace_id   uuid    not null primary key,
    last_seq       bigint  not null default 0,
    trimmed_seq    bigint  not null default 0,
    acked_seq      bigint  not null default 0,
    waiting_bytes  bigint  not null default 0 check (waiting_bytes >= 0),
    waiting_files  integer not null default 0 check (waiting_files >= 0),
    reserved_bytes bigint  not null default 0 check (reserved_bytes >= 0),
    reserved_files integer not null default 0 check (reserved_files >= 0),
    check (trimmed_seq <= last_seq),
    check (acked_seq <= last_seq)
) with (fillfactor = 50);

-- No foreign key: what was sent to a workspace outlives it, until its own time is over.
create table uploads (
    workspace_id uuid        not null,
    file_id      uuid        not null,
    bucket       timestamptz not null,
    name         text        not null check (name ~ '^[A-Za-z0-9._-]{1,100}$' and name not in ('.', '..')),
    mimetype     text        not null check (length(mimetype) <= 4224),
    size         bigint      not null check (size between 1 and 26214400),
    sha256       bytea       not null check (octet_length(sha256) = 32),
    created_at   timestamptz not null,
    fetched_at   timestamptz,
    acked_at     timestamptz,
    expires_at   timestamptz not null,
    primary key (workspace_id, file_id)
) with (fillfactor = 85);
create index uploads_waiting on uploads (workspace_id, created_at, file_id) where acked_at is null;
create index uploads_expiring on uploads (expires_at) where acked_at is null;
create index uploads_acked on uploads (acked_at) where acked_at is not null;
create index uploads_in_bucket on uploads (bucket);

-- The bytes.  A leaf is a bucket; it is filled once, read a few times, and dropped whole.
create table chunks (
    bucket       timestamptz not null,
    workspace_id uuid        not null,
    file_id      uuid        not null,
    seq          integer     not null check (seq >= 0),
    bytes        bytea       not null check (octet_length(bytes) between 1 and 262144),
    primary key (bucket, workspace_id, file_id, seq)
) partition by range (bucket);
alter table chunks alter column bytes set storage external;

-- The rows a workspace reads.  By time-ordered id, so that a cursor finds its leaf at once.
create table feed (
    id            uuid        not null,
    workspace_id  uuid        not null,
    seq           bigint      not null,
    activity_type text        not null,
    source_id     uuid,
    target_id     uuid,
    method        text,
    summary       text,
    request_body  json,
    response_body json,
    duration_ms   integer,
    status        text        not null,
    error_detail  text,
    created_at    timestamptz not null,
    primary key (workspace_id, id)
) partition by range (id);
create index feed_in_order on feed (workspace_id, seq);

-- Room promised to an upload that is still arriving.  What a killed server leaves behind expires.
create table reservations (
    id           uuid        not null primary key,
    workspace_id uuid        not null,
    bucket       timestamptz not null, -- not to be dropped meanwhile
    bytes        bigint      not null check (bytes >= 0),
    files        integer     not null check (files >= 0),
    expires_at   timestamptz not null
);
create index reservations_expiring on reservations (expires_at);

-- The first answer to a request that may be sent again.
create table answers (
    workspace_id    uuid        not null,
    idempotency_key text        not null check (length(idempotency_key) between 1 and 255),
    fingerprint     bytea       not null,
    answer          json        not null,
    expires_at      timestamptz not null,
    primary key (workspace_id, idempotency_key)
);
create index answers_expiring on answers (expires_at);

-- What the tables took at each pass of the sweep, for as long as their growth is looked at.
create table space_samples (
    taken_at timestamptz not null primary key,
    bytes    bigint      not null
);

-- How long the servers keep things, for the commands that are run beside them.
create table chosen_retention (
    only_row      boolean          not null primary key default true check (only_row),
    ack_seconds   double precision not null,
    feed_seconds  double precision not null
);
