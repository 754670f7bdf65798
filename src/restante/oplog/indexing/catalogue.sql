-- name: tables
-- The log, the logs of the tables, and their partitions.  Partitions that are being detached are left out.
-- Only a superuser or pg_read_all_stats sees which table another role's build is about: for everybody
-- else the lock that it holds tells.
with recursive tree as (
    select oid, null::oid as parent
      from pg_class
     where relnamespace = 'restante'::regnamespace and relname = $1
    union all
    select pg_inherits.inhrelid, pg_inherits.inhparent
      from tree join pg_inherits on pg_inherits.inhparent = tree.oid
     where not pg_inherits.inhdetachpending
)
select pg_class.relname as name,
       parent.relname as parent,
       pg_class.relkind = 'p' as is_partitioned,
       pg_class.reltuples::float as rows,
       pg_class.relpages as pages,
       case when pg_class.relkind = 'r' then coalesce(pg_relation_size(pg_class.oid), 0) else 0 end as bytes,
       exists (select from pg_trigger where tgrelid = pg_class.oid and tgname = 'sealed') as is_sealed,
       (select min(progress.pid)
          from pg_stat_progress_create_index as progress
         where progress.datname = current_database()
           and progress.pid <> pg_backend_pid()
           and (progress.relid = pg_class.oid
             or progress.relid is null and exists (
                   select from pg_locks
                    where pg_locks.pid = progress.pid
                      and pg_locks.relation = pg_class.oid
                      and pg_locks.mode = 'ShareUpdateExclusiveLock'
                      and pg_locks.granted))
       ) as built_by
  from tree
  join pg_class on pg_class.oid = tree.oid
  left join pg_class parent on parent.oid = tree.parent
 order by pg_class.relname;

-- name: indexes
-- Of these tables; those that belong to a constraint are left to it.
select index.relname as name,
       owner.relname as table_name,
       parent.relname as parent,
       pg_index.indisvalid and pg_index.indisready and pg_index.indislive as is_valid,
       pg_index.indisunique as is_unique,
       substring(pg_get_indexdef(index.oid) from ' USING (.*)$') as definition
  from pg_index
  join pg_class index on index.oid = pg_index.indexrelid
  join pg_class owner on owner.oid = pg_index.indrelid
  left join pg_inherits on pg_inherits.inhrelid = index.oid
  left join pg_class parent on parent.oid = pg_inherits.inhparent
 where owner.relnamespace = 'restante'::regnamespace
   and owner.relname = any($1::text[])
   and not exists (select from pg_constraint where conindid = index.oid)
 order by index.relname;

-- name: column_widths
select attname as name, attlen as bytes
  from pg_attribute
 where attrelid = to_regclass($1) and attnum > 0 and not attisdropped and attlen > 0;

-- name: progress
select phase,
       case when blocks_total > 0 then blocks_done::float / blocks_total
            when tuples_total > 0 then tuples_done::float / tuples_total end as part
  from pg_stat_progress_create_index
 where pid = $1;

-- name: blockers
-- Who a session waits for now.
select pid, coalesce(nullif(application_name, ''), backend_type, 'of another role') as who,
       extract(epoch from clock_timestamp() - xact_start)::float as seconds
  from pg_stat_activity
 where pid = any(pg_blocking_pids($1))
 order by xact_start;

-- name: holders
-- Who has locked a table, or an index of it, other than us.
select pid, coalesce(nullif(application_name, ''), backend_type, 'of another role') as who,
       extract(epoch from clock_timestamp() - xact_start)::float as seconds
  from pg_stat_activity
 where pid <> all($2::integer[])
   and pid in (
       select pg_locks.pid
         from pg_locks
        where pg_locks.granted
          and pg_locks.database = (select oid from pg_database where datname = current_database())
          and (pg_locks.relation = to_regclass($1)
            or pg_locks.relation in (select indexrelid from pg_index where indrelid = to_regclass($1))))
 order by xact_start
 limit 3;

-- name: lock_holder
select pg_stat_activity.pid,
       coalesce(nullif(application_name, ''), backend_type, 'of another role') as who,
       null::float as seconds
  from pg_locks
  join pg_stat_activity on pg_stat_activity.pid = pg_locks.pid
 where locktype = 'advisory' and granted and objsubid = 1
   and pg_locks.database = (select oid from pg_database where datname = current_database())
   and (classid::bigint << 32) | objid::bigint = hashtextextended('restante.' || $1, 0);

-- name: pid
select pg_backend_pid();

-- name: cancel
select pg_cancel_backend($1);
