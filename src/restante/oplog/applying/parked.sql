-- name: listed
select op_parked.*, op_peers.host as peer
  from op_parked
  left join op_peers on op_peers.id = op_parked.peer_id
 where ($1::text is null or op_parked.table_name = $1)
   and ($2::text is null or op_parked.reason = $2)
   and op_parked.id > $3
 order by op_parked.id
 limit $4;

-- name: count
select reason, count(*) from op_parked group by reason;

-- name: discard
with discarded as (
    delete from op_parked where $1::bigint[] is null or id = any($1) returning 1
)
select count(*) from discarded;

-- name: known
select id from op_parked where id = any($1::bigint[]);

-- name: chosen
select * from op_parked
 where ($1::bigint[] is null or id = any($1)) and id > $2
 order by id
 limit $3;

-- name: due
-- Oldest changes first: what others refer to was often made before them.  Those of a peer that was removed,
-- or may no longer send the table, wait for the operator.
with referred as materialized (
    select referring.name, max(arrival.at) as changed_at
      from op_tables as referring
      join pg_constraint
        on pg_constraint.contype = 'f'
       and pg_constraint.conrelid
           = to_regclass(format('%I.%I', referring.schema_name, referring.table_name))
      join op_tables as referred
        on pg_constraint.confrelid
           = to_regclass(format('%I.%I', referred.schema_name, referred.table_name))
     cross join lateral (
        select ops.arrived_at as at
          from ops
         where ops.table_id = referred.id
         order by ops.era desc, ops.xid desc, ops.ulid desc, ops.n desc
         limit 1
     ) as arrival
     where exists (
        select from op_parked
         where op_parked.table_name = referring.name and op_parked.reason = 'foreign_key'
     )
     group by referring.name
)
select op_parked.*
  from op_parked
  left join referred on referred.name = op_parked.table_name
 where op_parked.reason <> 'below_floor'
   and exists (
    select from op_peers
     where op_peers.id = op_parked.peer_id
       and (op_peers.tables is null or op_parked.table_name = any(op_peers.tables))
   )
   and case
        when op_parked.reason = 'future' then op_parked.ulid < $2
        else op_parked.tried_at
                 <= $1::timestamptz - least(interval '5 s' * 2 ^ least(op_parked.tries, 12), interval '1 h')
             or (op_parked.reason = 'foreign_key' and referred.changed_at > op_parked.tried_at)
       end
 order by op_parked.ulid
 limit $3;

-- name: remove
-- Some are gone already, because a newer op of their key was applied.
with removed as (
    delete from restante.op_parked where id = any($1::bigint[]) returning 1
)
select count(*) from removed;

-- name: has_dropped
-- Whether ops of these tables were dropped since their marks were read.
select exists (
    select from unnest($1::integer[], $2::text[]) as known (id, trimmed)
      join restante.op_tables using (id)
     where op_tables.trimmed <> known.trimmed
);

-- name: count_applied
update restante.op_peers
   set applied = applied + done.count
  from unnest($1::integer[], $2::bigint[]) as done (id, count)
 where op_peers.id = done.id;

-- name: failed
update op_parked
   set tries = tries + 1, tried_at = $4, reason = coalesce($2, reason), sentence = left($3, 500)
 where id = any($1::bigint[]);
