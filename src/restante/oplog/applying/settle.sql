-- name: is_any
select exists (select from op_unsettled);

-- name: mark
-- Whoever could have missed the delete has a transaction id below our own, which is the newest.  The end
-- of a snapshot would not do: younger transactions may be open.  A mark above it comes from before a restore.
update op_unsettled
   set xid = pg_current_xact_id()::text::bigint
 where xid = 0
    or xid > pg_current_xact_id()::text::bigint;

-- name: forget_untracked
delete from op_unsettled where table_id not in (select id from op_tables);

-- name: take_due
delete from op_unsettled
 where (table_id, key_hash, key) in (
    select table_id, key_hash, key
      from op_unsettled
     where table_id = $1
       and xid > 0
       and xid <= op_horizon()
     limit $2
       for update skip locked
 )
returning data;
