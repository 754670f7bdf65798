-- The words in braces are expressions and identifiers of the tracked table, quoted in digests.py.

-- name: canonical
-- For one transaction: values have the same text on every node, and ranges of keys are read by the index.
select set_config('timezone', 'UTC', true), set_config('datestyle', 'ISO', true),
       set_config('intervalstyle', 'postgres', true), set_config('extra_float_digits', '1', true),
       set_config('bytea_output', 'hex', true), set_config('lc_monetary', 'C', true),
       set_config('enable_seqscan', $1, true), set_config('enable_bitmapscan', $1, true);

-- name: key_orders
-- How each key column sorts: its type, its collation with the version of its library, the labels of an enum.
select coalesce(string_agg(concat_ws(' ', format_type(column_type.oid, null),
           case when collation_of.name in ('C', 'POSIX') then 'C'
                else concat_ws(' ', collation_of.name, collation_of.version) end,
           labels.list), ', ' order by key.n), '')
  from pg_class
  join pg_namespace on pg_namespace.oid = pg_class.relnamespace
 cross join unnest($3::text[]) with ordinality as key (name, n)
  join pg_attribute on attrelid = pg_class.oid and attname = key.name and not attisdropped
  join pg_type as column_type on column_type.oid = atttypid
  left join lateral (
      select case when pg_collation.oid = 'pg_catalog."default"'::regcollation
                  then coalesce(to_jsonb(pg_database) ->> 'datlocale',
                                to_jsonb(pg_database) ->> 'daticulocale', datcollate)
                  else coalesce(to_jsonb(pg_collation) ->> 'colllocale',
                                to_jsonb(pg_collation) ->> 'colliculocale', collcollate) end as name,
             case when pg_collation.oid = 'pg_catalog."default"'::regcollation
                  then pg_database_collation_actual_version(pg_database.oid)
                  else pg_collation_actual_version(pg_collation.oid) end as version
        from pg_collation, pg_database
       where pg_collation.oid = attcollation and datname = current_database()
  ) as collation_of on true
  left join lateral (
      select string_agg(enumlabel, ',' order by enumsortorder) as list
        from pg_enum where enumtypid = column_type.oid
  ) as labels on true
 where nspname = $1 and relname = $2;

-- name: estimated_rows
-- What the last ANALYZE or autovacuum found, partitions included.
with recursive tree as (
    select pg_class.oid
      from pg_class join pg_namespace on pg_namespace.oid = relnamespace
     where nspname = $1 and relname = $2
    union all
    select inhrelid from tree join pg_inherits on inhparent = tree.oid
)
select coalesce(sum(greatest(reltuples, 0)), 0)::bigint
  from tree join pg_class on pg_class.oid = tree.oid
 where relkind = 'r';

-- name: head
-- Committed ops only, also those above the horizon: a digest sees their records.
select era, xid, ulid, n
  from ops
 where table_id = any($1::int[])
 order by era desc, xid desc, ulid desc, n desc
 limit 1;

-- name: trimmed
select max(trimmed) from op_tables where id = any($1::int[]);

-- name: cut
-- The key of every $3-th record of the next $2, and the last one.  Its columns are renamed to k0, k1, ...,
-- so that none of them can be mistaken for one of ours.
select json_build_array({renamed})::text as key
  from (
      select {renamed}, row_number() over (order by {renamed_order}) as n,
             lead(true) over (order by {renamed_order}) is null as is_end
        from (select {keys_renamed} from {relation} as t
               where {above} order by {order} limit $2) as next
  ) as numbered
 where numbered.n % $3 = 0 or numbered.is_end
 order by numbered.n;

-- name: ranges_by_index
select found.rows, found.digest
  from unnest($1::text[], $2::text[]) with ordinality as asked (after, through, n)
 {bounds}
 cross join lateral (
     select count(*) as rows, coalesce(bit_xor(hash), 0) as digest
       from (select {hash} as hash from {relation} as t where {inside} limit $3) as t
 ) as found
 order by asked.n;

-- name: ranges_by_text
-- One scan for all ranges: the number of edges that a key is above of says in which range it is.
select width_bucket({key} collate "C", $1::text[] collate "C") as edges,
       count(*) as rows, bit_xor({hash}) as digest
  from {relation} as t
 group by 1;

-- name: records
select {key} as key, {hash} as digest
  from {relation} as t
 where {inside}
 order by {order}
 limit $3;

-- name: records_by_key
select asked.key, {hash} as digest
  from unnest($1::text[]) as asked (key)
 cross join lateral json_to_record({members}) as bound ({types})
  join {relation} as t on {same};
