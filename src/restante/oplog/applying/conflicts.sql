-- name: add
-- A change that comes from several peers is in conflict once.  The oldest conflicts make room.
with found as (
    select distinct on (new.key, new.lost_ulid, new.lost_origin) new.*
      from unnest($3::text[], $4::text[], $5::uuid[], $6::text[], $7::json[],
                  $8::uuid[], $9::text[], $10::json[])
           as new (key, reason, kept_ulid, kept_origin, kept, lost_ulid, lost_origin, lost)
), added as (
    insert into restante.op_conflicts (
        noticed_at, table_name, key, reason,
        kept_ulid, kept_origin, kept, lost_ulid, lost_origin, lost
    )
    select $2, $1, key, reason, kept_ulid, kept_origin, kept, lost_ulid, lost_origin, lost
      from found
     where not exists (
        select from restante.op_conflicts as known
         where known.lost_ulid = found.lost_ulid
           and known.lost_origin = found.lost_origin
           and known.table_name = $1
           and known.key = found.key
     )
    returning id
), removed as (
    delete from restante.op_conflicts
     where id <= (
        select id from restante.op_conflicts order by id desc offset $11::bigint limit 1
     )
)
select count(*) from added;

-- name: listed
select *
  from op_conflicts
 where ($1::text is null or table_name = $1)
   and ($2::bigint is null or id < $2)
 order by id desc
 limit $3;
