-- name: save_limits
update op_node set limits = $1 where limits::text <> $1::json::text;

-- name: saved_limits
select limits from op_node;

-- name: note_time
-- The time must go on; until a while after a jump the one before the first of several counts.
update op_node
   set jumped_from = case when not has_jumped then jumped_from
                          when $1 < jumped_at + $3::interval then least(jumped_from, alive_at)
                          else alive_at end,
       jumped_at = case when has_jumped then $1 else jumped_at end,
       alive_at = $1
  from (select alive_at > $1::timestamptz + interval '1 minute'
               or alive_at < $1::timestamptz - $2::interval as has_jumped
          from op_node) as noted
returning has_jumped;

-- name: noted_time
select alive_at, jumped_at, jumped_from from op_node;

-- name: tables
select id, name, 'ops_' || id as parent, state, retention_days, cap_days, cap_bytes, floor, dropped_ops,
       dropped_bytes, dropped_at
  from op_tables
 order by name;

-- name: peers
select host, passed, confirmed, tables, confirmed_at as seen_at, added_at, evict_after_days, evicted_at, spared_until,
       failure
  from op_peers
 order by host;

-- name: own_host
select h.host from op_node o join op_hosts h on h.id = o.host_id;

-- name: reached
-- The first op that a peer has not passed.
select arrived_at
  from ops
 where (era, xid, ulid, n) > ($1, $2, $3, $4)
 order by era, xid, ulid, n
 limit 1;

-- name: pins
select op_peers.host, table_id, position
  from op_pins join op_peers on op_peers.id = peer_id
 where expires_at > $1;

-- name: taking
-- Snapshots that we take and that go on; one that stands still is begun again after its peer is evicted.
select table_id, min(op_peers.host) as host
  from op_snapshots join op_peers on op_peers.id = peer_id
 where phase <> 'new' and progressed_at > $1
 group by table_id;

-- name: ends
-- The first and the last op of a partition, and the last by its ULID.
select '{name}' as name, last.era, last.xid, last.ulid, last.n,
       greatest(last.arrived_at, newest.arrived_at) as last_at, first.arrived_at as first_at
  from (select era, xid, ulid, n, arrived_at from {partition}
         order by era desc, xid desc, ulid desc, n desc limit 1) as last,
       (select arrived_at from {partition} order by ulid desc limit 1) as newest,
       (select arrived_at from {partition} order by era, xid, ulid, n limit 1) as first

-- name: rows
-- As Postgres estimates them, by the name of the partition.
select relname as name, greatest(pg_stat_get_live_tuples(oid), reltuples, 0)::bigint as rows
  from pg_class
 where relnamespace = 'restante'::regnamespace and relname = any($1::text[]);
