-- name: move_cursor
-- Only if it stands where the page was asked for.
update restante.op_peers
   set cursor = $3,
       cursor_at = $4,
       applied = applied + $5,
       superseded = superseded + $6,
       parked = parked + $7,
       refused = refused + $8,
       conflicts = conflicts + $9
 where id = $1
   and cursor = $2
returning true;

-- name: count
update restante.op_peers
   set applied = applied + $2,
       superseded = superseded + $3,
       parked = parked + $4,
       refused = refused + $5,
       conflicts = conflicts + $6
 where id = $1;

-- name: count_refused
-- By reason: an operator must know which of them a clock has caused.
update restante.op_peers
   set refused_by = refused_by || (
       select jsonb_object_agg(reason, coalesce((refused_by ->> reason)::bigint, 0) + count)
         from unnest($2::text[], $3::bigint[]) as one (reason, count)
   )
 where id = $1;
