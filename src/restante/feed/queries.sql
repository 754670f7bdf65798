-- name: append
-- The counter is taken last before the commit, so that seqs are dense and in commit order.
with counter as (
    update feeds set last_seq = last_seq + 1 where workspace_id = $2 returning last_seq
)
insert into feed (id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
                  request_body, status, created_at)
select $1, $2, counter.last_seq, $3, $4, $2, $5, $6, $7, $8, $9 from counter
returning seq;

-- name: cursor
-- One row by key for an empty poll: the seq of the cursor's row, and the feed's marks.
select feeds.last_seq, feeds.trimmed_seq, feeds.acked_seq, feed.seq
  from feeds left join feed on feed.workspace_id = feeds.workspace_id and feed.id = $2
 where feeds.workspace_id = $1;

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
-- A mark whose row is another one is from before a restore: the rows up to it were not handled.
update feeds
   set acked_seq = case
           when $3::uuid is null
             or exists (select from feed where workspace_id = $1 and id = $3 and seq = $2)
           then greatest(acked_seq, least($2, last_seq))
           else acked_seq
       end
 where workspace_id = $1
returning acked_seq;

-- name: trim
-- Raises the trimmed mark of every feed with rows in this partition, whose name is filled in.  A batch
-- of workspaces at a time, so that not all of their counters are locked at once.
with gone as (
    select workspace_id, max(seq) as seq from %s
     where workspace_id > $1
     group by workspace_id order by workspace_id limit $2
), locked as (
    select workspace_id from feeds where workspace_id in (select workspace_id from gone)
     order by workspace_id for update
), trimmed as (
    update feeds set trimmed_seq = greatest(trimmed_seq, gone.seq)
      from gone join locked using (workspace_id)
     where feeds.workspace_id = gone.workspace_id
)
select workspace_id from gone order by workspace_id desc limit 1;

-- name: lags
-- Unacknowledged rows by workspace, most first.
select workspace_id, last_seq - acked_seq as behind from feeds
 where last_seq > acked_seq
 order by behind desc, workspace_id
 limit $1;
