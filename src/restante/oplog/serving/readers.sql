-- name: page_ends
select page_ends from op_peers where id = $1;

-- name: note_confirmed
-- A reader may start over, so this may go down.  It never exceeds what was served.  Nobody waits for it:
-- what a crash loses, or what is skipped because the peer's row is locked, the next request confirms.
-- Ops may go when both sides are past them: it has read them, and we have read what it wrote before.  So what
-- it has read is noted with the end of its own log, or with the time, until we are there.
with locked as (
    select id, least(served, $2) as reached,
           least(served, $2) < confirmed as went_back,
           evicted_at is not null
               and least(served, $2) >= (select coalesce(max(trimmed), '') from op_tables
                                          where op_peers.tables is null or name = any(op_peers.tables))
               as has_returned,
           passing = '' as is_new,
           passing <> ''
               -- Of a table that is new here nothing was read.
               and not exists (select from op_snapshots where peer_id = $1 and is_new)
               and case when passing_head <> ''
                        then least(cursor, (select min(read_to) from op_snapshots where peer_id = $1))
                             >= passing_head
                        -- Two servers may have noted these, by clocks that differ.
                        else read_all_at >= passing_at + interval '1 minute' end as has_passed,
           set_config('synchronous_commit', 'off', true)
      from op_peers
     where id = $1
       and (confirmed <> least(served, $2)
            or confirmed_at is null
            or confirmed_at < $3::timestamptz - interval '5 seconds'
            or peer_head <> $4)
       for no key update skip locked
), judged as (
    select *, went_back or has_returned or is_new or coalesce(has_passed, false) as begins from locked
)
update op_peers
   set confirmed = reached,
       confirmed_at = $3,
       peer_head = coalesce($4, peer_head),
       passed = case when has_returned then ''
                     when went_back then least(passed, reached)
                     when has_passed then greatest(passed, passing)
                     else passed end,
       passing = case when begins then reached else passing end,
       passing_head = case when begins then coalesce($4, '') else passing_head end,
       passing_at = case when begins then $3 else passing_at end,
       evicted_at = case when has_returned then null else evicted_at end
  from judged
 where op_peers.id = judged.id;

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
-- A peer that reads the log takes no snapshot any more; what it has taken was served to it.  It is not
-- evicted again at once, while it reads what was written meanwhile.
with released as (
    delete from op_pins where peer_id = $1 returning position
)
update op_peers
   set served = greatest(served, (select min(position) from released)),
       spared_until = $2
 where id = $1
   and exists (select from released);
