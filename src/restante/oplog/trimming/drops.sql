-- name: last_before
-- The last op before a position.
select era, xid, ulid, n
  from {partition}
 where (era, xid, ulid, n) < ($1, $2, $3, $4)
 order by era desc, xid desc, ulid desc, n desc
 limit 1;

-- name: newest_until
-- The largest ULID up to a position, and who made that op.
select ulid, (select host from op_hosts where id = origin) as host
  from {partition}
 where (era, xid, ulid, n) <= ($1, $2, $3, $4)
 order by ulid desc
 limit 1;

-- name: remove_older_parked
delete from op_parked
 where table_name = $1
   and exists (
    select from {partition} as newer join op_hosts on op_hosts.id = newer.origin
     where newer.key_hash = op_parked.key_hash
       and newer.key = op_parked.key
       and (newer.ulid, op_hosts.host collate "C") >= (op_parked.ulid, op_parked.origin collate "C")
       and (newer.era, newer.xid, newer.ulid, newer.n) <= ($2, $3, $4, $5)
   );

-- name: raise_marks
-- If the detach had to wait, the mark is there already, and what goes was counted with it.
update op_tables
   set floor_origin = case when $2 >= floor then $3 else floor_origin end,
       floor = greatest(floor, $2),
       trimmed = greatest(trimmed, $4),
       dropped_ops = dropped_ops + case when trimmed < $4 then $5 else 0 end,
       dropped_bytes = dropped_bytes + case when trimmed < $4 then $6 else 0 end,
       dormant_ops = dormant_ops + case when trimmed < $4 and $8 then $5 else 0 end,
       dropped_at = $7
 where id = $1;

-- name: trimmed
select trimmed from op_tables where id = $1;

-- name: evict
-- Those who have read all that goes lose nothing.
update op_peers
   set evicted_at = $2, evictions = evictions + 1, eviction = $4
 where host = any($1::text[]) and evicted_at is null and confirmed < $3
returning host;

-- name: begin_snapshots_again
-- What was dropped meanwhile may be what they were judged by.
update op_snapshots
   set phase = 'new', after = '', start = ''
 where table_id = $1 and peer_id in (select id from op_peers where host = any($2::text[]));

-- name: set_lock_timeout
select set_config('lock_timeout', $1, true);

-- name: no_statement_timeout
select set_config('statement_timeout', '0', true);

-- name: bounds
-- The bounds of a partition, as they are written.
select pg_get_expr(relpartbound, oid) from pg_class
 where relnamespace = 'restante'::regnamespace and relname = $1;

-- name: copy_after
insert into {copy}
select * from {partition}
 where (era, xid, ulid, n) > ($1, $2, $3, $4)
   and (era, xid) < ($5, $6);

-- name: copy_rest
-- What has been committed since.
insert into {copy}
select * from {partition}
 where (era, xid, ulid, n) > ($1, $2, $3, $4)
   and (era, xid) >= ($5, $6);
