-- Why:   changes of tracked tables are logged here, and exchanged with other nodes.
-- Works with: 0006 code, which does not know these tables and has nothing to do with them.

create sequence op_clock as bigint minvalue 0 start 0;
create sequence op_era as bigint minvalue 0 start 0;
create sequence op_era_key as bigint minvalue 0 start 0;

create table op_hosts (
    id   integer generated always as identity primary key,
    host text    not null unique check (length(host) between 1 and 255)
);

create table op_node (
    only_row boolean not null primary key default true check (only_row),
    host_id  integer not null
);

create table op_tables (
    id             integer     generated always as identity primary key,
    name           text        not null unique check (length(name) between 1 and 255),
    schema_name    text        not null,
    table_name     text        not null,
    key_columns    text[]      not null check (cardinality(key_columns) > 0),
    key_map        json        not null default '{}',
    state          text        not null check (state in ('tracked', 'paused')),
    floor          uuid        not null default '00000000-0000-0000-0000-000000000000',
    floor_origin   text        not null default '',
    trimmed        text        not null default '' collate "C",
    taken_snapshot boolean     not null default false,
    changed_at     timestamptz not null,
    unique (schema_name, table_name)
);

create table ops (
    table_id    integer     not null,
    arrived_at  timestamptz not null,
    era         bigint      not null,
    xid         bigint      not null,
    ulid        uuid        not null,
    n           integer     not null,
    origin      integer     not null,
    action      "char"      not null check (action in ('c', 'u', 'd')),
    approximate boolean     not null default false,
    key_hash    bigint      not null,
    old_hash    bigint,
    key         text        not null,
    data        json        not null
) partition by list (table_id);
create index ops_by_position on ops (era, xid, ulid, n);
create index ops_by_ulid on ops (ulid);
create index ops_by_key on ops (key_hash, ulid);

create table op_peers (
    id                  integer     generated always as identity primary key,
    host                text        not null unique check (length(host) between 1 and 255),
    token_hash          bytea       unique check (octet_length(token_hash) = 32),
    token               text,
    tables              text[],
    relays              text[],
    max_ops_per_minute  integer     check (max_ops_per_minute > 0),
    max_bytes_per_minute bigint     check (max_bytes_per_minute > 0),
    added_at            timestamptz not null,
    protocol            text        check (protocol in ('restante', 'ulid')),
    cursor              text        not null default '' collate "C",
    cursor_at           timestamptz,
    cursor_problem      text,
    joined_tables       integer[],
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
    conflicts           bigint      not null default 0,
    served              text        not null default '' collate "C",
    page_ends           text[]      not null default '{}',
    confirmed           text        not null default '' collate "C",
    confirmed_at        timestamptz,
    peer_head           text        not null default '' collate "C"
);

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

create table op_snapshots (
    peer_id        integer     not null,
    table_id       integer     not null,
    phase          text        not null
                   check (phase in ('new', 'deletes', 'records', 'leftovers', 'own_deletes', 'done')),
    is_for_gap     boolean     not null,
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

create table op_pins (
    peer_id    integer     not null,
    table_id   integer     not null,
    position   text        not null collate "C",
    expires_at timestamptz not null,
    primary key (peer_id, table_id)
);

create table op_unsettled (
    table_id   integer not null,
    key_hash   bigint  not null,
    key        text    not null,
    xid        bigint  not null,
    data       json    not null,
    primary key (table_id, key_hash, key)
);

create function op_tick(ticks integer, at_least bigint default 0) returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    now_ticks constant bigint :=
        greatest((extract(epoch from clock_timestamp()) * 1000)::bigint << 15, at_least);
    first bigint;
begin
    begin
        perform pg_advisory_xact_lock(730117, 1);
        select greatest(last_value + 1, now_ticks) into first from restante.op_clock;
        perform setval('restante.op_clock', first + ticks - 1);
        raise exception using errcode = 'RS001';
    exception when sqlstate 'RS001' then
        null;
    end;
    return first;
end
$$;

create function op_current_era() returns bigint
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    key constant bigint := hashint8extended(
        (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint,
        ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
            # (select system_identifier from pg_control_system())
    ) & 9223372036854775807;
    found bigint;
begin
    if (select last_value from restante.op_era_key) <> key then
        begin
            perform pg_advisory_xact_lock(730117, 2);
            if (select last_value from restante.op_era_key) <> key then
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
    select last_value into found from restante.op_era;
    return found;
end
$$;

create function op_ulid(tick bigint, tail text) returns uuid
language sql immutable as $$
    select (
        lpad(to_hex(tick >> 15), 12, '0') || lpad(to_hex((tick & 32767) << 1), 4, '0') || tail
    )::uuid
$$;
