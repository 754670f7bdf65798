-- name: cursors
-- Of a table that waits for its snapshot nothing was read since then.
select id, host, relays, cursor,
       coalesce(least(cursor, (select min(read_to) from op_snapshots where peer_id = op_peers.id)), '')
           as read_to,
       exists (select from op_snapshots where peer_id = op_peers.id) as takes_snapshot,
       exists (select from op_parked where peer_id = op_peers.id) as has_parked,
       array(select name from op_tables
              where op_peers.tables is null or name = any(op_peers.tables)
              order by name) as may_see,
       array(select name from op_tables
              where id = any(joined_tables) and state = 'tracked'
                and (op_peers.tables is null or name = any(op_peers.tables))
              order by name) as reads
  from op_peers
 where protocol is distinct from 'ulid'
 order by host;

-- name: seed
-- Only the cursor that was looked at: whoever pulls meanwhile has moved it.
update op_peers
   set cursor = $2, cursor_at = $4
 where id = $1 and cursor = $3
   and not exists (select from op_snapshots where peer_id = $1)
returning true;

-- name: parked
select table_name, count(*) as ops
  from op_parked
 where table_name = any($1::text[])
 group by table_name
 order by table_name;

-- name: last_below
select era, xid, ulid, n
  from ops
 where table_id = any($1::int[]) and (era, xid) < ($2, $3)
 order by era desc, xid desc, ulid desc, n desc
 limit 1;

-- name: unread
-- Bounded: a peer may have been away for a year.
select count(*) as ops, coalesce(sum(size), 0)::bigint as bytes, min(arrived_at) as since
  from (
      select arrived_at, pg_column_size(data) as size
        from ops
       where table_id = any($1::int[])
         and (era, xid, ulid, n) > ($2, $3, $4, $5)
         and (era, xid, ulid, n) <= ($6, $7, $8, $9)
       order by era, xid, ulid, n
       limit $10
  ) as unread;

-- name: has_until
-- Whether a partition has an op up to a position.
select exists (select from {partition} where (era, xid, ulid, n) <= ($1, $2, $3, $4));
