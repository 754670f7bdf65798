-- name: tables
-- Sizes and counts come from the statistics of Postgres and from the catalogue: no op is read.
with recursive tree as (
    select op_tables.id as table_id, to_regclass('restante.ops_' || op_tables.id)::oid as oid
      from op_tables
    union all
    select tree.table_id, inhrelid from tree join pg_inherits on inhparent = tree.oid
), parts as (
    select table_id,
           coalesce(pg_stat_get_live_tuples(pg_class.oid), 0) as ops,
           pg_total_relation_size(pg_class.oid) as bytes,
           substring(pg_get_expr(relpartbound, 0) from 'TO \(''([^'']+)''\)')::timestamptz as until
      from tree join pg_class on pg_class.oid = tree.oid
     where relkind = 'r'
)
select op_tables.id, name, floor, dropped_ops, dropped_bytes, dropped_at, dormant_ops,
       case when to_regclass(format('%I.%I', schema_name, table_name)) is null then 'missing'
            else state end as state,
       coalesce(sum(parts.ops), 0)::bigint as ops,
       coalesce(sum(parts.bytes), 0)::bigint as bytes,
       count(parts.table_id)::int as partitions,
       extract(epoch from max(parts.until) - $1::timestamptz)::float as ahead_seconds
  from op_tables left join parts on parts.table_id = op_tables.id
 group by op_tables.id
 order by name;

-- name: peers
select id, host, tables, protocol, cursor, cursor_problem, pulled_at, failing_since, failure,
       remote_lag_ops, remote_lag_bytes, remote_lag_seconds, skew_seconds, applied, superseded,
       parked, refused, refused_by, conflicts, gaps, confirmed, confirmed_at, schema_differences,
       evict_after_days, evicted_at, evictions, eviction
  from op_peers
 where host is distinct from (select h.host from op_node o join op_hosts h on h.id = o.host_id)
 order by host;

-- name: waiting
-- Bounded: a peer that was away for a month must not make everybody's status slow.
select count(*) as ops, coalesce(sum(size), 0)::bigint as bytes,
       coalesce(extract(epoch from $6::timestamptz - min(arrived_at)), 0)::float as seconds
  from (
      select arrived_at, pg_column_size(data) as size
        from ops
       where table_id = any($1::int[])
         and (era, xid, ulid, n) > ($2, $3, $4, $5)
       order by era, xid, ulid, n
       limit $7
  ) as unread;

-- name: visible_tables
select array_agg(id) from op_tables where $1::text[] is null or name = any($1);

-- name: confirmed_by
select tables, confirmed from op_peers where id = $1;

-- name: parked
select reason, count(*) as ops from op_parked group by reason order by reason;

-- name: conflicts
-- The table is kept bounded by the sweep.
select count(*) as kept, min(noticed_at) as since from op_conflicts;

-- name: kept
-- What is kept beside the log; counting stops at a limit.
select (select count(*) from (select from op_parked limit $1) as first) as parked,
       pg_total_relation_size('op_parked') as parked_bytes,
       (select count(*) from (select from op_conflicts limit $1) as first) as conflicts,
       (select count(*) from op_snapshots where phase <> 'done') as snapshots_taken,
       (select count(*) from op_pins) as snapshots_served,
       (select count(*) from (select from op_unsettled limit $1) as first) as unsettled_deletes,
       (select count(*) from op_hosts) as hosts;

-- name: snapshots
select op_peers.host as peer, coalesce(op_tables.name, '') as table, phase, records, started_at,
       progressed_at
  from op_snapshots
  join op_peers on op_peers.id = op_snapshots.peer_id
  left join op_tables on op_tables.id = op_snapshots.table_id
 where phase <> 'done'
 order by 1, 2;

-- name: horizon_holder
-- Of any database: transaction ids are shared by all of them.  Without pg_read_all_stats a role sees only
-- its own sessions.
select pid, who, state, seconds, query_started_at, prepared
  from (
      select pid, concat_ws(' ', usename, nullif(application_name, '')) as who,
             coalesce(state, '') as state, age(backend_xid) as xids,
             extract(epoch from clock_timestamp() - xact_start)::float as seconds,
             query_start as query_started_at, null as prepared
        from pg_stat_activity
       where backend_xid is not null and pid <> pg_backend_pid()
      union all
      select null, owner, 'prepared', age(transaction),
             extract(epoch from clock_timestamp() - prepared)::float, null, gid
        from pg_prepared_xacts
  ) as writing
 where seconds is not null
 order by xids desc
 limit 1;

-- name: clock
select last_value from op_clock;

-- name: appended
-- Rows that were ever inserted into each partition of the log, rolled back ones included.
with recursive tree as (
    select 'restante.ops'::regclass::oid as oid
    union all
    select inhrelid from tree join pg_inherits on inhparent = tree.oid
)
select tree.oid::bigint as partition, pg_stat_get_tuples_inserted(tree.oid) as rows
  from tree join pg_class on pg_class.oid = tree.oid
 where relkind = 'r';

-- name: note_look
update op_peers
   set remote_lag_ops = $2, remote_lag_bytes = $3, remote_lag_seconds = $4, looked_at = $5,
       schema_differences = $6
 where id = $1;
