-- name: reserve
-- Nothing is visible yet, so the commit is not waited for.  No row comes back when there is no room.
with room as (
    update feeds
       set reserved_bytes = reserved_bytes + $3, reserved_files = reserved_files + $4
      from (select set_config('synchronous_commit', 'off', true)) as unsynced
     where workspace_id = $2
       and waiting_bytes + reserved_bytes + $3 <= $5
       and waiting_files + reserved_files + $4 <= $6
    returning true
)
insert into reservations (id, workspace_id, bucket, bytes, files, expires_at)
select $1, $2, $8, $3, $4, $7 from room
returning id;

-- name: release
with freed as (
    delete from reservations where id = $1 returning workspace_id, bytes, files
)
update feeds
   set reserved_bytes = reserved_bytes - freed.bytes, reserved_files = reserved_files - freed.files
  from freed, (select set_config('synchronous_commit', 'off', true)) as unsynced
 where feeds.workspace_id = freed.workspace_id;

-- name: expired_reservations
select id from reservations where expires_at < $1 order by expires_at limit $2;

-- name: forget_answers
delete from answers
 where (workspace_id, idempotency_key) in (
     select workspace_id, idempotency_key from answers
      where expires_at < $1 order by expires_at limit $2 for update skip locked
 );

-- name: usage_of_workspace
select waiting_bytes, waiting_files, reserved_bytes, reserved_files from feeds where workspace_id = $1;

-- name: usage_of_server
select coalesce(sum(waiting_bytes), 0)::bigint as waiting_bytes,
       coalesce(sum(waiting_files), 0)::bigint as waiting_files,
       coalesce(sum(reserved_bytes), 0)::bigint as reserved_bytes,
       coalesce(sum(reserved_files), 0)::bigint as reserved_files
  from feeds;

-- name: workspace_frees_at
select expires_at from uploads
 where workspace_id = $1 and acked_at is null order by expires_at limit 1;

-- name: server_frees_at
select expires_at from uploads where acked_at is null order by expires_at limit 1;
