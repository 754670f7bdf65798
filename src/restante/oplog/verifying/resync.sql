-- name: progress
select phase, records from op_snapshots where peer_id = $1 and table_id = $2;

-- name: failure
select failure from op_peers where id = $1;

-- name: refused
select refused from op_peers where id = $1;

-- name: known_of_keys
-- The newest op of each key, and why a change of it is parked.
select newest.ulid, newest.host, parked.sentence as parked
  from unnest($3::text[]) with ordinality as asked (key, at)
  left join lateral (
      select ops.ulid, op_hosts.host
        from ops
        join op_hosts on op_hosts.id = ops.origin
       where ops.table_id = $1
         and ops.key_hash = hashtextextended(asked.key, 0)
         and ops.key = asked.key
       order by ops.ulid desc, op_hosts.host collate "C" desc
       limit 1
  ) as newest on true
  left join lateral (
      select sentence
        from op_parked
       where table_name = $2
         -- One that came by a snapshot has no key beside its data.
         and coalesce(key, (select json_agg(data -> name order by n)::text
                              from unnest($4::text[]) with ordinality as k (name, n))) = asked.key
       order by ulid desc
       limit 1
  ) as parked on true
 order by asked.at;
