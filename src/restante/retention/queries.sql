-- name: clock
select clock_timestamp();

-- name: in_the_way
-- Whoever has a lock on one of these tables, prepared transactions too, and whose snapshot is the oldest: the end
-- of a detach waits for all of those.
with held as (
    select distinct pid, virtualtransaction from pg_locks
     where locktype = 'relation' and granted
       and database = (select oid from pg_database where datname = current_database())
       and relation = any(array(select to_regclass(quote_ident(name)) from unnest($1::text[]) as name)::oid[])
       and pid is distinct from pg_backend_pid()
)
select 'process ' || pid as who, coalesce(nullif(application_name, ''), backend_type, 'unknown') as what,
       xact_start as since
  from pg_stat_activity
 where pid <> pg_backend_pid()
   and datname = current_database()
   and (pid in (select pid from held)
        or not exists (select from held) and backend_xmin is not null)
union all
select 'the prepared transaction ' || gid, owner, prepared
  from pg_prepared_xacts
 where database = current_database()
   and (exists (select from held join pg_locks as own using (virtualtransaction)
                 where own.transactionid = pg_prepared_xacts.transaction)
        or not exists (select from held))
 order by since
 limit 3;

-- name: save_settings
insert into chosen_retention (ack_seconds, feed_seconds) values ($1, $2)
    on conflict (only_row) do update
   set ack_seconds = excluded.ack_seconds, feed_seconds = excluded.feed_seconds;

-- name: saved_settings
select ack_seconds, feed_seconds from chosen_retention;

-- name: relations
select relname as name, coalesce(pg_stat_get_dead_tuples(oid), 0) as dead_rows
  from pg_class
 where relnamespace = 'restante'::regnamespace and relkind = 'r';

-- name: oldest_transactions
select pid, coalesce(nullif(application_name, ''), backend_type) as who,
       extract(epoch from clock_timestamp() - xact_start)::float as seconds
  from pg_stat_activity
 where xact_start is not null and pid <> pg_backend_pid()
   and datname = current_database()
   and clock_timestamp() - xact_start > $1::interval
 order by xact_start
 limit 5;

-- name: slots
select slot_name as who, active,
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint as bytes
  from pg_replication_slots
 where restart_lsn is not null
 order by bytes desc
 limit 5;

-- name: take_sample
insert into space_samples (taken_at, bytes, tables) values ($1, $2, $3) on conflict do nothing;

-- name: count_samples
select count(*) from space_samples where taken_at < $1;

-- name: delete_samples
with deleted as (
    delete from space_samples
     where taken_at in (select taken_at from space_samples
                         where taken_at < $1 limit $2 for update skip locked)
    returning true
)
select count(*) from deleted;

-- name: growth
-- Bytes a day over the samples of the last week, once they cover an hour.
select (last.bytes - first.bytes) / (extract(epoch from last.taken_at - first.taken_at) / 86400)::float
  from (select * from space_samples where taken_at > $1::timestamptz - interval '7 days'
         order by taken_at limit 1) as first,
       (select * from space_samples order by taken_at desc limit 1) as last
 where last.taken_at - first.taken_at >= interval '1 hour';

-- name: growth_by_table
-- The same for each table that is in the first and in the last of them.
select name, (size::bigint - (first.tables ->> name)::bigint)
             / (extract(epoch from last.taken_at - first.taken_at) / 86400)::float as bytes_per_day
  from (select * from space_samples
         where taken_at > $1::timestamptz - interval '7 days' and tables::text <> '{}'
         order by taken_at limit 1) as first,
       (select * from space_samples order by taken_at desc limit 1) as last,
       json_each_text(last.tables) as sizes (name, size)
 where last.taken_at - first.taken_at >= interval '1 hour' and first.tables ->> name is not null;

-- name: directories
-- Only of a server on this machine: elsewhere the same path is on another disk.
select setting as data_directory, pg_tablespace_location(dattablespace) as tablespace,
       pg_backend_pid() as pid
  from pg_settings, pg_database
 where name = 'data_directory' and datname = current_database()
   and (inet_server_addr() is null or inet_server_addr() <<= '127.0.0.0/8' or inet_server_addr() = '::1');

-- name: keep_little_in_memory
set local work_mem = '64kB';

-- name: probe
-- The sort does not fit into memory: it writes a file, no WAL and no table.
select count(*) from (select repeat(md5(n::text), 32) from generate_series(1, 16384) as n order by 1) as sorted;

-- name: may_checkpoint
select pg_has_role('pg_checkpoint', 'usage');

-- name: checkpoint
checkpoint;
