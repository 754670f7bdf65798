-- name: peers
-- Without ourselves: the address of this node may have been set after it was added as a peer.
select id, host, tables, shown_later, relays, token, token_hash is not null as has_token, protocol, cursor,
       max_ops_per_minute, max_bytes_per_minute, added_at, evict_after_days, evicted_at
  from op_peers
 where host is distinct from (select h.host from op_node o join op_hosts h on h.id = o.host_id)
 order by host;

-- name: peer_by_host
select id, host, tables, shown_later, relays, token, token_hash is not null as has_token, protocol, cursor,
       max_ops_per_minute, max_bytes_per_minute, added_at, evict_after_days, evicted_at
  from op_peers
 where host = $1;

-- name: peer_by_token
select id, host, tables, shown_later, relays, token, token_hash is not null as has_token, protocol, cursor,
       max_ops_per_minute, max_bytes_per_minute, added_at, evict_after_days, evicted_at
  from op_peers
 where token_hash = $1;

-- name: add_peer
-- What is null keeps its value; an empty array means all.  A token that the peer shows already stays,
-- unless a new one is asked for.
--
-- It takes snapshots of tables that it could not see before: it has read our log without them.  If it was
-- removed and is added again, nobody knows what it could see; if it is new, it reads from the beginning.
insert into op_peers as peer (host, token_hash, token, tables, relays, max_ops_per_minute,
                              max_bytes_per_minute, added_at, evict_after_days, shown_later)
values ($1, $2, $3, nullif($4::text[], '{}'), nullif($5::text[], '{}'), $6, $7, $8,
        nullif($10::float, 0),
        array(select id from op_tables where coalesce($4::text[], '{}') = '{}' or name = any ($4)))
    on conflict (host) do update
   set token_hash = case when $9 or peer.token_hash is null
                         then excluded.token_hash else peer.token_hash end,
       token = coalesce(excluded.token, peer.token),
       tables = case when $4::text[] is null then peer.tables else excluded.tables end,
       shown_later = case when $4::text[] is null then peer.shown_later else array(
           select op_tables.id
             from op_tables
            where (excluded.tables is null or op_tables.name = any (excluded.tables))
              and (op_tables.name <> all (peer.tables) or op_tables.id = any (peer.shown_later))
       ) end,
       relays = case when $5::text[] is null then peer.relays else excluded.relays end,
       max_ops_per_minute = coalesce(excluded.max_ops_per_minute, peer.max_ops_per_minute),
       max_bytes_per_minute = coalesce(excluded.max_bytes_per_minute, peer.max_bytes_per_minute),
       evict_after_days = case when $10::float is null then peer.evict_after_days
                               else excluded.evict_after_days end
returning token_hash = $2 as is_token_new;

-- name: remove_peer
with removed as (
    delete from op_peers where host = $1 returning id
), snapshots as (
    delete from op_snapshots where peer_id in (select id from removed)
), pins as (
    delete from op_pins where peer_id in (select id from removed)
)
select count(*) from removed;

-- name: read_from
-- Of a table that waits for its snapshot nothing was read since then.
select least(cursor, (select min(read_to) from op_snapshots where peer_id = $1))
  from op_peers
 where id = $1;

-- name: own_host
select h.host from op_node o join op_hosts h on h.id = o.host_id;

-- name: try_lock_pull
-- One session at a time pulls from a peer, and holds this lock on its connection.
select pg_try_advisory_lock(730118, $1);

-- name: unlock_pull
select pg_advisory_unlock(730118, $1);
