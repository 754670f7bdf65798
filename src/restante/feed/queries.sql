-- name: append
-- The counter is taken last before the commit, so that seqs are dense and in commit order.  Returns no
-- row, and stores nothing, when the feed is full or too much was written this hour.
with counter as (
    update feeds
       set last_seq = last_seq + 1,
           feed_bytes = feed_bytes + $10::int,
           written_hour = hour.starts,
           written_bytes = case written_hour when hour.starts then written_bytes else 0 end + $10::int,
           written_total = written_total + $10::int
      from (select date_trunc('hour', statement_timestamp(), 'UTC') as starts) as hour
     where workspace_id = $2
       and feed_bytes + $10::int <= $11
       and case written_hour when hour.starts then written_bytes else 0 end + $10::int <= $12
    returning last_seq
)
insert into feed (id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
                  request_body, status, created_at, bytes)
select $1, $2, counter.last_seq, $3, $4, $2, $5, $6, $7, $8, $9, $10 from counter
returning seq;

-- name: fill_of
-- The hour is the database's: the servers' clocks differ.
select feed_bytes,
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
-- One row by key for an empty poll: the seq of the cursor's row, and the feed's marks.
select feeds.last_seq, feeds.trimmed_seq, feeds.acked_seq, feed.seq
  from feeds left join feed on feed.workspace_id = feeds.workspace_id and feed.id = $2
 where feeds.workspace_id = $1;

-- name: seq_of
select seq from feed where workspace_id = $1 and id = $2;

-- name: marks
select last_seq, trimmed_seq, acked_seq from feeds where workspace_id = $1;

-- name: rows_after
select id, workspace_id, seq, activity_type, source_id, target_id, method, summary, request_body,
       response_body, duration_ms, status, error_detail, created_at
  from feed
 where workspace_id = $1
   and seq > $2
   and ($3::text is null or activity_type = $3)
   and ($4::boolean is null or (source_id is not null) = $4)
   and ($5::timestamptz is null or created_at >= $5)
 order by seq
 limit $6;

-- name: newest_rows
select id, workspace_id, seq, activity_type, source_id, target_id, method, summary, request_body,
       response_body, duration_ms, status, error_detail, created_at
  from feed
 where workspace_id = $1
   and ($2::text is null or activity_type = $2)
   and ($3::boolean is null or (source_id is not null) = $3)
   and ($4::timestamptz is null or created_at >= $4)
 order by seq desc
 limit $5;

-- name: acknowledge
-- Monotonic: a stale or repeated mark changes nothing, and a mark beyond the newest row is capped.
update feeds set acked_seq = greatest(acked_seq, least($2, last_seq))
 where workspace_id = $1
returning acked_seq;

-- name: trim
-- Raises the trimmed mark of every feed with rows in this partition, whose name is filled in, and
-- subtracts the bytes of the rows between the old mark and the new: a second trim subtracts nothing.
-- Rows of other partitions may be among them, because ids follow the servers' clocks and seqs the
-- commits.  A batch of workspaces at a time, so that not all of their counters are locked at once.
with gone as (
    select workspace_id, max(seq) as seq from %s
     where workspace_id > $1
     group by workspace_id order by workspace_id limit $2
), locked as (
    select workspace_id, trimmed_seq from feeds where workspace_id in (select workspace_id from gone)
     order by workspace_id for update
), trimmed as (
    update feeds
       set trimmed_seq = greatest(feeds.trimmed_seq, gone.seq),
           feed_bytes = greatest(feed_bytes - freed.bytes, 0)
      from gone join locked using (workspace_id),
           lateral (
               select coalesce(sum(feed.bytes), 0) as bytes from feed
                where feed.workspace_id = locked.workspace_id
                  and feed.seq > locked.trimmed_seq and feed.seq <= gone.seq
           ) as freed
     where feeds.workspace_id = gone.workspace_id
)
select workspace_id from gone order by workspace_id desc limit 1;

-- name: lags
-- Unacknowledged rows by workspace, most first.
select workspace_id, last_seq - acked_seq as behind from feeds
 where last_seq > acked_seq
 order by behind desc, workspace_id
 limit $1;
