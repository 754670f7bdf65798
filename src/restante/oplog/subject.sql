-- name: count_parked
-- Of tables that are not tracked any more.
select count(*) from (
    select from op_parked where table_name not in (select name from op_tables) limit $1
) as due;

-- name: delete_parked
with due as (
    select id from op_parked where table_name not in (select name from op_tables)
     limit $1 for update skip locked
), deleted as (
    delete from op_parked using due where op_parked.id = due.id returning 1
)
select count(*) from deleted;

-- name: count_conflicts
select greatest(
    (select count(*) from (select from op_conflicts where noticed_at < $1 limit $3::bigint) as old),
    (select count(*) from (select from op_conflicts limit $2::bigint + $3::bigint) as kept) - $2::bigint
);

-- name: delete_conflicts
with oldest as (
    select id, noticed_at from op_conflicts order by noticed_at limit $3::bigint for update skip locked
), surplus as (
    select greatest((select count(*) from (select from op_conflicts limit $2::bigint + $3::bigint) as kept) - $2::bigint, 0) as rows
), due as (
    select id from (select id, noticed_at, row_number() over () as at from oldest) as numbered, surplus
     where noticed_at < $1 or at <= surplus.rows
), deleted as (
    delete from op_conflicts using due where op_conflicts.id = due.id returning 1
)
select count(*) from deleted;

-- name: count_snapshots
-- Of peers or tables that were removed, and pins that have expired.
select (select count(*) from op_pins where expires_at < $1) as op_pins,
       (select count(*) from op_snapshots
         where peer_id not in (select id from op_peers)
            or table_id not in (select id from op_tables)) as op_snapshots;

-- name: delete_snapshots
with old_pins as (
    select peer_id, table_id from op_pins where expires_at < $1 limit $2 for update skip locked
), pins as (
    delete from op_pins using old_pins
     where (op_pins.peer_id, op_pins.table_id) = (old_pins.peer_id, old_pins.table_id)
    returning 1
), old_snapshots as (
    select peer_id, table_id from op_snapshots
     where peer_id not in (select id from op_peers) or table_id not in (select id from op_tables)
     limit $2 for update skip locked
), snapshots as (
    delete from op_snapshots using old_snapshots
     where (op_snapshots.peer_id, op_snapshots.table_id)
           = (old_snapshots.peer_id, old_snapshots.table_id)
    returning 1
)
select (select count(*) from pins) as op_pins, (select count(*) from snapshots) as op_snapshots;

-- name: count_unsettled
-- Of tables that are not tracked any more.
select count(*) from (
    select from op_unsettled where table_id not in (select id from op_tables) limit $1
) as due;

-- name: delete_unsettled
with due as (
    select table_id, key_hash, key from op_unsettled
     where table_id not in (select id from op_tables)
     limit $1 for update skip locked
), deleted as (
    delete from op_unsettled using due
     where (op_unsettled.table_id, op_unsettled.key_hash, op_unsettled.key)
           = (due.table_id, due.key_hash, due.key)
    returning 1
)
select count(*) from deleted;
