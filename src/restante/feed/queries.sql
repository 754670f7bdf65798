-- name: append
-- The counter comes last before the commit, so that seqs are dense and in the order of the commits.
with counter as (
    update feeds set last_seq = last_seq + 1 where workspace_id = $2 returning last_seq
)
insert into feed (id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
                  request_body, status, created_at)
select $1, $2, counter.last_seq, $3, $4, $2, $5, $6, $7, $8, $9 from counter
returning seq;

-- name: cursor
-- One row by key for an empty poll: where the cursor's row is, and where the feed stands.
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
-- Monotonic: a stale or repeated mark changes nothing, and nobody can handle what was not yet there.
update feeds set acked_seq = greatest(acked_seq, least($2, last_seq))
 where workspace_id = $1
returning acked_seq;

-- name: notify
-- One for many commits, on a connection of its own, and not waited for.
select pg_notify('restante_feed', $1) from (select set_config('synchronous_commit', 'off', true)) as unsynced;
