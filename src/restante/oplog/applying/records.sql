-- name: begin
-- The texts of values are as in capture, whatever the database's defaults.  Each statement is planned for the
-- tables as they are now: a plan from when they were small would scan them for each record.
select set_config('search_path', $1, true),
       set_config('lock_timeout', $2, true),
       set_config('timezone', 'UTC', true),
       set_config('datestyle', 'ISO', true),
       set_config('intervalstyle', 'postgres', true),
       set_config('extra_float_digits', '1', true),
       set_config('bytea_output', 'hex', true),
       set_config('lc_monetary', 'C', true),
       set_config('plan_cache_mode', 'force_custom_plan', true),
       set_config('enable_sort', 'on', true),
       pg_current_xact_id();

-- name: capture_nothing_of
select set_config('restante.applying', $1, true);

-- name: append
-- $2 to $5 describe the ops; the rest has one value per record, the first of them being the op's number.
insert into restante.ops (
    table_id, arrived_at, era, xid, ulid, n, origin, action, approximate, key_hash, old_hash, key, data
)
select $1, arrival.at, arrival.era, arrival.xid,
       ($2::uuid[])[new.op], new.n, ($3::integer[])[new.op], ($4::text[])[new.op]::restante.op_action,
       ($5::boolean[])[new.op], new.key_hash, new.old_hash, new.key, new.data
  from rows from (
    unnest(string_to_array($6, ',')::integer[], string_to_array($7, ',')::integer[],
           string_to_array($8, ',')::bigint[], string_to_array($9, ',', '')::bigint[]),
    json_array_elements_text($10::json),
    json_array_elements($11::json)
  ) as new (op, n, key_hash, old_hash, key, data)
 cross join (
    select clock_timestamp() as at,
           restante.op_current_era() as era,
           pg_current_xact_id()::text::bigint as xid
    offset 0
  ) as arrival;

-- name: raise_clock
select restante.op_tick(1, $1);
