-- name: pulled
update op_peers
   set pulled_at = $2, protocol = $3, skew_seconds = coalesce($4, skew_seconds),
       refused = refused + $5,
       failing_since = case when $6::text is null then null else coalesce(failing_since, $2) end,
       failure = $6,
       -- Not while a table waits for its snapshot: of that one nothing was read.
       read_all_at = case when exists (select from op_snapshots where peer_id = $1) then read_all_at
                          else coalesce($7, read_all_at) end
 where id = $1;

-- name: failed
-- Returns whether that is news.
with before as (
    select id, failure from op_peers where id = $1 for update
)
update op_peers
   set failing_since = coalesce(failing_since, $2), failure = $3
  from before
 where op_peers.id = before.id
returning before.failure is distinct from $3 as is_new;

-- name: drop_cursor
-- Only the one that was found wrong.
update op_peers set cursor = '', cursor_at = $3 where id = $1 and cursor = $2;

-- name: forget_gaps
-- Without a cursor the log is read from its beginning, and not from the start of these snapshots.
update op_snapshots set is_for_gap = false where peer_id = $1;

-- name: read_without
-- Before ops of tables that wait for their snapshots are left out: the peer must not believe that we
-- know them, because it would take our older changes of these records for newer ones.
update op_snapshots
   set read_to = coalesce(read_to, $2)
 where peer_id = $1
returning table_id;

-- name: note_cursor_problem
update op_peers set cursor_problem = $2 where id = $1;

-- name: joined_tables
select joined_tables, joined_relays from op_peers where id = $1;

-- name: join_tables
update op_peers set joined_tables = $2, joined_relays = $3 where id = $1;

-- name: restart_snapshots
update op_snapshots set phase = 'new', after = '', start = '' where peer_id = $1;

-- name: count_gap
-- Once, and only if the cursor really stands there.
update op_peers set gaps = gaps + 1, gap_at = $2
 where id = $1 and cursor >= $2 and gap_at <> $2
returning true;

-- name: waiting_snapshots
-- The newest wish of each peer that nobody has begun to fulfil.  Those for a gap are the puller's own.
select peer_id, max(started_at) as wanted_at
  from op_snapshots
 where phase = 'new' and begun = 0 and started_at < $1 and not is_for_gap
 group by peer_id;
