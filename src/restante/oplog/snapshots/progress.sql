-- name: want
-- One that is being taken goes on; but a repair begins it again, because it is about all records.
insert into op_snapshots as taken (peer_id, table_id, phase, is_for_gap, started_at, progressed_at,
                                   is_repair, is_new)
select $1, id, 'new', $3, $4, $4, $5, $6 from unnest($2::integer[]) as id
    on conflict (peer_id, table_id) do update
   set is_for_gap = taken.is_for_gap or excluded.is_for_gap,
       is_repair = taken.is_repair or excluded.is_repair,
       is_new = taken.is_new or excluded.is_new,
       phase = case when excluded.is_repair and not taken.is_repair then 'new' else taken.phase end,
       after = case when excluded.is_repair and not taken.is_repair then '' else taken.after end,
       start = case when excluded.is_repair and not taken.is_repair then '' else taken.start end;

-- name: pending
select op_snapshots.*, op_tables.name
  from op_snapshots
  left join op_tables on op_tables.id = op_snapshots.table_id
 where op_snapshots.peer_id = $1
 order by op_tables.name;

-- name: references
-- Which tracked table refers to which other one.
select child.id as child, parent.id as parent
  from pg_constraint
  join op_tables as child
    on conrelid = to_regclass(format('%I.%I', child.schema_name, child.table_name))
  join op_tables as parent
    on confrelid = to_regclass(format('%I.%I', parent.schema_name, parent.table_name))
 where contype = 'f' and conrelid <> confrelid;

-- name: began
update op_snapshots
   set phase = 'deletes', after = '', start = $3, host = $4, columns = $5, server_cursor = $6,
       records = 0, begun = begun + 1, progressed_at = $7,
       has_unlogged = $8 > least(read_to, (select cursor from op_peers where id = $1))
 where peer_id = $1 and table_id = $2 and phase = 'new'
returning true;

-- name: restart
update op_snapshots
   set phase = 'new', after = '', start = '', progressed_at = $3
 where peer_id = $1 and table_id = $2;

-- name: forget
delete from op_snapshots where peer_id = $1 and table_id = $2;

-- name: progressed
-- With the page that it stands for, and only if nobody has begun anew meanwhile.
update restante.op_snapshots
   set phase = $6, after = $7, records = records + $8, progressed_at = $9,
       floor = greatest(floor, $10), floor_origin = case when floor < $10 then $11 else floor_origin end
 where peer_id = $1 and table_id = $2 and start = $3 and phase = $4 and after = $5
returning true;

-- name: count
update restante.op_peers
   set applied = applied + $2, parked = parked + $3, refused = refused + $4,
       conflicts = conflicts + $5
 where id = $1;

-- name: adopt_floor
update restante.op_tables
   set floor = greatest(floor, $2), floor_origin = case when floor < $2 then $3 else floor_origin end,
       taken_snapshot = true
 where id = $1;

-- name: settle
-- When no snapshot of the peer can go on: its log is read from the first start of those that are
-- complete, but nothing that was not read yet is left out.  At the first contact a gap is a reason to
-- take all tables, so nothing else is below their start; it is not counted.  A ULID stays.
with done as (
    delete from op_snapshots where peer_id = $1 and phase = 'done'
    returning start, is_for_gap
), others as (
    update op_snapshots
       set read_to = coalesce(read_to, (select cursor from op_peers where id = $1))
     where peer_id = $1 and phase <> 'done'
), first as (
    select min(start) as start, bool_or(is_for_gap) as is_for_gap from done
)
update op_peers
   set cursor = case when cursor like '%-%' then least(cursor, first.start)
                     when cursor = '' and first.is_for_gap then first.start
                     else cursor end,
       cursor_at = $2,
       gaps = gaps + case when first.is_for_gap and cursor <> '' and gap_at <> first.start
                          then 1 else 0 end,
       gap_at = case when first.is_for_gap and cursor <> '' then first.start else gap_at end
  from first
 where op_peers.id = $1 and first.start is not null
returning cursor;
