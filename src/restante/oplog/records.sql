-- name: begin
-- The texts of values are as in capture, whatever the database's defaults.
select set_config('search_path', $1, true),
       set_config('lock_timeout', $2, true),
       set_config('restante.applying', 'on', true),
       set_config('timezone', 'UTC', true),
       set_config('datestyle', 'ISO', true),
       set_config('intervalstyle', 'postgres', true),
       set_config('extra_float_digits', '1', true),
       set_config('bytea_output', 'hex', true),
       pg_current_xact_id();

-- name: append
insert into restante.ops (
    table_id, arrived_at, era, xid, ulid, n, origin, action, approximate, key_hash, old_hash, key, data
)
select $1, arrival.at, arrival.era, arrival.xid,
       new.ulid, new.n, new.origin, new.action::"char", new.approximate, new.key_hash, new.old_hash,
       new.key, new.data
  from rows from (
    unnest($2::uuid[], $3::integer[], $4::integer[], $5::text[], $6::boolean[], $7::bigint[], $8::bigint[], $9::text[]),
    json_array_elements($10::json)
  ) as new (ulid, n, origin, action, approximate, key_hash, old_hash, key, data)
 cross join (
    select clock_timestamp() as at,
           restante.op_current_era() as era,
           pg_current_xact_id()::text::bigint as xid
    offset 0
  ) as arrival;

-- name: raise_clock
select restante.op_tick(1, $1);
