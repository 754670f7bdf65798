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
