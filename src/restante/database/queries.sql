-- name: has_schema
select to_regnamespace('restante') is not null;

-- name: create_schema
create schema restante;

-- name: prepare
-- Where migrations are recorded.  Created before the first of them, so it cannot be one itself.
create table if not exists restante.schema_migrations (
    number     integer     not null primary key,
    name       text        not null,
    checksum   text        not null,
    applied_at timestamptz not null default clock_timestamp()
);
create table if not exists restante.schema_compatibility (
    only_row    boolean not null primary key default true check (only_row),
    oldest_code integer not null
);
insert into restante.schema_compatibility (oldest_code) values (0) on conflict do nothing;

-- name: current_schema
select current_schema();

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
-- Left over by an interrupted `create index concurrently`; one that is still running is not listed.
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

-- name: partitions
-- Every partition of the given tables at the lowest level, and every table that was one and was left
-- over by an interrupted pass: its name is that of a parent, and a time.  The bounds come from the
-- catalogue, which decides where rows go; they are read without naming the relation, because
-- pg_get_expr would otherwise wait for its lock.
with recursive tree as (
    select relname as table_name, oid
      from pg_class
     where relnamespace = 'restante'::regnamespace and relname = any($1::text[])
    union all
    select tree.table_name, pg_inherits.inhrelid
      from tree join pg_inherits on pg_inherits.inhparent = tree.oid
)
select tree.table_name,
       parent.relname as parent,
       partition.relname as name,
       case when not pg_inherits.inhdetachpending then pg_get_expr(partition.relpartbound, 0) end as bounds,
       case when pg_inherits.inhdetachpending then 'detaching'
            -- By a trigger, or by a constraint where an older release is still running.
            when exists (select from pg_trigger
                          where tgrelid = partition.oid and tgname = 'sealed')
              or exists (select from pg_constraint
                          where conrelid = partition.oid and conname = 'sealed') then 'sealed'
            else 'attached' end as state
  from tree
  join pg_inherits on pg_inherits.inhrelid = tree.oid
  join pg_class parent on parent.oid = pg_inherits.inhparent
  join pg_class partition on partition.oid = tree.oid and partition.relkind = 'r'
union all
select tree.table_name, null, leftover.relname, null, 'detached'
  from tree
  join pg_class parent on parent.oid = tree.oid and parent.relkind = 'p'
  join pg_class leftover on left(leftover.relname, -16) = parent.relname
                        and right(leftover.relname, 16) ~ '^_\d{8}_\d{6}$'
 where leftover.relnamespace = 'restante'::regnamespace
   and leftover.relkind = 'r'
   and not leftover.relispartition
 order by 1, 3;

-- name: lock_partition_creation
-- Waits as long as a statement may run: a first start may create hundreds of partitions.
select pg_advisory_xact_lock(hashtextextended('restante.leaves.' || $1, 0));

-- name: set_lock_timeout
-- For this transaction only.
select set_config('lock_timeout', $1, true);

-- name: sizes
-- Bytes on disk with indexes and TOAST.  Waits for an ACCESS EXCLUSIVE lock on any of them.
select name, coalesce(pg_total_relation_size(to_regclass(quote_ident(name))), 0) as bytes
  from unnest($1::text[]) as name;

-- name: try_lock
select pg_try_advisory_lock(hashtextextended('restante.' || $1, 0));

-- name: unlock
select pg_advisory_unlock(hashtextextended('restante.' || $1, 0));

-- name: notify
select pg_notify($1, $2) from (select set_config('synchronous_commit', 'off', true)) as unsynced;

-- name: backend_pid
select pg_backend_pid();

-- name: accepts_writes
-- False on a standby, and where transactions are read-only by default.
select current_setting('transaction_read_only') = 'off';

-- name: end_lost_backend
-- Whether what a lost connection had begun is decided.  A backend that still works on it is left alone:
-- it notices by itself that its client is gone.  One that waits for its client is ended, because the
-- statement may still be on its way.  A pooler may have given it to another client; that one has
-- nothing of ours left.  A standby cannot tell: it may not have received the commit yet.
with lost as (
    select pid, state from pg_stat_activity
     where pid = $1
       and pid <> pg_backend_pid()
       and datname = current_database()
       and usename = session_user
       and (state = 'active' or not $2)
)
select not pg_is_in_recovery() and not exists (select from lost) as is_over,
       (select pg_terminate_backend(pid) from lost where state is distinct from 'active') as ended;
