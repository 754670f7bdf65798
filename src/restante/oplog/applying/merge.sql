-- name: floors
-- Read after the newest ops: what was dropped before them is below these floors.
select id, floor, trimmed,
       exists (select from restante.op_parked where table_name = op_tables.name) as has_parked
  from restante.op_tables
 where id = any($1::integer[]);

-- name: references
-- Which of these tables refer to which by foreign keys.
select referring.id as referring, referred.id as referred
  from pg_constraint
  join restante.op_tables as referring
    on pg_constraint.conrelid
       = to_regclass(format('%I.%I', referring.schema_name, referring.table_name))
  join restante.op_tables as referred
    on pg_constraint.confrelid
       = to_regclass(format('%I.%I', referred.schema_name, referred.table_name))
 where pg_constraint.contype = 'f'
   and referring.id <> referred.id
   and referring.id = any($1::integer[])
   and referred.id = any($1::integer[]);

-- name: remove_older_parked
with removed as (
    delete from restante.op_parked
     using unnest($2::bigint[], $3::text[], $4::uuid[], $5::text[])
           as applied (key_hash, key, ulid, host)
     where op_parked.table_name = $1
       and op_parked.key_hash = applied.key_hash
       and op_parked.key = applied.key
       and (op_parked.ulid < applied.ulid
            or (op_parked.ulid = applied.ulid and op_parked.origin collate "C" <= applied.host))
    returning 1
)
select count(*) from removed;

-- name: note_unsettled
insert into restante.op_unsettled (table_id, key_hash, key, xid, data)
select $1, key_hash, key, 0, data
  from unnest($2::bigint[], $3::text[], $4::json[]) as deleted (key_hash, key, data)
    on conflict (table_id, key_hash, key) do update set xid = 0;

-- name: check_constraints
set constraints all immediate;

-- name: numbers_used
select ulid, max(n) + 1 as next
  from restante.ops
 where table_id = any($1::integer[])
   and ulid = any($2::uuid[])
 group by ulid;
