-- name: insert
-- Whoever comes first gets the token; a second one with the same id finds the row.
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
   set name = $2, delivery_mode = $3, url = $4, agent_card = $5, parent_id = $6,
       last_seen_at = clock_timestamp()
 where id = $1 and status = 'active'
returning id;

-- name: get
select id, name, delivery_mode, url, agent_card, parent_id, status, token_hash, inbound_secret,
       active_tasks, current_task, created_at, last_seen_at
  from workspaces
 where id = $1;

-- name: get_to_change
-- Held until the change is written: two who change it at once do not undo each other.
select id, name, delivery_mode, url, agent_card, parent_id, status, token_hash, inbound_secret,
       active_tasks, current_task, created_at, last_seen_at
  from workspaces
 where id = $1
   for update;

-- name: by_token
select id, name, delivery_mode, url, agent_card, parent_id, status, token_hash, inbound_secret,
       active_tasks, current_task, created_at, last_seen_at
  from workspaces
 where token_hash = $1 and status = 'active';

-- name: page
select id, name, delivery_mode, url, agent_card, parent_id, status, token_hash, inbound_secret,
       active_tasks, current_task, created_at, last_seen_at
  from workspaces
 where id > $1
 order by id
 limit $2;

-- name: heartbeat
-- A sign of life is no event worth waiting for the disk.
update workspaces
   set active_tasks = $2, current_task = $3, last_seen_at = clock_timestamp()
  from (select set_config('synchronous_commit', 'off', true)) as unsynced
 where id = $1;

-- name: remove
-- Seen for the last time now: from here its rows are kept as long as those of its feed.
update workspaces set status = 'removed', token_hash = null, last_seen_at = clock_timestamp()
 where id = $1 and status = 'active'
returning id;

-- name: forget_removed
-- Who was removed can come back and meet what waited, as long as anything of it is kept: a file, or a
-- row of the feed.  After that nothing of it is left, or the tables would grow with every workspace
-- that ever was.  One that is just coming back is locked, and stays.
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
), counters as (
    delete from feeds using removed where workspace_id = removed.id
), forgotten as (
    delete from workspaces using removed where workspaces.id = removed.id
    returning workspaces.id
)
select count(*) from forgotten;

-- name: revive
update workspaces
   set status = 'active', name = $2, delivery_mode = $3, url = $4, agent_card = $5, token_hash = $6,
       inbound_secret = $7, active_tasks = 0, current_task = '', last_seen_at = clock_timestamp()
 where id = $1 and status = 'removed'
returning id;

-- name: set_token
update workspaces set token_hash = $2 where id = $1 and status = 'active'
returning id;

-- name: reset
-- Busy on paper, silent in the feed.  The row is locked before it is judged, so that a heartbeat that
-- comes meanwhile is either seen or stays.  `id` narrows the look to the newest leaf.
with silent as (
    select id, active_tasks, current_task from workspaces
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
returning workspaces.id, silent.active_tasks, silent.current_task;
