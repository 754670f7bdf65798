-- The words in braces are expressions and identifiers of the tracked table, quoted in taking_page.py.

-- name: check_constraints
-- A deferred one would fail at the commit, where nobody knows the record.
set constraints all immediate;

-- name: own_keys
select json_build_object({names_and_keys})::text as key
  from {relation} as t
 where {above}
 order by {keys}
 limit $2;

-- name: plan_by_index
-- The statistics of a table that has just grown say that it is empty.
select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true);

-- name: hashes_records
-- How capture hashes old rows, which depends on the types of the columns.
select count(*) > 0
  from pg_proc
 where pronamespace = 'restante'::regnamespace
   and proname = 'op_capture_' || $1::integer
   and position('hash_record_extended' in prosrc) > 0;

-- name: compare
-- What we have of each key, with the server's record turned into a row of our own type.  A change that
-- the server has made itself is known to it, although it has not read it from us.
select asked.at, own_key.key, hashtextextended(own_key.key, 0) as key_hash,
       t.{first_key} is not null as has_record, row_to_json(t.*)::text as own,
       {same_columns} as is_same_record,
       {own_hash} as own_hash, {server_hash} as server_hash,
       newest.ulid, newest.host, newest.approximate, newest.is_delete,
       unsent.action::text as unsent_action, unsent.old_hash as unsent_old_hash
  from json_array_elements($1::json) with ordinality as asked (data, at)
 cross join lateral json_populate_record(null::{relation}, asked.data) as s
 cross join lateral (select json_build_array({server_keys})::text as key) as own_key
  left join {relation} as t on {same_key}
  left join lateral ({newest}) as newest on true
  left join lateral (
    -- The offset keeps the index of positions from being scanned for each key.
    select same_key.action, same_key.old_hash
      from (
        select * from restante.{log} as ops
         where ops.key_hash = hashtextextended(own_key.key, 0)
           and ops.key = own_key.key
           and ops.origin <> $6
        offset 0
      ) as same_key
     where (same_key.era, same_key.xid, same_key.ulid, same_key.n) > ($2, $3, $4, $5)
     order by same_key.era, same_key.xid, same_key.ulid, same_key.n
     limit 1
  ) as unsent on true
 order by asked.at;
