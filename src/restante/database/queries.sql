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

-- name: leaves
-- Every leaf of our tables, and every table that was one and was left over.  Sizes are asked for apart.
-- The bounds are read back from the catalogue: it, and not our arithmetic, decides where rows go.  They
-- are asked for without saying whose they are: otherwise Postgres would wait for whoever has it locked.
select parent.relname as table_name,
       leaf.relname as name,
       case when not pg_inherits.inhdetachpending then pg_get_expr(leaf.relpartbound, 0) end as bounds,
       case when pg_inherits.inhdetachpending then 'detaching'
            -- By a trigger; by a constraint in databases where an older release is at work.
            when exists (select from pg_trigger
                          where tgrelid = leaf.oid and tgname = 'sealed')
              or exists (select from pg_constraint
                          where conrelid = leaf.oid and conname = 'sealed') then 'sealed'
            else 'attached' end as state
  from pg_inherits
  join pg_class parent on parent.oid = pg_inherits.inhparent
  join pg_class leaf on leaf.oid = pg_inherits.inhrelid
 where parent.oid in ('chunks'::regclass, 'feed'::regclass)
union all
select split_part(relname, '_', 1), relname, null, 'detached'
  from pg_class
 where relnamespace = 'restante'::regnamespace
   and relkind = 'r'
   and not relispartition
   and relname ~ '^(chunks|feed)_\d{8}_\d{6}$'
 order by 1, 2;

-- name: take_turns
-- Waited for as long as a statement may run: at a first start the one before may create hundreds.
select pg_advisory_xact_lock(hashtextextended('restante.leaves.' || $1, 0));

-- name: give_up_early
-- Whoever waits for a lock on the parent holds up everyone who comes after.
select set_config('lock_timeout', '2s', true);

-- name: try_lock
select pg_try_advisory_lock(hashtextextended('restante.' || $1, 0));

-- name: unlock
select pg_advisory_unlock(hashtextextended('restante.' || $1, 0));
