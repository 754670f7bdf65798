-- name: is_any
select exists (select from op_unsettled);

-- name: mark
-- Whoever could have missed the delete has a transaction id below this.  One that is above all of ours
-- comes from before a restore.
update op_unsettled
   set xid = pg_snapshot_xmax(pg_current_snapshot())::text::bigint
 where xid = 0
    or xid > pg_snapshot_xmax(pg_current_snapshot())::text::bigint;

-- name: forget_untracked
delete from op_unsettled where table_id not in (select id from op_tables);

-- name: take_due
delete from op_unsettled
 where (table_id, key_hash, key) in (
    select table_id, key_hash, key
      from op_unsettled
     where table_id = $1
       and xid > 0
       and xid <= pg_snapshot_xmin(pg_current_snapshot())::text::bigint
     limit $2
       for update skip locked
 )
returning data;
