-- name: has_schema
select to_regnamespace('restante') is not null;

-- name: create_schema
create schema restante;

-- name: prepare
-- The migrations' own memory.  It comes before the first of them, so it cannot be one itself.
create table if not exists schema_migrations (
    number     integer     not null primary key,
    name       text        not null,
    checksum   text        not null,
    applied_at timestamptz not null default clock_timestamp()
);
create table if not exists schema_compatibility (
    only_row    boolean not null primary key default true check (only_row),
    oldest_code integer not null
);
insert into schema_compatibility (oldest_code) values (0) on conflict do nothing;

-- name: is_prepared
select to_regclass('restante.schema_compatibility') is not null;

-- name: applied
select number, name, checksum from schema_migrations;

-- name: oldest_code
select oldest_code from schema_compatibility;

-- name: record
insert into schema_migrations (number, name, checksum) values ($1, $2, $3);

-- name: raise_oldest_code
update schema_compatibility set oldest_code = greatest(oldest_code, $1);

-- name: invalid_indexes
-- What an interrupted `create index concurrently` leaves behind, unless it is still at work.
select index.relname as name
  from pg_index
  join pg_class index on index.oid = pg_index.indexrelid
  join pg_namespace on pg_namespace.oid = index.relnamespace
 where not pg_index.indisvalid
   and pg_namespace.nspname = 'restante'
   and index.relkind = 'i'
   and not exists (
       select from pg_stat_progress_create_index progress
        where progress.index_relid = pg_index.indexrelid
   );
