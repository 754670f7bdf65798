-- name: append
-- The counter is taken last before the commit, so that seqs are dense and in commit order.  Returns no
-- row, and stores nothing, when the feed is full, too much was written this hour, or a row with this
-- digest was appended after $16.  One that is appended at the same time cannot be seen: then the key of
-- message_ids refuses the statement, before the body is written.  Bodies come as bytes: as text they
-- would be copied into wider characters.
with counter as (
    update feeds
       set last_seq = last_seq + 1,
           feed_bytes = feed_bytes + $10::int,
           unacked_bytes = unacked_bytes + $10::int,
           written_hour = hour.starts,
           written_bytes = case written_hour when hour.starts then written_bytes else 0 end + $10::int,
           written_total = written_total + $10::int
      from (select date_trunc('hour', statement_timestamp(), 'UTC') as starts) as hour
     where workspace_id = $2
       and unacked_bytes + $10::int <= $11
       and feed_bytes + $10::int <= $13
       and case written_hour when hour.starts then written_bytes else 0 end + $10::int <= $12
       and ($15::uuid is null or not exists (
               select from message_ids
                where workspace_id = $2 and digest = $15 and slot >= $17 and queued_at > $16
           ))
    returning last_seq
), remembered as (
    insert into message_ids (workspace_id, digest, slot, queued_at)
    select $2, $15, slot, $9
      from counter, (select $18::timestamptz union select $19::timestamptz) as slots (slot)
     where $15 is not null
    returning slot
)
insert into feed (id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
                  request_body, status, created_at, bytes, response_body)
select $1, $2, counter.last_seq, $3, $4, $2, $5, $6, convert_from($7::bytea, 'UTF8')::json, $8, $9, $10,
       convert_from($14::bytea, 'UTF8')::json
  from counter, (select count(*) from remembered) as first
returning seq;

-- name: is_queued
select exists (
    select from message_ids
     where workspace_id = $1 and digest = $2 and slot >= $4 and queued_at > $3
);

-- name: fill_of
-- The hour is the database's: the servers' clocks differ.
select feed_bytes, unacked_bytes,
       case written_hour when hour.starts then written_bytes else 0 end as written_bytes,
       ceil(extract(epoch from hour.starts + interval '1 hour' - clock_timestamp()))::int
           as hour_ends_in_seconds,
       (select created_at from feed
         where feed.workspace_id = feeds.workspace_id and seq > trimmed_seq
         order by seq limit 1) as oldest_row_at
  from feeds, (select date_trunc('hour', clock_timestamp(), 'UTC') as starts) as hour
 where workspace_id = $1;

-- name: writers
-- Those for which most was written this hour, or since they exist.
select workspace_id,
       case written_hour when date_trunc('hour', $1::timestamptz, 'UTC')
            then written_bytes else 0 end as this_hour_bytes,
       written_total as total_bytes, feed_bytes
  from feeds
 where written_total > 0
 order by this_hour_bytes desc, total_bytes desc, workspace_id
 limit $2;

-- name: cursor
-- One row by key for an empty poll: the seq of the cursor's row, and the feed's marks.  The order can
-- come from the primary key only, so no other index is walked, whatever the statistics say.
select feeds.last_seq, feeds.trimmed_seq, feeds.acked_seq, found.seq
  from feeds left join lateral (
           select feed.seq from feed
            where feed.workspace_id = $1 and feed.id between $2 and $2
            order by feed.id
            limit 1
       ) as found on true
 where feeds.workspace_id = $1;

-- name: seq_of
-- In the same form as above, for the same reason.
select seq from feed where workspace_id = $1 and id between $2 and $2 order by id limit 1;

-- name: marks
select last_seq, trimmed_seq, acked_seq from feeds where workspace_id = $1;

-- name: newest
-- Without its body.
select id, seq from feed where workspace_id = $1 order by seq desc limit 1;

-- name: last_before
-- The last row by id, which is by time.
select seq from feed where workspace_id = $1 and id < $2 order by id desc limit 1;

-- name: first_from
-- The first row by id, which is by time.
select seq from feed where workspace_id = $1 and id >= $2 order by id limit 1;

-- name: seqs_at
-- The first and the last row of exactly this time, which an id has to the millisecond.  The order can
-- come from the primary key only.
select min(seq) as first, max(seq) as last from (
    select seq, created_at from feed
     where workspace_id = $1 and id >= $2 and id < $3
     order by id
     limit $5
) as near
 where created_at = $4;

-- name: rows_after
-- The rows between two seqs, up to so many rows and bytes; the first row in any case.  Of the rows beyond
-- the first $11 bytes only the sizes are read: the caller may have no memory for them yet.  The seqs are
-- dense, so this looks at no more rows than lie between the two, whatever is filtered out.  A row of the
-- previous release does not say its size.  Its body is measured without reading it: a compressed one
-- counts as large as its compression can make it (pglz packs 8 runs of up to 273 bytes into 25, lz4 at
-- most 255 bytes into one).
select id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
       case when bytes_so_far <= $11 then convert_to(request_body::text, 'UTF8') end as request_body,
       case when bytes_so_far <= $11 then convert_to(response_body::text, 'UTF8') end as response_body,
       duration_ms, status, error_detail, created_at, body_bytes, bytes_so_far <= $11 as is_read
  from (
    select *, sum(body_bytes) over (order by seq rows unbounded preceding) as bytes_so_far
      from (
        select *, coalesce(
                   bytes,
                   pg_column_size(request_body)::bigint
                   * case pg_column_compression(request_body)
                          when 'pglz' then 88 when 'lz4' then 256 else 1 end,
                   0) as body_bytes
          from feed
         where workspace_id = $1
           and seq > $2
           and seq <= $3
           and ($4::text is null or activity_type = $4)
           and ($5::boolean is null or (source_id is not null) = $5)
           and ($6::timestamptz is null or created_at >= $6)
           and ($9::uuid is null or source_id = $9 or target_id = $9)
           and ($10::timestamptz is null or created_at < $10)
         order by seq
         limit $7
      ) as found
  ) as measured
 where bytes_so_far <= $8 or bytes_so_far = body_bytes
 order by seq;

-- name: newest_rows
-- The same from the newest down, and how many rows there were before the limit of bytes.
select id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
       case when bytes_so_far <= $11 then convert_to(request_body::text, 'UTF8') end as request_body,
       case when bytes_so_far <= $11 then convert_to(response_body::text, 'UTF8') end as response_body,
       duration_ms, status, error_detail, created_at, body_bytes, bytes_so_far <= $11 as is_read, found
  from (
    select *, count(*) over () as found,
           sum(body_bytes) over (order by seq desc rows unbounded preceding) as bytes_so_far
      from (
        select *, coalesce(
                   bytes,
                   pg_column_size(request_body)::bigint
                   * case pg_column_compression(request_body)
                          when 'pglz' then 88 when 'lz4' then 256 else 1 end,
                   0) as body_bytes
          from feed
         where workspace_id = $1
           and seq > $2
           and seq <= $3
           and ($4::text is null or activity_type = $4)
           and ($5::boolean is null or (source_id is not null) = $5)
           and ($6::timestamptz is null or created_at >= $6)
           and ($9::uuid is null or source_id = $9 or target_id = $9)
           and ($10::timestamptz is null or created_at < $10)
         order by seq desc
         limit $7
      ) as found
  ) as measured
 where bytes_so_far <= $8 or bytes_so_far = body_bytes
 order by seq desc;

-- name: acknowledge
-- Monotonic: a stale or repeated mark changes nothing, and a mark beyond the newest row is capped.
-- A mark whose row is another one is from before a restore: the rows up to it were not handled.
-- Subtracts the bytes of so many acknowledged rows at most, and says whether some are left.  The mark is
-- of this snapshot, so that all rows up to it are seen even if other statements update the feed first.
-- Where nothing counts there is nothing to sum up.
with target as materialized (
    select greatest(acked_seq, case
               when $3::uuid is null
                 or exists (select from feed where workspace_id = $1 and id = $3 and seq = $2)
               then least($2, last_seq) else 0
           end) as seq
      from feeds
     where workspace_id = $1
)
update feeds
   set acked_seq = greatest(acked_seq, target.seq),
       settled_seq = greatest(settled_seq, case unacked_bytes
           when 0 then target.seq
           else least(target.seq, greatest(settled_seq, trimmed_seq) + $4::int)
       end),
       unacked_bytes = case unacked_bytes when 0 then 0 else greatest(unacked_bytes - (
           select coalesce(sum(feed.bytes), 0) from feed
            where feed.workspace_id = $1
              and feed.seq > greatest(settled_seq, trimmed_seq)
              and feed.seq <= least(target.seq, greatest(settled_seq, trimmed_seq) + $4::int)
       ), 0) end
  from target
 where workspace_id = $1
returning acked_seq, settled_seq < acked_seq as has_more;

-- name: has_only
-- Whether all unacknowledged rows up to a seq have this method.  The mark is a subquery: as a join it
-- would be a filter, after all rows of the workspace were read.
select not exists (
    select from feed
     where workspace_id = $1
       and seq > (select greatest(acked_seq, trimmed_seq) from feeds where workspace_id = $1)
       and seq <= $2
       and method is distinct from $3
);

-- name: recount
-- Corrects the counters of a feed that the previous release has trimmed.  What they are off by is found
-- in one snapshot and subtracted: rows that come or go meanwhile are counted by whoever does that.
with seen as materialized (
    select counted_seq, trimmed_seq, feed_bytes - kept.bytes as kept_excess,
           unacked_bytes - kept.unacked as unacked_excess
      from feeds, lateral (
               select coalesce(sum(bytes), 0) as bytes,
                      coalesce(sum(bytes) filter (where seq > settled_seq), 0) as unacked
                 from feed
                where feed.workspace_id = $1 and seq > trimmed_seq
           ) as kept
     where feeds.workspace_id = $1 and counted_seq < trimmed_seq
)
update feeds
   set feed_bytes = greatest(feed_bytes - kept_excess, 0),
       unacked_bytes = greatest(unacked_bytes - unacked_excess, 0),
       counted_seq = seen.trimmed_seq
  from seen
 where workspace_id = $1 and feeds.counted_seq = seen.counted_seq;

-- name: part_of
-- The bytes from one sender, among so many of the newest rows: those that are not acknowledged, and with
-- them those that were stored too recently to be trimmed.  Ids follow the time.
with bounds as materialized (
    select acked_seq,
           greatest(trimmed_seq, least(acked_seq, coalesce((
               select seq from feed where workspace_id = $1 and id < $4 order by id desc limit 1
           ), 0))) as after_seq
      from feeds
     where workspace_id = $1
)
select coalesce(sum(bytes) filter (where seq > (select acked_seq from bounds)), 0)::bigint
           as unacked_bytes,
       coalesce(sum(bytes), 0)::bigint as held_bytes
  from (select source_id, bytes, seq from feed
         where workspace_id = $1 and seq > (select after_seq from bounds)
         order by seq desc
         limit $3) as newest
 where source_id = $2;

-- name: total_bytes
-- With the ids of messages, which outlive rows that are trimmed early.  Their partitions are asked for
-- their size: a counter of all of them would be a row that every commit locks.  One that is being
-- detached may be locked, so it is left out; an empty one has a page, in its index.
select ((select coalesce(sum(feed_bytes), 0) from feeds)
        + (select coalesce(sum(pg_total_relation_size(inhrelid) - 8192), 0)
             from pg_inherits
            where inhparent = 'message_ids'::regclass and not inhdetachpending))::bigint;

-- name: lock
select from feeds where workspace_id = $1 for update;

-- name: trim_oldest
-- The feed was locked by a statement before this one, so the snapshot has all that was committed by
-- then.  Rows go oldest first, up to the first one that must stay, or until so many rows or bytes are
-- enough: senders wait meanwhile.  The mark and the rows go in one commit: a reader that reads marks after
-- rows notices.
with bounds as materialized (
    select trimmed_seq, settled_seq, last_seq,
           case when $5::boolean then last_seq else acked_seq end as up_to_seq
      from feeds
     where workspace_id = $1
), oldest as (
    select seq, coalesce(bytes, 0) as bytes, created_at < $2 as is_old
      from feed
     where workspace_id = $1
       and seq > (select trimmed_seq from bounds)
       and seq <= (select up_to_seq from bounds)
     order by seq
     limit $3
), measured as (
    select seq, bytes,
           bool_and(is_old) over so_far as may_go, sum(bytes) over so_far as bytes_so_far
      from oldest
    window so_far as (order by seq rows unbounded preceding)
), going as materialized (
    select max(seq) as seq, count(*) as rows, sum(bytes) as bytes,
           coalesce(sum(bytes) filter (where seq > (select settled_seq from bounds)), 0) as unacked
      from measured
     where may_go and bytes_so_far - bytes < $4
), deleted as (
    delete from feed
     where workspace_id = $1
       and seq > (select trimmed_seq from bounds)
       and seq <= (select seq from going)
)
update feeds
   set trimmed_seq = going.seq,
       settled_seq = greatest(settled_seq, going.seq),
       feed_bytes = case last_seq when going.seq then 0 else greatest(feed_bytes - going.bytes, 0) end,
       unacked_bytes = case last_seq when going.seq then 0
                                     else greatest(unacked_bytes - going.unacked, 0) end,
       counted_seq = case when counted_seq = trimmed_seq or last_seq = going.seq then going.seq
                          else counted_seq end
  from going
 where workspace_id = $1 and going.seq is not null
returning going.rows;

-- name: lock_largest
-- Of the largest feeds that have rows which nobody needs, the first that nobody has locked.  A workspace
-- that was removed can register again, so its rows stay for as long as acknowledged ones.
with large as materialized (
    select workspace_id, trimmed_seq, feed_bytes, is_removed
      from feeds left join lateral (
               select status = 'removed' and last_seen_at < $1 as is_removed
                 from workspaces where id = feeds.workspace_id
           ) as workspace on true
     where trimmed_seq < case when is_removed then last_seq else acked_seq end
     order by feed_bytes desc
     limit $2
), due as materialized (
    select workspace_id, feed_bytes, coalesce(is_removed, false) as is_removed
      from large
     where (select created_at from feed
             where feed.workspace_id = large.workspace_id and seq > trimmed_seq
             order by seq limit 1) < $1
)
select feeds.workspace_id, due.is_removed
  from feeds join due using (workspace_id)
 order by due.feed_bytes desc
 limit 1
   for update of feeds skip locked;

-- name: count_unneeded
with large as materialized (
    select workspace_id, trimmed_seq,
           case when is_removed then last_seq else acked_seq end as up_to_seq
      from feeds left join lateral (
               select status = 'removed' and last_seen_at < $1 as is_removed
                 from workspaces where id = feeds.workspace_id
           ) as workspace on true
     where trimmed_seq < case when is_removed then last_seq else acked_seq end
     order by feed_bytes desc
     limit $2
)
select count(*) from (
    select from large, lateral (
               select from feed
                where feed.workspace_id = large.workspace_id
                  and seq > trimmed_seq and seq <= up_to_seq and created_at < $1
           ) as row
     limit $3
) as unneeded;

-- name: needing
-- Which of these workspaces need the row with this seq; one that was removed before a time needs none.
select workspace_id, feed_bytes
  from unnest($1::uuid[], $2::bigint[]) as one (workspace_id, seq)
  join feeds using (workspace_id)
 where one.seq > greatest(acked_seq, trimmed_seq)
   and not exists (
       select from workspaces
        where id = feeds.workspace_id and status = 'removed' and last_seen_at < $3
   );

-- name: largest
select workspace_id, feed_bytes from feeds where feed_bytes > 0 order by feed_bytes desc limit 1;

-- name: in_partition
-- The workspaces with rows in this partition, whose name is filled in, and the last row of each there.
-- A few index entries for each, however many rows it has.
with recursive found (workspace_id) as (
    (select workspace_id from %s where workspace_id > $1 order by workspace_id limit 1)
    union all
    select (select one.workspace_id from %s as one
             where one.workspace_id > found.workspace_id order by one.workspace_id limit 1)
      from found
     where found.workspace_id is not null
)
select workspace_id,
       (select one.seq from %s as one
         where one.workspace_id = found.workspace_id order by one.seq desc limit 1) as seq
  from found
 where workspace_id is not null
 limit $2;

-- name: trim
-- Raises the trimmed marks of these workspaces towards these seqs, and subtracts the bytes of the rows
-- between the old mark and the new: a second trim subtracts nothing.  Nobody can append while the sums
-- are made, so a mark is raised by so many rows at most.  Rows of other partitions may be among them,
-- because ids follow the servers' clocks and seqs the commits.  A feed without rows counts nothing,
-- whatever the previous release has left in its counters.  Returns those that are not done yet.
with wanted as (
    select workspace_id, seq from unnest($1::uuid[], $2::bigint[]) as one (workspace_id, seq)
), locked as (
    select workspace_id, trimmed_seq, settled_seq, last_seq from feeds
     where workspace_id = any($1::uuid[])
     order by workspace_id for update
), next as (
    select workspace_id, trimmed_seq as old_seq, least(seq, trimmed_seq + $3::int) as new_seq, seq,
           settled_seq, last_seq
      from wanted join locked using (workspace_id)
     where trimmed_seq < seq
), trimmed as (
    update feeds
       set trimmed_seq = next.new_seq,
           settled_seq = greatest(feeds.settled_seq, next.new_seq),
           feed_bytes = case when new_seq = next.last_seq then 0
                             else greatest(feed_bytes - freed.bytes, 0) end,
           unacked_bytes = case when new_seq = next.last_seq then 0
                                else greatest(unacked_bytes - freed.unacked, 0) end,
           counted_seq = case when counted_seq = old_seq or new_seq = next.last_seq then new_seq
                              else counted_seq end
      from next,
           lateral (
               select coalesce(sum(feed.bytes), 0) as bytes,
                      coalesce(sum(feed.bytes) filter (where feed.seq > next.settled_seq), 0) as unacked
                 from feed
                where feed.workspace_id = next.workspace_id
                  and feed.seq > next.old_seq and feed.seq <= next.new_seq
           ) as freed
     where feeds.workspace_id = next.workspace_id
)
select workspace_id, seq from next where new_seq < seq;

-- name: lags
-- Unacknowledged rows by workspace, most first.
select workspace_id, last_seq - acked_seq as behind from feeds
 where last_seq > acked_seq
 order by behind desc, workspace_id
 limit $1;

-- name: horizon
-- Transactions with lower ids have ended; whatever commits later has this id or a higher one.
select pg_snapshot_xmin(pg_current_snapshot())::text::bigint as xid, statement_timestamp() as at;

-- name: changed_since
-- The feeds that a transaction with this id or a later one has changed, among them all that have grown:
-- an append updates its feed.  One pass over the counters.  Ids of transactions have 32 bits here and
-- wrap around, so their distance decides; a feed that is found for that reason alone has not grown.
select workspace_id, last_seq
  from feeds
 where last_seq > 0
   and ((xmin::text::bigint - $1) & 4294967295) < 2147483648
 limit $2;

-- name: seen_seqs
-- The last row of each of these feeds that was written by a transaction before this id.  Rows are in
-- commit order, so it is next to those that were not.  Rows with a lower id than this are older than any
-- transaction that still runs.
select workspace_id,
       coalesce((select seq from feed
                  where feed.workspace_id = feeds.workspace_id
                    and (feed.id < $3
                         or ((feed.xmin::text::bigint - $2) & 4294967295) >= 2147483648)
                  order by seq desc
                  limit 1), trimmed_seq) as seq
  from feeds
 where workspace_id = any($1::uuid[]);
