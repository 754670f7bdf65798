-- name: insert
-- The first registration gets the token; a concurrent second one with the same id inserts nothing.
with registered as (
    insert into workspaces (id, name, delivery_mode, url, agent_card, token_hash, inbound_secret)
    values ($1, $2, $3, $4, $5, $6, $7)
        on conflict do nothing
    returning id
), counters as (
    insert into feeds (workspace_id) select id from registered on conflict do nothing
)
select id from registered;

-- name: update
update workspaces
   set name = $2, delivery_mode = $3, url = $4,
       -- A card that is the same is not written again.
       agent_card = case when $5::text is null or agent_card::text = $5 then agent_card
                         else $5::json end,
       parent_id = $6, last_seen_at = clock_timestamp()
 where id = $1 and status = 'active'
returning id;

-- name: get
-- Without the card, here and wherever a caller is authenticated: it is large, and reading it would make a
-- wrong token expensive.
select id, name, delivery_mode, url, parent_id, status, token_hash, inbound_secret
  from workspaces
 where id = $1;

-- name: get_for_update
-- Locked until the change is written, so that concurrent changes do not undo each other.
select id, name, delivery_mode, url, parent_id, status, token_hash, inbound_secret
  from workspaces
 where id = $1
   for update;

-- name: by_token
select id, name, delivery_mode, url, parent_id, status, token_hash, inbound_secret
  from workspaces
 where token_hash = $1 and status = 'active';

-- name: view
-- Without the secrets.
select id, name, delivery_mode, url, parent_id, status,
       token_hash is not null as has_token, active_tasks, current_task, created_at, last_seen_at,
       status = 'active' and last_seen_at > clock_timestamp() - $2::interval as is_online,
       coalesce(waiting_files, 0) as waiting_files, coalesce(waiting_bytes, 0) as waiting_bytes,
       coalesce(last_seq - greatest(acked_seq, trimmed_seq), 0) as unread_rows,
       agent_card
  from workspaces left join feeds on workspace_id = id
 where id = $1;

-- name: page
select id, name, delivery_mode, url, parent_id, status,
       token_hash is not null as has_token, active_tasks, current_task, created_at, last_seen_at,
       status = 'active' and last_seen_at > clock_timestamp() - $3::interval as is_online,
       coalesce(waiting_files, 0) as waiting_files, coalesce(waiting_bytes, 0) as waiting_bytes,
       coalesce(last_seq - greatest(acked_seq, trimmed_seq), 0) as unread_rows
  from workspaces left join feeds on workspace_id = id
 where id > $1
 order by id
 limit $2;

-- name: recent
-- All of them are read, for commands of the operator.
select id, name, delivery_mode, url, parent_id, status,
       token_hash is not null as has_token, active_tasks, current_task, created_at, last_seen_at,
       status = 'active' and last_seen_at > clock_timestamp() - $4::interval as is_online,
       coalesce(waiting_files, 0) as waiting_files, coalesce(waiting_bytes, 0) as waiting_bytes,
       coalesce(last_seq - greatest(acked_seq, trimmed_seq), 0) as unread_rows
  from workspaces left join feeds on workspace_id = id
 where ($1::text is null or name = $1) and (status = 'active' or $2::boolean)
 order by last_seen_at desc, id
 limit $3;

-- name: names
-- With all others that have one of these names, so that ambiguous ones are noticed.
select id, name from workspaces
 where id = any($1::uuid[])
    or (status = 'active' and name in (select name from workspaces where id = any($1::uuid[])));

-- name: heartbeat
-- Not synced: losing a heartbeat does not matter.  One that changes nothing but the time writes once a
-- second, however many are sent.
update workspaces
   set active_tasks = $2, current_task = $3, last_seen_at = clock_timestamp()
  from (select set_config('synchronous_commit', 'off', true)) as unsynced
 where id = $1
   and (active_tasks <> $2 or current_task <> $3
        or last_seen_at < clock_timestamp() - interval '1 second');

-- name: mark_seen
-- Not synced, like a heartbeat.  What was written a short while ago, by whichever server, is left as it
-- is, and so is a row that is locked: a request never waits for this, and this for nobody.
with due as (
    select id from workspaces
     where id = any($1::uuid[])
       and status = 'active'
       and last_seen_at < clock_timestamp() - $2::interval
       for no key update skip locked
)
update workspaces set last_seen_at = clock_timestamp()
  from due, (select set_config('synchronous_commit', 'off', true)) as unsynced
 where workspaces.id = due.id
returning workspaces.id;

-- name: remove
-- `last_seen_at` starts the time for which a removed workspace is kept.
update workspaces
   set status = 'removed', token_hash = null, agent_card = '{}', last_seen_at = clock_timestamp()
 where id = $1 and status = 'active'
returning id;

-- name: count_forgettable
select count(*) from (
    select from workspaces
     where status = 'removed' and last_seen_at < $1
       and not exists (select from uploads where workspace_id = workspaces.id)
       and not exists (select from reservations where workspace_id = workspaces.id)
       and not exists (
           select from feeds where workspace_id = workspaces.id and trimmed_seq < last_seq
       )
     limit $2
) as forgettable;

-- name: delete_forgettable
-- A removed workspace can register again and still get what was sent to it, as long as a file or a
-- feed row is kept.  After that it is deleted, or the table would grow with every workspace that ever
-- existed.  Waits for no lock: a workspace that is registering again, or whose counters are locked, is
-- left for the next pass.
with removed as (
    select id from workspaces
     where status = 'removed' and last_seen_at < $1
       and not exists (select from uploads where workspace_id = workspaces.id)
       and not exists (select from reservations where workspace_id = workspaces.id)
       and not exists (
           select from feeds where workspace_id = workspaces.id and trimmed_seq < last_seq
       )
     limit $2
       for update skip locked
), locked as (
    select workspace_id from feeds where workspace_id in (select id from removed)
       for update skip locked
), counters as (
    delete from feeds using locked where feeds.workspace_id = locked.workspace_id
), deleted as (
    delete from workspaces using removed
     where workspaces.id = removed.id
       and (removed.id in (select workspace_id from locked)
            or not exists (select from feeds where workspace_id = removed.id))
    returning workspaces.id
)
select count(*) from deleted;

-- name: revive
update workspaces
   set status = 'active', name = $2, delivery_mode = $3, url = $4,
       agent_card = coalesce($5, agent_card), token_hash = $6, inbound_secret = $7, active_tasks = 0, current_task = '', last_seen_at = clock_timestamp()
 where id = $1 and status = 'removed'
returning id;

-- name: set_token
update workspaces set token_hash = $2 where id = $1 and status = 'active'
returning id;

-- name: count_active
select count(*) from workspaces where status = 'active';

-- name: reset_silent
-- The row is locked before it is checked, so that a concurrent heartbeat is either seen or kept.  The
-- condition on `id` prunes the feed's partitions to the newest.
with silent as (
    select id, active_tasks from workspaces
     where status = 'active'
       and active_tasks > 0
       and not exists (
           select from feed
            where feed.workspace_id = workspaces.id and feed.id >= $1 and feed.created_at >= $2
       )
     order by id
     limit $3
       for update skip locked
)
update workspaces set active_tasks = 0, current_task = ''
  from silent
 where workspaces.id = silent.id
returning workspaces.id, silent.active_tasks;
