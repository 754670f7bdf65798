-- The whole schema, as the migrations leave it: for readers.  Migrations create the database; a test
-- compares the two, so this page is never out of date.
--
-- A file for a workspace becomes a row in `uploads`, its bytes in `chunks`, and a row in `feed` that
-- announces it; the counters in `feeds` are updated in the same commit.  There are no foreign keys:
-- files and feed rows outlive their workspace.  Rows carry their workspace, so that the tables can be
-- distributed by it.

create schema restante;  -- our own, so that Restante can share a database with an application
set search_path = restante;

-- Migrations --------------------------------------------------------------------------------------

create table schema_migrations (
    number     integer     not null primary key,
    name       text        not null,
    checksum   text        not null,  -- of the file; an edited file is refused
    applied_at timestamptz not null default clock_timestamp()
);

-- Releases older than this can no longer use the database, and refuse to start.
create table schema_compatibility (
    only_row    boolean not null primary key default true check (only_row),
    oldest_code integer not null
);

-- Receivers ---------------------------------------------------------------------------------------

create table workspaces (
    id             uuid        not null primary key,
    name           text        not null,
    delivery_mode  text        not null check (delivery_mode in ('poll', 'push')),
    url            text,                -- a push workspace is called here
    agent_card     json        not null,
    parent_id      uuid,
    status         text        not null default 'active' check (status in ('active', 'removed')),
    token_hash     bytea       unique check (octet_length(token_hash) = 32),  -- null: revoked
    inbound_secret text        not null,  -- our token when we call a push workspace
    active_tasks   integer     not null default 0 check (active_tasks >= 0),
    current_task   text        not null default '',
    created_at     timestamptz not null default clock_timestamp(),
    last_seen_at   timestamptz not null default clock_timestamp()
) with (fillfactor = 50);  -- last_seen_at is updated often, and no index with it (HOT)

-- The counters of a workspace's feed, separate from the workspace: this row is locked for the length
-- of each commit, and a heartbeat must not wait for that.  `last_seq` makes seqs dense and puts them
-- in commit order.
create table feeds (
    workspace_id   uuid    not null primary key,
    last_seq       bigint  not null default 0,
    trimmed_seq    bigint  not null default 0,  -- rows up to here are gone; a cursor below gets 410
    acked_seq      bigint  not null default 0,  -- the workspace has marked rows up to here as handled
    waiting_bytes  bigint  not null default 0 check (waiting_bytes >= 0),
    waiting_files  integer not null default 0 check (waiting_files >= 0),
    reserved_bytes bigint  not null default 0 check (reserved_bytes >= 0),
    reserved_files integer not null default 0 check (reserved_files >= 0),
    -- What was written for the workspace, whatever became of it: in one hour, and since it exists.
    written_hour   timestamptz,
    written_bytes  bigint  not null default 0 check (written_bytes >= 0),
    written_total  bigint  not null default 0 check (written_total >= 0),
    -- Of the rows after trimmed_seq.  If counted_seq is behind it, the previous release has trimmed
    -- rows without subtracting them.
    feed_bytes     bigint  not null default 0 check (feed_bytes >= 0),
    counted_seq    bigint  not null default 0,
    -- Of the rows after settled_seq, which follows acked_seq in steps of bounded work.
    unacked_bytes  bigint  not null default 0 check (unacked_bytes >= 0),
    settled_seq    bigint  not null default 0,
    check (trimmed_seq <= last_seq),
    check (acked_seq <= last_seq)
) with (fillfactor = 50);  -- updated often, and no index with it (HOT)

-- Files -------------------------------------------------------------------------------------------

-- One row per file.  It waits while `acked_at` is null and `expires_at` is in the future.  The sweep
-- deletes it when the ack retention is over, or once it has expired.
create table uploads (
    workspace_id   uuid        not null,
    file_id        uuid        not null,
    bucket         timestamptz not null,  -- where its chunks are; changes when they are moved
    name           text        not null check (name ~ '^[A-Za-z0-9._-]{1,100}$' and name not in ('.', '..')),
    mimetype       text        not null check (length(mimetype) <= 4224),
    size           bigint      not null,
    sha256         bytea       not null check (octet_length(sha256) = 32),
    created_at     timestamptz not null,
    fetched_at     timestamptz,
    acked_at       timestamptz,
    expires_at     timestamptz not null,
    first_acked_at timestamptz,          -- set when it is reopened: then acked_at returns to this time
    display_name   text,                 -- for people; null: the name, from before it was kept
    source_id      uuid,                 -- the workspace that sent it; null: the canvas
    primary key (workspace_id, file_id)
) with (fillfactor = 85);
-- Checked for new rows.  The size has the hard ceiling; a server's own limit is a setting.
alter table uploads
    add constraint uploads_size_check check (size between 1 and 68719476736) not valid,
    add constraint uploads_display_name_check check (length(display_name) between 1 and 255) not valid;
create index uploads_waiting on uploads (workspace_id, created_at, file_id) where acked_at is null;
create index uploads_expiring on uploads (expires_at) where acked_at is null;
create index uploads_acked on uploads (acked_at) where acked_at is not null;  -- keeps an idle sweep cheap
create index uploads_in_bucket on uploads (bucket);

-- The bytes, 256 KiB per row.  A partition is a bucket, an hour unless set otherwise.  It is written
-- once, read a few times, and dropped whole, so its autovacuum is off.  Partitions are created ahead
-- of the clock.
create table chunks (
    bucket       timestamptz not null,
    workspace_id uuid        not null,
    file_id      uuid        not null,
    seq          integer     not null check (seq >= 0),
    bytes        bytea       not null check (octet_length(bytes) between 1 and 262144),
    primary key (bucket, workspace_id, file_id, seq)
) partition by range (bucket);
alter table chunks alter column bytes set storage external;  -- compression is slow and gains little

-- The feed ----------------------------------------------------------------------------------------

-- The rows that a workspace reads.  Partitioned by a time-ordered id, so that a cursor finds its
-- partition at once.
create table feed (
    id            uuid        not null,
    workspace_id  uuid        not null,
    seq           bigint      not null,
    activity_type text        not null,
    source_id     uuid,                 -- the workspace that sent it; null: the canvas
    target_id     uuid,
    method        text,
    summary       text,
    request_body  json,
    response_body json,
    duration_ms   integer,
    status        text        not null,
    error_detail  text,
    created_at    timestamptz not null,
    bytes         integer,              -- as counted in `feed_bytes`; null: 0, from before it was counted
    primary key (workspace_id, id)
) partition by range (id);
create index feed_in_order on feed (workspace_id, seq);

-- The messages of the last day whose sender chose an id, so that a repetition is not queued again.  The
-- digest is of the sender, the method and the id.  The slot is the six hours in which it was queued; the
-- key refuses a repetition that is sent at the same time.  Partitions are dropped after a day; until then
-- their size counts in what all feeds together may hold.
create table message_ids (
    workspace_id uuid        not null,  -- to whom it was sent
    digest       uuid        not null,
    slot         timestamptz not null,
    queued_at    timestamptz not null,
    primary key (workspace_id, digest, slot)
) partition by range (slot);

-- Uploads in progress -----------------------------------------------------------------------------

-- Room in the quota, reserved for an upload that is still arriving.  It grows with the bytes, and lasts
-- half a minute unless it is renewed, so what a killed server leaves behind expires.  One without room
-- has the id of a large file, and keeps the bucket to which that file is being moved.
create table reservations (
    id           uuid        not null primary key,
    workspace_id uuid        not null,
    bucket       timestamptz not null, -- must not be dropped meanwhile
    bytes        bigint      not null check (bytes >= 0),
    files        integer     not null check (files >= 0),
    expires_at   timestamptz not null
);
create index reservations_expiring on reservations (expires_at);

-- The first answer to a request with an idempotency key; a retry gets the same answer.
create table answers (
    workspace_id    uuid        not null,
    idempotency_key text        not null check (length(idempotency_key) between 1 and 255),
    fingerprint     bytea       not null,  -- of the files: the key is refused for others
    answer          json        not null,
    expires_at      timestamptz not null,
    primary key (workspace_id, idempotency_key)
);
create index answers_expiring on answers (expires_at);

-- The total size of the tables, measured every 5 minutes and kept for 8 days, to compute growth.
create table space_samples (
    taken_at timestamptz not null primary key,
    bytes    bigint      not null,
    tables   json        not null default '{}'  -- bytes by table
);

-- The servers' retention settings, for commands that are given none.
create table chosen_retention (
    only_row      boolean          not null primary key default true check (only_row),
    ack_seconds   double precision not null,
    feed_seconds  double precision not null
);

-- The op log --------------------------------------------------------------------------------------

-- Tables of the application that are kept in step with other nodes.  Each change of a tracked table is
-- a row of `ops`, in the writer's transaction.  The newest op of a key is the version of its record.

-- The hybrid clock: milliseconds << 15 | counter of the last ULID.  Sequences are not rolled back, and
-- nobody waits for the end of a transaction to read them.
create sequence op_clock as bigint minvalue 0 start 0;
-- Where the clock was when it was last set under its lock.  The next 256 ticks are taken without it.
create sequence op_clock_mark as bigint minvalue 0 start 0;
-- Transaction ids start over after a restore or a promotion: then a new era begins, in microseconds.
create sequence op_era as bigint minvalue 0 start 0;
-- The key is unlogged, so that Postgres resets it after a crash, which may undo commits that did not wait.
create unlogged sequence op_era_key as bigint minvalue 0 start 0;
-- Who sets the clock or the era holds one of these: a lock that needs rights, unlike an advisory one.
create table op_clock_lock ();
create table op_era_lock ();

-- The nodes that made changes, and this one.
create table op_hosts (
    id       integer generated always as identity primary key,
    host     text    not null unique check (length(host) between 1 and 255),
    added_by integer
);

create table op_node (
    only_row    boolean     not null primary key default true check (only_row),
    host_id     integer     not null,
    limits      json        not null default '{}',  -- of the log, as the last server that started has them
    alive_at    timestamptz,  -- when a server last noted the time
    jumped_at   timestamptz,  -- when it found the clock far ahead of that, or behind it
    jumped_from timestamptz,
    named_at    timestamptz not null default clock_timestamp()
);

-- The tracked tables.
create table op_tables (
    id             integer     generated always as identity primary key,
    name           text        not null unique check (length(name) between 1 and 255),
    schema_name    text        not null,
    table_name     text        not null,
    key_columns    text[]      not null check (cardinality(key_columns) > 0),
    key_numbers    smallint[]  not null default '{}',  -- their attnum, to recognise renamed ones
    shape          bigint      not null default 0,  -- `op_shape` when the triggers were made
    key_map        json        not null default '{}',
    state          text        not null check (state in ('tracked', 'paused')),
    floor          uuid        not null default '00000000-0000-0000-0000-000000000000',
    floor_origin   text        not null default '',
    trimmed        text        not null default '' collate "C",
    unlogged       text        not null default '' collate "C",  -- what changed before may have no op
    taken_snapshot boolean     not null default false,
    retention_days double precision check (retention_days >= 0),  -- null: the server's, 0: for ever
    cap_days       double precision check (cap_days >= 0),
    cap_bytes      bigint      check (cap_bytes >= 0),
    dropped_ops    bigint      not null default 0,
    dropped_bytes  bigint      not null default 0,
    dropped_at     timestamptz,
    dormant_ops    bigint      not null default 0,
    changed_at     timestamptz not null,
    unique (schema_name, table_name)
);

-- A check in the table would cost every captured statement a tenth.
create type op_action as enum ('c', 'u', 'd');

-- One row per changed record.  A partition per table, and below it one per range of arrival, so that
-- one table's retention gives its disk back.  Position: (era, xid, ulid, n).
create table ops (
    table_id    integer     not null,
    arrived_at  timestamptz not null,
    era         bigint      not null,
    xid         bigint      not null,
    ulid        uuid        not null,
    n           integer     not null,
    origin      integer     not null,
    action      op_action   not null,
    approximate boolean     not null default false,
    key_hash    bigint      not null,
    old_hash    bigint,
    key         text        not null,
    data        json        not null
) partition by list (table_id);
create index ops_by_position on ops (era, xid, ulid, n);
create index ops_by_ulid on ops (ulid);
create index ops_by_key on ops (key_hash, ulid);

-- The other nodes: credentials, our cursor on each, and what each has read of our log.
create table op_peers (
    id                  integer     generated always as identity primary key,
    host                text        not null unique check (length(host) between 1 and 255),
    token_hash          bytea       unique check (octet_length(token_hash) = 32),
    token               text,
    tables              text[],
    shown_later         integer[]   not null default '{}',  -- it has read us before it could see them
    relays              text[],
    max_ops_per_minute  integer     check (max_ops_per_minute > 0),
    max_bytes_per_minute bigint     check (max_bytes_per_minute > 0),
    added_at            timestamptz not null,
    protocol            text        check (protocol in ('restante', 'ulid')),
    cursor              text        not null default '' collate "C",
    cursor_at           timestamptz,
    cursor_problem      text,
    joined_tables       integer[],
    joined_relays       text[],
    pulled_at           timestamptz,
    failing_since       timestamptz,
    failure             text,
    skew_seconds        double precision,
    remote_lag_ops      bigint,
    remote_lag_bytes    bigint,
    remote_lag_seconds  double precision,
    looked_at           timestamptz,
    schema_differences  text[]      not null default '{}',
    gap_at              text        not null default '' collate "C",
    gaps                bigint      not null default 0,
    applied             bigint      not null default 0,
    superseded          bigint      not null default 0,
    parked              bigint      not null default 0,
    refused             bigint      not null default 0,
    refused_by          jsonb       not null default '{}',
    conflicts           bigint      not null default 0,
    served              text        not null default '' collate "C",
    page_ends           text[]      not null default '{}',
    confirmed           text        not null default '' collate "C",
    confirmed_at        timestamptz,
    peer_head           text        not null default '' collate "C",
    read_all_at         timestamptz,  -- when the last pull began that read its log to the end
    -- It has read our log up to `passed`, and we have read all that it had written by then.  It has read up
    -- to `passing`, and its log ended at that head then.
    passed              text        not null default '' collate "C",
    passing             text        not null default '' collate "C",
    passing_head        text        not null default '' collate "C",
    passing_at          timestamptz,
    evict_after_days    double precision check (evict_after_days > 0),
    evicted_at          timestamptz,  -- since then ops go although it has not read them
    evictions           bigint      not null default 0,
    eviction            json,  -- the last one: table, cause, ops and bytes
    spared_until        timestamptz  -- it has just taken a snapshot, and is not evicted again
);

-- Ops that could not be applied, with the reason.
create table op_parked (
    id         bigint      generated always as identity primary key,
    peer_id    integer     not null,
    table_name text        not null,
    ulid       uuid        not null,
    origin     text        not null,
    action     "char"      not null check (action in ('c', 'u', 'd')),
    key_hash   bigint,
    key        text,
    data       json        not null,
    data_hash  bigint      not null,
    approximate boolean    not null default false,
    reason     text        not null,
    sentence   text        not null,
    parked_at  timestamptz not null,
    tried_at   timestamptz not null,
    tries      integer     not null default 1,
    unique (table_name, ulid, origin, data_hash)
);
create index op_parked_by_key on op_parked (table_name, key_hash);
create index op_parked_by_age on op_parked (parked_at);

-- Changes that lost against one that they had not seen.
create table op_conflicts (
    id           bigint      generated always as identity primary key,
    noticed_at   timestamptz not null,
    table_name   text        not null,
    key          text        not null,
    reason       text        not null,
    kept_ulid    uuid        not null,
    kept_origin  text        not null,
    kept         json,
    lost_ulid    uuid        not null,
    lost_origin  text        not null,
    lost         json
);
create index op_conflicts_by_age on op_conflicts (noticed_at);
create index op_conflicts_by_lost on op_conflicts (lost_ulid);

-- Snapshots that we are taking: how far each has come, and what the server said when it began.
create table op_snapshots (
    peer_id        integer     not null,
    table_id       integer     not null,
    phase          text        not null
                   check (phase in ('new', 'deletes', 'records', 'leftovers', 'own_deletes', 'done')),
    is_for_gap     boolean     not null,
    is_repair      boolean     not null default false,
    is_new         boolean     not null default false,  -- nothing of the table was read from the peer before
    read_to        text        collate "C",  -- from there on the log was read without the table
    has_unlogged   boolean     not null default false,  -- the server, and we have not read that
    after          text        not null default '',
    start          text        not null default '' collate "C",
    host           text        not null default '',
    columns        text[]      not null default '{}',
    floor          uuid        not null default '00000000-0000-0000-0000-000000000000',
    floor_origin   text        not null default '',
    server_cursor  text        collate "C",
    records        bigint      not null default 0,
    begun          integer     not null default 0,
    started_at     timestamptz not null,
    progressed_at  timestamptz not null,
    primary key (peer_id, table_id)
);

-- Where peers that take a snapshot of us began: nothing after it is dropped.
create table op_pins (
    peer_id    integer     not null,
    table_id   integer     not null,
    position   text        not null collate "C",
    expires_at timestamptz not null,
    primary key (peer_id, table_id)
);

-- Deletes from peers that found no record: an insert of the same key may still be uncommitted.  Checked
-- again when all transactions of that time have ended.
create table op_unsettled (
    table_id   integer not null,
    key_hash   bigint  not null,
    key        text    not null,
    xid        bigint  not null,
    data       json    not null,
    primary key (table_id, key_hash, key)
);

-- The first of so many ticks of the clock.  The lock ends with the block, because its exception rolls
-- back a savepoint; the sequence is not rolled back.  Capture takes single ticks without the lock: no such
-- tick is above the mark plus 256, and the mark is moved after the clock.
-- Expressions without a query, because Postgres evaluates those much faster.
create function op_tick(ticks integer, at_least bigint default 0) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    now_ticks constant bigint :=
        greatest((extract(epoch from clock_timestamp()) * 1000)::bigint << 15, at_least);
    last bigint;
begin
    begin
        lock table restante.op_clock_lock in exclusive mode;
        last := greatest(
            pg_sequence_last_value('restante.op_clock'::regclass),
            pg_sequence_last_value('restante.op_clock_mark'::regclass) + 256
        );
        last := setval('restante.op_clock'::regclass, greatest(last + 1, now_ticks) + ticks - 1);
        perform setval('restante.op_clock_mark'::regclass, last);
        raise exception using errcode = 'RS001';
    exception when sqlstate 'RS001' then
        null;
    end;
    return last - ticks + 1;
end
$$;

-- The era, a new one if the timeline or the start of the postmaster have changed.  Two clusters do not
-- start in the same microsecond, so that their identifiers need not be read from a file each time.
-- These are the same as long as a session lasts that writes, and Postgres evaluates an immutable function
-- once per plan.  Which start of which cluster this is: two such have different hashes.
create function op_session_cluster() returns bigint
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select hashint8extended(
        (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint,
        ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
    ) & 9223372036854775807
$$;

-- What tells two nodes apart that have the same tick; sessions of one node never have.
create function op_session_tail() returns text
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select right(replace(gen_random_uuid()::text, '-', ''), 16)
$$;

create function op_current_era() returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    key constant bigint := restante.op_session_cluster();
begin
    if pg_sequence_last_value('restante.op_era_key'::regclass) is distinct from key then
        begin
            lock table restante.op_era_lock in exclusive mode;
            if pg_sequence_last_value('restante.op_era_key'::regclass) is distinct from key then
                perform setval('restante.op_era', greatest(
                    (select last_value from restante.op_era) + 1,
                    (extract(epoch from clock_timestamp()) * 1000000)::bigint
                ));
                perform setval('restante.op_era_key', key);
            end if;
            raise exception using errcode = 'RS001';
        exception when sqlstate 'RS001' then
            null;
        end;
    end if;
    return pg_sequence_last_value('restante.op_era'::regclass);
end
$$;

-- Every transaction of this database below it has ended, and the next statement sees its rows.  Those of
-- other databases do not count, as far as our role may see them.
create function op_horizon() returns bigint
language sql set search_path = pg_catalog, pg_temp as $$
    with now as materialized (select pg_current_snapshot() as snapshot)
    select coalesce(
        (select min(open.xid)
           from (select pg_snapshot_xip(snapshot)::text::bigint as xid from now) as open
          where case when exists (
                    select from pg_stat_activity as other
                     where other.backend_xid = (open.xid & 4294967295)::text::xid
                       and other.datname <> current_database())
                then false
                else pg_xact_status(open.xid::text::xid8) = 'in progress' end),
        (select pg_snapshot_xmax(snapshot)::text::bigint from now)
    )
$$;

create function op_ulid(tick bigint, tail text) returns uuid
language sql immutable as $$
    select (lpad(to_hex(tick << 1), 16, '0') || tail)::uuid
$$;

-- What `ops.old_hash` is.  A type without a hash function is hashed as text.
create function op_row_hash(row_of_table record) returns bigint
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    return hash_record_extended(row_of_table, 0);
exception when undefined_function then
    return hashtextextended(row_of_table::text, 0);
end
$$;

-- Which table, and names and types of its columns, in any order: those of partitions differ.
create function op_shape(relation oid) returns bigint
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(bit_xor(hashtextextended(attname::text, atttypid::bigint)), 0) # relation::bigint
      from pg_attribute where attrelid = relation and attnum > 0 and not attisdropped
$$;

-- The same when the statement was planned, which saves a query per statement.  For statements that read a
-- transition table of the relation or of a partition: every change of its columns makes Postgres plan them
-- again.
create function op_planned_shape(relation oid) returns bigint
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select restante.op_shape(relation)
$$;

-- The key of a tracked table as its columns are named now.
create function op_key_columns(tracked integer, relation oid) returns text[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    known restante.op_tables;
    found text[];
begin
    select * into known from restante.op_tables where id = tracked;
    select array_agg(attname::text) into found
      from pg_attribute where attrelid = relation and attnum > 0 and not attisdropped;
    if known.key_columns <@ found then
        return known.key_columns;
    end if;
    select array_agg(attname::text order by at) into found
      from unnest(known.key_numbers) with ordinality as key (number, at)
      join pg_attribute on attrelid = coalesce(pg_partition_root(relation), relation)
                       and attnum = number and not attisdropped;
    if cardinality(found) = cardinality(known.key_columns) then
        return found;
    end if;
    raise exception 'The table % is tracked by the op log of Restante, and a column of its key is gone.',
        relation::regclass
        using errcode = '55000', hint = 'Run `restante oplog untrack` and `restante oplog track`.';
end
$$;

-- What the trigger of a tracked table executes when its fast path does not apply: after a change of the
-- schema, for changed keys, and if rows may have changed again since (by triggers, or by a MERGE).  Looks
-- at the table, which has what counts: a key that is there was not deleted last.  Ticks: deletes, creates,
-- updates, in this order; each op has one action.
create function op_capture_statements(tracked integer, relation oid, operation text) returns text[]
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
    columns constant text[] := restante.op_key_columns(tracked, relation);
    old_key constant text := (
        select format('json_build_array(%s)::text', string_agg(format('o.%I', name), ', '))
          from unnest(columns) as name);
    new_key constant text := (
        select format('json_build_array(%s)::text', string_agg(format('n.%I', name), ', '))
          from unnest(columns) as name);
    now_key constant text := (
        select format('json_build_array(%s)::text', string_agg(format('t.%I', name), ', '))
          from unnest(columns) as name);
    old_key_object constant text := (
        select format('json_build_object(%s)', string_agg(format('%L, o.%I', name, name), ', '))
          from unnest(columns) as name);
    is_old constant text := (
        select string_agg(format('t.%I = o.%I', name, name), ' and ') from unnest(columns) as name);
    is_new constant text := (
        select string_agg(format('t.%I = n.%I', name, name), ' and ') from unnest(columns) as name);
    statement constant text :=
        'insert into restante.ops_%s (table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, '
        'old_hash, key, data) select %1$s, $1, $2, $3, restante.op_ulid($4 + %s * $7 + (i - 1) / 500, $5), '
        '(i - 1) %% 500, $6, %L, hashtextextended(k, 0), h, k, d from (%s) as changes';
    deleted constant text := format(
        'select row_number() over () as i, %s as k, %s as d, restante.op_row_hash(o.*) as h '
        'from old_rows as o where not exists (select from %s as t where %s and %s = %s)',
        old_key, old_key_object, relation::regclass, is_old, now_key, old_key);
    current constant text := format(
        'select row_number() over () as i, %s as k, row_to_json(t.*) as d, ', new_key);
    from_table constant text := format(
        ' as h from new_rows as n join %s as t on %s and %s = %s ',
        relation::regclass, is_new, now_key, new_key);
begin
    if operation = 'DELETE' then
        return array[format(statement, tracked, 0, 'd', deleted)];
    elsif operation = 'INSERT' then
        return array[format(statement, tracked, 1, 'c', current || 'null::bigint' || from_table)];
    end if;
    return array[
        format(statement, tracked, 0, 'd', deleted),
        format(statement, tracked, 1, 'c', current || 'null::bigint' || from_table || format(
            'where not exists (select from old_rows as o where %s = %s)', old_key, new_key)),
        format(statement, tracked, 2, 'u', current || 'o.h' || from_table || format(
            'join (select %s as k, restante.op_row_hash(o.*) as h from old_rows as o) as o on o.k = %s',
            old_key, new_key))
    ];
end
$$;

-- A TRUNCATE tells no trigger which rows it removes.
create function op_refuse_truncate() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    raise exception 'The table %.% is tracked by the op log of Restante, which cannot log a TRUNCATE.',
        quote_ident(tg_table_schema), quote_ident(tg_table_name)
        using errcode = '55000',
              hint = 'Use DELETE. Or run `restante oplog pause`, TRUNCATE, and `restante oplog resume`; '
                     'peers then take a snapshot of the table.';
end
$$;

-- Removal of partitions -----------------------------------------------------------------------------

-- A partition that is being removed is sealed: a trigger named `sealed` calls this, and the partition
-- accepts no more rows.
create function refuse_rows() returns trigger language plpgsql as $$
begin
    raise exception 'leaf "%" is "sealed"', tg_table_name
        using errcode = 'check_violation', constraint = 'sealed';
end
$$;
