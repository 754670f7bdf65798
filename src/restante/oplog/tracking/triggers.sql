-- name: capture
-- The body of the function of one table, with placeholders.  Its variables do not clash with columns of
-- the table: those are always qualified, or one level deeper.
declare
    arrived constant timestamptz := clock_timestamp();
    era bigint;
    xid bigint;
    total bigint;
    shape bigint;
    host integer;
    ops integer;
    first_tick bigint;
    tail text;
    ulids uuid[];
    old_hashes bigint[];
    is_plain boolean;
    depth integer;
    statement text;
begin
    -- A change of a peer, which is logged as such.  What it causes in other tables is ours.  Anybody can
    -- set this, so it counts only for those who may act as our role, which this function runs as.
    if current_setting('restante.applying', true) = '${id}'
            and pg_has_role(session_user, current_user, 'member') then
        return null;
    end if;
    if tg_op = 'DELETE' then
        select (select count(*) from old_rows), (
            select bit_xor(hashtextextended(attname::text, atttypid::bigint)) from pg_attribute
             where attrelid = tg_relid and attnum > 0 and not attisdropped),
            (select host_id from restante.op_node)
          into total, shape, host;
    else
        select (select count(*) from new_rows), (
            select bit_xor(hashtextextended(attname::text, atttypid::bigint)) from pg_attribute
             where attrelid = tg_relid and attnum > 0 and not attisdropped),
            (select host_id from restante.op_node)
          into total, shape, host;
    end if;
    if total = 0 then
        return null;
    end if;
    era := restante.op_current_era();
    xid := pg_current_xact_id()::text::bigint;
    ops := (total + ${batch_less_1}) / ${batch};
    tail := right(replace(gen_random_uuid()::text, '-', ''), 16);
    -- A trigger that fired before this one may have changed the same rows again.
    -- The depth is the length of a setting, so that no value that a session gives it is an error.
    depth := coalesce(length(current_setting('restante.nested_${id}', true)), 0);
    is_plain := shape = ${shape} and total <= ${max_fast} and depth <= pg_trigger_depth();
    if pg_trigger_depth() > 1 and depth < pg_trigger_depth() then
        perform set_config('restante.nested_${id}', repeat('.', pg_trigger_depth()), true);
    end if;
    if is_plain and tg_op = 'UPDATE' and total > 1 then
        -- Both tables list the rows in the same order; if that ever changes, or if a key was changed, the
        -- comparison notices.
        select (select row(${new_key_lists}) from new_rows as n) = old_lists.keys, old_lists.hashes
          into is_plain, old_hashes
          from (select row(${old_key_lists}) as keys, array_agg(${old_hash}) as hashes
                  from old_rows as o) as old_lists;
    elsif is_plain and tg_op = 'DELETE' then
        -- A MERGE, or a WITH, may have inserted the same key after it was deleted.  The log would tell, but
        -- two serializable transactions that read and write it fail.
        is_plain := current_setting('restante.created_${id}', true) is distinct from xid::text;
    end if;
    if tg_op = 'INSERT' or (tg_op = 'UPDATE' and not is_plain) then
        perform set_config('restante.created_${id}', xid::text, true);
    end if;
    if is_plain and tg_op = 'UPDATE' and total = 1 then
        first_tick := restante.op_tick(1);
        insert into restante.ops_${id} (
            table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, old_hash, key, data
        )
        select ${id}, arrived, era, xid, restante.op_ulid(first_tick, tail), 0, host, 'u',
               hashtextextended(k, 0), h, k, d
          from (
            select ${new_key} as k, row_to_json(n.*) as d, ${old_hash} as h from new_rows as n, old_rows as o
             where ${new_key} = ${old_key}
          ) as change;
        if found then
            return null;
        end if;
        is_plain := false;
        perform set_config('restante.created_${id}', xid::text, true);
    end if;
    if not is_plain then
        first_tick := restante.op_tick(3 * ops);
        foreach statement in array restante.op_capture_statements(${id}, tg_relid, tg_op) loop
            execute statement using arrived, era, xid, first_tick, tail, host, ops;
        end loop;
        return null;
    end if;
    first_tick := restante.op_tick(ops);
    if ops = 1 then
        ulids := array[restante.op_ulid(first_tick, tail)];
    else
        ulids := array(select restante.op_ulid(first_tick + at, tail) from generate_series(0, ops - 1) as at);
    end if;
    if tg_op = 'INSERT' then
        insert into restante.ops_${id} (
            table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, old_hash, key, data
        )
        select ${id}, arrived, era, xid, ulids[1 + (i - 1) / ${batch}], (i - 1) % ${batch}, host,
               'c', hashtextextended(k, 0), null, k, d
          from (
            select row_number() over () as i, ${new_key} as k, row_to_json(n.*) as d from new_rows as n
          ) as changes;
    elsif tg_op = 'UPDATE' then
        insert into restante.ops_${id} (
            table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, old_hash, key, data
        )
        select ${id}, arrived, era, xid, ulids[1 + (i - 1) / ${batch}], (i - 1) % ${batch}, host,
               'u', hashtextextended(k, 0), old_hashes[i], k, d
          from (
            select row_number() over () as i, ${new_key} as k, row_to_json(n.*) as d from new_rows as n
          ) as changes;
    else
        insert into restante.ops_${id} (
            table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, old_hash, key, data
        )
        select ${id}, arrived, era, xid, ulids[1 + (i - 1) / ${batch}], (i - 1) % ${batch}, host,
               'd', hashtextextended(k, 0), h, k, d
          from (
            select row_number() over () as i, ${old_key} as k, ${old_key_object} as d, ${old_hash} as h
              from old_rows as o
          ) as changes;
    end if;
    return null;
end
