-- name: canonical
-- Values have one text form only, and operators of types in the tables' schemas are found.
select set_config('search_path', $1, true), set_config('timezone', 'UTC', true),
       set_config('datestyle', 'ISO, MDY', true), set_config('intervalstyle', 'postgres', true),
       set_config('extra_float_digits', '1', true), set_config('bytea_output', 'hex', true),
       set_config('lc_monetary', 'C', true),
       -- The statistics of a table that has just grown say that it is empty.
       set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true);

-- name: begin
-- Everything below the horizon is visible to the pages, everything else follows in the log.  A
-- transaction that was prepared before the last restart has an earlier era and may still commit.
select op_current_era() as era, op_horizon() as xmin,
       exists (select from pg_prepared_xacts where prepared < pg_postmaster_start_time())
           as has_old_prepared,
       -- Whoever waits for its first snapshot of the table has read nothing of it, whatever else it has read.
       (select least(cursor, (select read_to from op_snapshots where peer_id = $1 and table_id = $2))
          from op_peers
         where id = $1
           and not exists (select from op_snapshots where peer_id = $1 and table_id = $2 and is_new)
       ) as cursor_on_you;

-- name: pin
insert into op_pins (peer_id, table_id, position, expires_at) values ($1, $2, $3, $4)
    on conflict (peer_id, table_id) do update
   set position = excluded.position, expires_at = excluded.expires_at;

-- name: renew
-- The pins of all tables: the log is read from the first of them when the last snapshot is complete.
with renewed as (
    update op_pins set expires_at = $5
     where peer_id = $1 and expires_at > $4
    returning table_id, position
)
select op_current_era() from renewed where table_id = $2 and position = $3;

-- name: marks
-- Read after a page: what is dropped while it is read is known then.
select state, trimmed, floor, floor_origin from restante.op_tables where id = $1;

-- name: deletes_page
-- Scans a bounded number of keys, whether they were deleted or not.
select key_hash, key, ulid, n, host, approximate, is_delete,
       case when is_delete then data::text end as data
  from (
    select distinct on (ops.key_hash, ops.key collate "C") ops.key_hash, ops.key, ops.ulid, ops.n,
           (select host from restante.op_hosts where id = ops.origin) as host, ops.approximate,
           ops.action = 'd' as is_delete, ops.data
      from restante.{log} as ops
     where ops.key_hash >= $1 and (ops.key_hash, ops.key collate "C") > ($1, $2 collate "C")
     order by ops.key_hash, ops.key collate "C", ops.ulid desc,
              (select host from restante.op_hosts where id = ops.origin) collate "C" desc
  ) as newest
 order by key_hash, key collate "C"
 limit $3;

-- name: records_page
-- The sizes are those on disk, so that no large value is read before it is known to fit.  Keys are renamed
-- to k0, k1, ..., so that no name of a column can be mistaken for one of ours.
with sized as (
    select {renamed}, row_number() over () as at,
           sum(size) over (rows unbounded preceding) - size as before
      from (
        select {keys_renamed}, {sizes} as size
          from {relation} as t
         where {above}
         order by {keys}
         limit $2
      ) as first
)
select sized.at, row_to_json(t.*)::text as data, json_build_object({names_and_keys})::text as key,
       newest.ulid, newest.n, newest.host, newest.approximate, newest.is_delete
  from sized
  join {relation} as t on {same}
  left join lateral ({newest}) as newest on true
 where sized.before < $3 or sized.at = 1;

-- name: missing_of
-- The keys that have no record here, with their newest op if there is one.
select asked.at, newest.ulid, newest.n, newest.host, newest.approximate, newest.is_delete
  from json_array_elements($1::json) with ordinality as asked (data, at)
 cross join lateral json_populate_record(null::{relation}, asked.data) as k
  left join {relation} as t on {same}
  left join lateral ({newest_of_k}) as newest on true
 where t.{first_key} is null;

-- name: bound
(select bound.{key} from json_populate_record(null::{relation}, $1::json) as bound)

-- name: newest
select ops.ulid, ops.n, op_hosts.host, ops.approximate, ops.action = 'd' as is_delete
  from restante.{log} as ops
  join restante.op_hosts on op_hosts.id = ops.origin
 where ops.key_hash = hashtextextended(json_build_array({values})::text, 0)
   and ops.key = json_build_array({values})::text
 order by ops.ulid desc, op_hosts.host collate "C" desc
 limit 1
