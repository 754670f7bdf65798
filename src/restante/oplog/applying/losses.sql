-- name: first_not_older
-- For each change the first op of its key that is not older than it.
select wanted.at, found.ulid, found.host, found.action = 'd' as is_delete, found.data
  from unnest($2::bigint[], $3::text[], $4::uuid[], $5::text[])
       with ordinality as wanted (key_hash, key, ulid, host, at)
 cross join lateral (
    select ops.ulid, op_hosts.host, ops.action, ops.data
      from restante.ops
      join restante.op_hosts on op_hosts.id = ops.origin
     where ops.table_id = $1
       and ops.key_hash = wanted.key_hash
       and ops.key = wanted.key
       and ops.ulid >= wanted.ulid
       and (ops.ulid > wanted.ulid or op_hosts.host collate "C" >= wanted.host)
     order by ops.ulid, op_hosts.host collate "C"
     limit 1
 ) as found;

-- name: ops_of
-- These ops of the log, each with its data and its position.
select wanted.at, wanted.ulid, found.*
  from unnest($2::bigint[], $3::text[], $4::uuid[], $5::text[])
       with ordinality as wanted (key_hash, key, ulid, host, at)
 cross join lateral (
    select ops.era, ops.xid, ops.n, ops.data
      from restante.ops
      join restante.op_hosts on op_hosts.id = ops.origin
     where ops.table_id = $1
       and ops.key_hash = wanted.key_hash
       and ops.key = wanted.key
       and ops.ulid = wanted.ulid
       and op_hosts.host = wanted.host
     limit 1
 ) as found;
