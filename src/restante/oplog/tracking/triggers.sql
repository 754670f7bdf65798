-- name: capture
-- The body of the function of one table, with placeholders.  Its variables do not clash with columns of
-- the table: one of both is always qualified, or the columns are one level deeper.
<<v>>
declare
    arrived constant timestamptz := clock_timestamp();
    tail constant text := restante.op_session_tail();
    level constant integer := pg_trigger_depth();
    era bigint;
    xid bigint;
    total bigint;
    shape bigint;
    host integer;
    ops integer;
    clock_mark bigint;
    first_tick bigint;
    ulid uuid;
    ulids uuid[];
    old_hashes bigint[];
    is_plain boolean;
    statement text;
begin
    -- A change of a peer, which is logged as such.  What it causes in other tables is ours.  Anybody can
    -- set this, so it counts only for those who may act as our role, which this function runs as.
    if current_setting('restante.applying', true) = '${id}' then
        if pg_has_role(session_user, current_user, 'member') then
            return null;
        end if;
    end if;
    if tg_op = 'DELETE' then
        select count(*), restante.op_planned_shape(${relation}), (select host_id from restante.op_node)
          into total, shape, host
          from old_rows;
    else
        select count(*), restante.op_planned_shape(${relation}), (select host_id from restante.op_node)
          into total, shape, host
          from new_rows;
    end if;
    if total = 0 then
        return null;
    end if;
    if pg_sequence_last_value('restante.op_era_key'::regclass) = restante.op_session_cluster() then
        era := pg_sequence_last_value('restante.op_era'::regclass);
    else
        era := restante.op_current_era();
    end if;
    xid := pg_current_xact_id()::text::bigint;
    -- A trigger that fired before this one may have changed the same rows again.
    -- The depth is the length of a setting, so that no value that a session gives it is an error.
    is_plain := shape = ${shape} and total <= ${max_fast}
                and coalesce(length(current_setting('restante.nested_${id}', true)), 0) <= level;
    if level > 1 then
        if coalesce(length(current_setting('restante.nested_${id}', true)), 0) < level then
            perform set_config('restante.nested_${id}', repeat('.', level), true);
        end if;
    end if;
    if not is_plain then
        null;
    elsif tg_op = 'UPDATE' then
        if total > 1 then
            -- Both tables list the rows in the same order; if that ever changes, or if a key was changed,
            -- the comparison notices.
            select (select row(${new_key_lists}) from new_rows as n) = old_lists.keys, old_lists.hashes
              into is_plain, old_hashes
              from (select row(${old_key_lists}) as keys, array_agg(${old_hash}) as hashes
                      from old_rows as o) as old_lists;
        end if;
    elsif tg_op = 'DELETE' then
        -- A MERGE, or a WITH, may have inserted the same key after it was deleted.  The log would tell, but
        -- two serializable transactions that read and write it fail.
        is_plain := current_setting('restante.created_${id}', true) is distinct from xid::text;
    end if;
    if tg_op = 'INSERT' or (tg_op = 'UPDATE' and not is_plain) then
        perform set_config('restante.created_${id}', xid::text, true);
    end if;
    if is_plain and total <= ${batch} then
        -- Without a lock: the next tick counts if the clock was set a moment ago, and not meanwhile.
        clock_mark := pg_sequence_last_value('restante.op_clock_mark'::regclass);
        first_tick := nextval('restante.op_clock'::regclass);
        if first_tick <= clock_mark + 256
                and first_tick > date_part('epoch', arrived) * 32768000 - 32768
                and pg_sequence_last_value('restante.op_clock_mark'::regclass) = clock_mark then
            null;
        else
            first_tick := restante.op_tick(1);
        end if;
        ulid := restante.op_ulid(first_tick, tail);
        if total = 1 then
            if tg_op = 'INSERT' then
                insert into restante.ops_${id} (${columns})
                select ${id}, v.arrived, v.era, v.xid, v.ulid, 0, v.host, 'c',
                       hashtextextended(${new_key}, 0), null, ${new_key}, row_to_json(n.*)
                  from new_rows as n;
                return null;
            elsif tg_op = 'DELETE' then
                insert into restante.ops_${id} (${columns})
                select ${id}, v.arrived, v.era, v.xid, v.ulid, 0, v.host, 'd',
                       hashtextextended(${old_key}, 0), ${old_hash}, ${old_key}, ${old_key_object}
                  from old_rows as o;
                return null;
            end if;
            insert into restante.ops_${id} (${columns})
            select ${id}, v.arrived, v.era, v.xid, v.ulid, 0, v.host, 'u',
                   hashtextextended(${new_key}, 0), ${old_hash}, ${new_key}, row_to_json(n.*)
              from new_rows as n, old_rows as o
             where ${same_key};
            if found then
                return null;
            end if;
            is_plain := false;
            perform set_config('restante.created_${id}', xid::text, true);
        end if;
    end if;
    ops := (total + ${batch_less_1}) / ${batch};
    if not is_plain then
        first_tick := restante.op_tick(3 * ops);
        foreach statement in array restante.op_capture_statements(${id}, tg_relid, tg_op) loop
            execute statement using arrived, era, xid, first_tick, tail, host, ops;
        end loop;
        return null;
    end if;
    if ops = 1 then
        ulids := array[ulid];
    else
        first_tick := restante.op_tick(ops);
        ulids := array(select restante.op_ulid(first_tick + at, tail) from generate_series(0, ops - 1) as at);
    end if;
    if tg_op = 'INSERT' then
        insert into restante.ops_${id} (${columns})
        select ${id}, arrived, era, xid, ulids[1 + (i - 1) / ${batch}], (i - 1) % ${batch}, host,
               'c', hashtextextended(k, 0), null, k, d
          from (
            select row_number() over () as i, ${new_key} as k, row_to_json(n.*) as d from new_rows as n
          ) as changes;
    elsif tg_op = 'UPDATE' then
        insert into restante.ops_${id} (${columns})
        select ${id}, arrived, era, xid, ulids[1 + (i - 1) / ${batch}], (i - 1) % ${batch}, host,
               'u', hashtextextended(k, 0), old_hashes[i], k, d
          from (
            select row_number() over () as i, ${new_key} as k, row_to_json(n.*) as d from new_rows as n
          ) as changes;
    else
        insert into restante.ops_${id} (${columns})
        select ${id}, arrived, era, xid, ulids[1 + (i - 1) / ${batch}], (i - 1) % ${batch}, host,
               'd', hashtextextended(k, 0), h, k, d
          from (
            select row_number() over () as i, ${old_key} as k, ${old_key_object} as d, ${old_hash} as h
              from old_rows as o
          ) as changes;
    end if;
    return null;
end
