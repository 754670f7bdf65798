-- name: all_tables
-- One row per tracked table, with its columns as the catalogue has them now; a table that was dropped or
-- renamed has none.
select op_tables.*, columns.*
  from restante.op_tables
  left join pg_namespace on pg_namespace.nspname = op_tables.schema_name
  left join pg_class on pg_class.relnamespace = pg_namespace.oid
                    and pg_class.relname = op_tables.table_name
                    and pg_class.relkind in ('r', 'p')
 cross join lateral (
    select coalesce(array_agg(attname::text order by attnum), '{}') as column_names,
           coalesce(array_agg(format_type(atttypid, atttypmod) order by attnum), '{}') as types,
           coalesce(array_agg(attgenerated <> '' order by attnum), '{}') as are_generated,
           coalesce(array_agg(not attnotnull order by attnum), '{}') as are_nullable,
           coalesce(array_agg(atthasdef and attgenerated = '' or attidentity <> '' order by attnum), '{}')
               as have_default,
           coalesce(array_agg(attidentity = 'a' order by attnum), '{}') as are_identity
      from pg_attribute
     where attrelid = pg_class.oid and attnum > 0 and not attisdropped
 ) as columns
 where $1::text is null or op_tables.name = $1
 order by op_tables.name;

-- name: own_host
select op_hosts.host from restante.op_node join restante.op_hosts on op_hosts.id = op_node.host_id;

-- name: own_name
-- Since the present era began, nothing that was logged here was lost; before it had this name, another node
-- may have had it.
select op_hosts.host, extract(epoch from op_node.named_at)::float as named_at,
       restante.op_current_era() as era
  from restante.op_node join restante.op_hosts on op_hosts.id = op_node.host_id;

-- name: set_own_host
insert into restante.op_node (host_id) values ($1)
    on conflict (only_row) do update set host_id = excluded.host_id, named_at = excluded.named_at
 where op_node.host_id <> excluded.host_id;

-- name: host_id
select id from restante.op_hosts where host = $1;

-- name: add_host
-- Waits for another session that adds the same host.
-- There is always room for ourselves, and for what the operator has named.
insert into restante.op_hosts (host, added_by)
select $1, case when not is_named then $2::integer end
  from (select $2::integer is null
            or exists (select from restante.op_peers where host = $1 or $1 = any (relays))
       ) as one (is_named)
 where is_named
    or (select count(*) < $3 and count(*) filter (where added_by = $2) < $4
          from restante.op_hosts where added_by is not null)
    on conflict do nothing;

-- name: log_sizes
select op_tables.id, coalesce(sum(pg_total_relation_size(relid)), 0)::bigint as bytes
  from restante.op_tables
  left join lateral pg_partition_tree(to_regclass('restante.ops_' || op_tables.id)) on true
 group by op_tables.id;
