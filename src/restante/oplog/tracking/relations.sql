-- name: facts
-- Everything that decides whether a relation can be tracked.  By its name, or else by the function that
-- its triggers call: a table that was renamed is found so.
select pg_class.oid::bigint as oid, nspname::text as schema_name, relname::text as table_name,
       relkind::text as kind, relpersistence::text as persistence,
       nspname = 'information_schema' or nspname ~ '^pg_' and relpersistence <> 't' as is_system,
       case when relispartition then pg_partition_root(pg_class.oid)::regclass::text end as is_partition_of,
       exists (
           select from pg_inherits
            where inhrelid = pg_class.oid and not relispartition
               or inhparent = pg_class.oid and relkind <> 'p'
       ) as inherits,
       quote_ident(pg_get_userbyid(relowner)) as owner, quote_ident(current_user) as role,
       pg_has_role(relowner, 'usage') as is_ours,
       (
           -- Of the table and its partitions; one who may act as our role anyway is none.
           select quote_ident(min(pg_get_userbyid(part.relowner)::text))
             from (select pg_class.oid union select relid from pg_partition_tree(pg_class.oid)) as tree
             join pg_class part on part.oid = tree.oid
            where not pg_has_role(part.relowner, current_user, 'member')
       ) as other_owner,
       row_security_active(pg_class.oid) as hides_rows,
       key.columns as key_columns, coalesce(key.numbers, '{}') as key_numbers,
       coalesce(key.is_deferrable, false) as is_key_deferrable,
       coalesce(key.is_exact, false) as is_key_exact,
       coalesce(key.counted, '{}') as counted_keys, coalesce(key.loose, '{}') as loose_keys,
       array(
           select indexrelid::regclass::text from pg_index
            where indrelid = pg_class.oid and indisunique and not indisprimary
            order by 1
       ) as unique_indexes,
       array(
           select distinct confrelid::regclass::text from pg_constraint
            where conrelid = pg_class.oid and contype = 'f' and confrelid <> pg_class.oid
              and not exists (
                  select from op_tables
                    join pg_namespace target_schema on target_schema.nspname = op_tables.schema_name
                    join pg_class target on target.relnamespace = target_schema.oid
                                        and target.relname = op_tables.table_name
                   where target.oid = confrelid
              )
            order by 1
       ) as untracked_references,
       array(
           select attname::text from pg_attribute
            where attrelid = pg_class.oid and attgenerated <> '' and not attisdropped
            order by attnum
       ) as generated_columns,
       exists (select from pg_subscription_rel where srrelid = pg_class.oid) as is_subscribed,
       not exists (
           -- Only types whose hash function is certain; for others text is hashed.
           select from pg_attribute
             join pg_type on pg_type.oid = atttypid
            where attrelid = pg_class.oid and attnum > 0 and not attisdropped
              and not exists (
                  select from pg_opclass
                    join pg_am on pg_am.oid = opcmethod and amname = 'hash'
                   where opcdefault
                     and opcintype = any (
                         array[atttypid, case when typcategory = 'E' then 'anyenum'::regtype
                                              when pg_type.oid = any('{varchar,bpchar}'::regtype[])
                                              then 'text'::regtype end])
              )
       ) as has_hash,
       coalesce(op_shape(pg_class.oid), 0) as shape
  from pg_class
  join pg_namespace on pg_namespace.oid = relnamespace
  left join lateral (
      select array_agg(attname::text order by at) as columns,
             array_agg(attnum order by at) as numbers,
             bool_or(not indimmediate) as is_deferrable,
             bool_and(
                 atttypid::regtype = any('{text,varchar,uuid,int2,int4,int8,bool,date,timestamptz}'::regtype[])
                 and coalesce((select collisdeterministic from pg_collation
                                where pg_collation.oid = attcollation), true)
             ) as is_exact,
             array_agg(attname::text order by at) filter (where attidentity <> '' or exists (
                 select from pg_attrdef
                   join pg_depend on classid = 'pg_attrdef'::regclass and objid = pg_attrdef.oid
                                 and refclassid = 'pg_class'::regclass
                   join pg_class sequence on sequence.oid = refobjid and sequence.relkind = 'S'
                  where adrelid = attrelid and adnum = attnum
             )) as counted,
             array_agg(attname::text order by at) filter (where
                 not coalesce((select collisdeterministic from pg_collation
                                where pg_collation.oid = attcollation), true)
                 or atttypid = 'bpchar'::regtype and atttypmod < 0
                 or exists (
                     -- Also as the base of a domain, the element of an array, and within a range or row.
                     with recursive inside (type) as (
                         select atttypid
                         union
                         select part.type
                           from inside
                           join pg_type as outer_type on outer_type.oid = inside.type
                           left join pg_range on inside.type in (rngtypid, rngmultitypid)
                          cross join lateral (
                             values (outer_type.typbasetype), (outer_type.typelem), (rngsubtype)
                             union all
                             select field.atttypid from pg_attribute as field
                              where field.attrelid = outer_type.typrelid and field.attnum > 0
                          ) as part (type)
                          where part.type <> 0
                     )
                     select from inside join pg_type as found on found.oid = inside.type
                      where found.typname
                            in ('numeric', 'float4', 'float8', 'interval', 'jsonb', 'citext')
                 )) as loose
        from pg_index
       cross join unnest(indkey) with ordinality as part (number, at)
        join pg_attribute on attrelid = indrelid and attnum = number
        join pg_type on pg_type.oid = atttypid
       where indrelid = pg_class.oid and indisprimary and at <= indnkeyatts
  ) as key on true
 where nspname = $1 and relname = $2
    or pg_class.oid = $3::oid;

-- name: parsed_name
-- As SQL reads it: in lower case, unless it is quoted.  Null if it is no name.
select case when $1 ~ '^("([^"]|"")+"|[[:alpha:]_][[:alnum:]_$]*)(\s*\.\s*("([^"]|"")+"|[[:alpha:]_][[:alnum:]_$]*))*$'
            then parse_ident($1) end;

-- name: name_of
select name from op_tables where name = $1 or (schema_name, table_name) = ($2, $3) order by name <> $1 limit 1;

-- name: is_tracked
select exists (select from op_tables where (schema_name, table_name) = ($1, $2));

-- name: hold
select state from op_tables where id = $1 for update;

-- name: leftover_logs
-- Of tables that are not tracked any more, and parts of them that were being removed.  Postgres detaches one
-- partition at a time, so an interrupted one comes first.
select relname as name,
       case when inhdetachpending then 'detaching'
            when relispartition then 'attached'
            else 'detached' end as state
  from pg_class
  left join pg_inherits on inhrelid = pg_class.oid
 where relnamespace = 'restante'::regnamespace
   and (relkind = 'p' and relname ~ '^ops_[0-9]+$'
        or relkind = 'r' and not relispartition and relname ~ '^ops_[0-9]+_[0-9]{8}_[0-9]{6}$')
   and not exists (select from op_tables where id::text = split_part(relname, '_', 2))
 order by inhdetachpending is true desc, relname;

-- name: set_lock_timeout
select set_config('lock_timeout', $1, true);

-- name: add_table
insert into op_tables (
    name, schema_name, table_name, key_columns, key_numbers, key_map, shape, state, changed_at
)
values ($1, $2, $3, $4, $5, $6, $7, 'tracked', $8)
returning id;

-- name: now
-- Above everything that was logged up to now.
select op_ulid(op_tick(1), right(replace(gen_random_uuid()::text, '-', ''), 16)) as ulid,
       op_current_era() as era, pg_current_xact_id()::text::bigint as xid;

-- name: limits
select id, retention_days, cap_days, cap_bytes from op_tables;

-- name: set_limits
-- Null keeps what the table has, -1 takes the default of the server.
update op_tables
   set retention_days = case when $2 < 0 then null else coalesce($2, retention_days) end,
       cap_days = case when $3 < 0 then null else coalesce($3, cap_days) end,
       cap_bytes = case when $4 < 0 then null else coalesce($4, cap_bytes) end
 where id = $1;

-- name: set_unlogged
update op_tables set unlogged = $2 where id = $1;

-- name: set_marks
-- All that was logged is gone, or was never logged.
update op_tables
   set floor = greatest(floor, $2), floor_origin = $3, trimmed = greatest(trimmed, $4)
 where id = $1;

-- name: set_state
update op_tables set state = $2, changed_at = $3 where id = $1 and state <> $2 returning id;

-- name: installed
-- The key and the shape that the triggers were made for.
select key_numbers, shape from op_tables where id = $1;

-- name: set_shape
update op_tables
   set schema_name = $2, table_name = $3, key_columns = $4, key_numbers = $5, shape = $6
 where id = $1;

-- name: remove_table
delete from op_tables where id = $1;

-- name: forget_parked
delete from op_parked where table_name = $1;

-- name: report_older_parked
-- A record that changed while nothing was logged may be newer than what waits for it.
with older as (
    delete from op_parked
     using op_tables as tracked
     where tracked.id = $1
       and op_parked.table_name = tracked.name
       and op_parked.ulid <= tracked.floor
    returning op_parked.*, tracked.floor, tracked.floor_origin
), reported as (
    insert into op_conflicts (
        noticed_at, table_name, key, reason, kept_ulid, kept_origin, lost_ulid, lost_origin, lost
    )
    select $2, table_name, coalesce(key, ''), 'approximate', floor, floor_origin, ulid, origin,
           case when action = 'd' then 'null' when pg_column_size(data) <= $3 then data end
      from older
)
select count(*) from older;

-- name: forget_unsettled
delete from op_unsettled where table_id = $1;

-- name: restart_snapshots
-- Not forgotten: what the peer's log no longer has would be missed.
update op_snapshots set phase = 'new', after = '', start = '' where table_id = $1;

-- name: forget_snapshots
with pins as (delete from op_pins where table_id = $1)
delete from op_snapshots where table_id = $1;

-- name: want_snapshots
-- From the peers whose logs we have read already: their ops of this table were refused then, or dropped.
insert into op_snapshots (peer_id, table_id, phase, is_for_gap, started_at, progressed_at, is_new)
select op_peers.id, $1, 'new', false, $3, $3, true
  from op_peers
 where protocol = 'restante' and cursor <> '' and (tables is null or $2 = any(tables))
    on conflict (peer_id, table_id) do update set is_new = true;

-- name: partitions
-- The table itself, and its partitions at all levels, with the state of our triggers on each; and those
-- tables that are no partitions any more.
with tree as (
    select relid from pg_partition_tree($1::oid::regclass)
    union
    select $1::oid::regclass
)
select format('%I.%I', nspname, relname) as relation,
       tree.relid is not null as is_part,
       coalesce(ours.total, 0) as triggers,
       coalesce(ours.enabled, 0) as enabled
  from tree
  full join (
      select tgrelid, count(*) as total, count(*) filter (where tgenabled = 'A') as enabled
        from pg_trigger
       where tgname = any($3::text[]) and not tgisinternal
         and tgrelid in (select tgrelid from pg_trigger where tgfoid = to_regproc($2))
       group by tgrelid
  ) as ours on ours.tgrelid = tree.relid
  join pg_class on pg_class.oid = coalesce(tree.relid, ours.tgrelid)
  join pg_namespace on pg_namespace.oid = relnamespace
 where relkind in ('r', 'p')
 order by relkind = 'p' desc, 1;

-- name: captured_relation
-- The table that a capture function is used by: the largest unit of it.
select coalesce(pg_partition_root(tgrelid)::oid, tgrelid)::bigint as oid
  from pg_trigger
 where tgfoid = to_regproc($1) and not tgisinternal
 order by (select relkind from pg_class where pg_class.oid = tgrelid) = 'p' desc, tgrelid
 limit 1;

-- name: schemas_with
-- Those that have a table of this name.
select nspname::text as schema_name
  from pg_class
  join pg_namespace on pg_namespace.oid = relnamespace
 where relname = $1 and relkind in ('r', 'p')
 order by nspname
 limit 5;
