-- name: page_ends
select page_ends from op_peers where id = $1;

-- name: note_confirmed
-- A reader may start over, so this may go down.  It never exceeds what was served.  Nobody waits for it:
-- what a crash loses, or what is skipped because the peer's row is locked, the next request confirms.
with locked as (
    select id, set_config('synchronous_commit', 'off', true)
      from op_peers
     where id = $1
       and (confirmed <> least(served, $2)
            or confirmed_at is null
            or confirmed_at < $3::timestamptz - interval '5 seconds'
            or peer_head <> $4)
       for no key update skip locked
)
update op_peers
   set confirmed = least(served, $2),
       confirmed_at = $3,
       peer_head = coalesce($4, peer_head)
  from locked
 where op_peers.id = locked.id;

-- name: note_served
with locked as (
    select id, set_config('synchronous_commit', 'off', true)
      from op_peers
     where id = $1 and served < $2
       for no key update skip locked
)
update op_peers set served = $2 from locked where op_peers.id = locked.id;

-- name: note_page_ends
-- The newest first.
with changed as (
    select id, set_config('synchronous_commit', 'off', true)
      from op_peers
     where id = $1 and not page_ends @> $2::text[]
       for no key update
)
update op_peers
   set page_ends = ($2::text[] || page_ends)[1:$3]
  from changed
 where op_peers.id = changed.id;

-- name: note_shown
-- It takes a snapshot of the table now, or reads all tables from the beginning.
update op_peers
   set shown_later = case when $2::integer is null then '{}' else array_remove(shown_later, $2) end
 where id = $1 and shown_later <> '{}';

-- name: end_snapshots
-- A peer that reads the log takes no snapshot any more; what it has taken was served to it.
with released as (
    delete from op_pins where peer_id = $1 returning position
)
update op_peers
   set served = greatest(served, (select min(position) from released))
 where id = $1
   and exists (select from released);
