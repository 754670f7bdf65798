-- Why:   changes of tracked tables are logged here, and exchanged with other nodes.
-- Works with: 0006 code, which does not know these tables and has nothing to do with them.

alter table space_samples add column tables json not null default '{}';

create sequence op_clock as bigint minvalue 0 start 0;
create sequence op_clock_mark as bigint minvalue 0 start 0;
create sequence op_era as bigint minvalue 0 start 0;
create unlogged sequence op_era_key as bigint minvalue 0 start 0;
create table op_clock_lock ();
create table op_era_lock ();

create table op_hosts (
    id       integer generated always as identity primary key,
    host     text    not null unique check (length(host) between 1 and 255),
    added_by integer
);

create table op_node (
    only_row    boolean     not null primary key default true check (only_row),
    host_id     integer     not null,
    limits      json        not null default '{}',
    alive_at    timestamptz,
    jumped_at   timestamptz,
    jumped_from timestamptz,
    named_at    timestamptz not null default clock_timestamp()
);

create table op_tables (
    id             integer     generated always as identity primary key,
    name           text        not null unique check (length(name) between 1 and 255),
    schema_name    text        not null,
    table_name     text        not null,
    key_columns    text[]      not null check (cardinality(key_columns) > 0),
    key_numbers    smallint[]  not null default '{}',
    shape          bigint      not null default 0,
    key_map        json        not null default '{}',
    state          text        not null check (state in ('tracked', 'paused')),
    floor          uuid        not null default '00000000-0000-0000-0000-000000000000',
    floor_origin   text        not null default '',
    trimmed        text        not null default '' collate "C",
    unlogged       text        not null default '' collate "C",
    taken_snapshot boolean     not null default false,
    retention_days double precision check (retention_days >= 0),
    cap_days       double precision check (cap_days >= 0),
    cap_bytes      bigint      check (cap_bytes >= 0),
    dropped_ops    bigint      not null default 0,
    dropped_bytes  bigint      not null default 0,
    dropped_at     timestamptz,
    dormant_ops    bigint      not null default 0,
    changed_at     timestamptz not null,
    unique (schema_name, table_name)
);

create type op_action as enum ('c', 'u', 'd');

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

create table op_peers (
    id                  integer     generated always as identity primary key,
    host                text        not null unique check (length(host) between 1 and 255),
    token_hash          bytea       unique check (octet_length(token_hash) = 32),
    token               text,
    tables              text[],
    shown_later         integer[]   not null default '{}',
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
    read_all_at         timestamptz,
    passed              text        not null default '' collate "C",
    passing             text        not null default '' collate "C",
    passing_head        text        not null default '' collate "C",
    passing_at          timestamptz,
    evict_after_days    double precision check (evict_after_days > 0),
    evicted_at          timestamptz,
    evictions           bigint      not null default 0,
    eviction            json,
    spared_until        timestamptz
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
    is_repair      boolean     not null default false,
    is_new         boolean     not null default false,
    read_to        text        collate "C",
    has_unlogged   boolean     not null default false,
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

create function op_session_cluster() returns bigint
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select hashint8extended(
        (extract(epoch from pg_postmaster_start_time()) * 1000000)::bigint,
        ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint
    ) & 9223372036854775807
$$;

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

create function op_row_hash(row_of_table record) returns bigint
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
    return hash_record_extended(row_of_table, 0);
exception when undefined_function then
    return hashtextextended(row_of_table::text, 0);
end
$$;

create function op_shape(relation oid) returns bigint
language sql stable set search_path = pg_catalog, pg_temp as $$
    select coalesce(bit_xor(hashtextextended(attname::text, atttypid::bigint)), 0) # relation::bigint
      from pg_attribute where attrelid = relation and attnum > 0 and not attisdropped
$$;

create function op_planned_shape(relation oid) returns bigint
language sql immutable set search_path = pg_catalog, pg_temp as $$
    select restante.op_shape(relation)
$$;

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
