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

-- name: marks
select last_seq, trimmed_seq, acked_seq from feeds where workspace_id = $1;

-- name: last_before
-- The last row by id, which is by time.
select seq from feed where workspace_id = $1 and id < $2 order by id desc limit 1;

-- name: rows_after
-- The rows between two seqs, up to so many rows and bytes; the first row in any case.  The seqs are
-- dense, so this looks at no more rows than lie between the two, whatever is filtered out.  Bodies are
-- measured without reading them: a compressed one counts as large as its compression can make it (pglz
-- packs 8 runs of up to 273 bytes into 25, lz4 at most 255 bytes into one).
select id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
       convert_to(request_body::text, 'UTF8') as request_body,
       convert_to(response_body::text, 'UTF8') as response_body,
       duration_ms, status, error_detail, created_at
  from (
    select *, sum(body_bytes) over (order by seq rows unbounded preceding) as bytes_so_far
      from (
        select *, coalesce(pg_column_size(request_body)::bigint
                           * case pg_column_compression(request_body)
                                  when 'pglz' then 88 when 'lz4' then 256 else 1 end, 0)
                + coalesce(pg_column_size(response_body)::bigint
                           * case pg_column_compression(response_body)
                                  when 'pglz' then 88 when 'lz4' then 256 else 1 end, 0) as body_bytes
          from feed
         where workspace_id = $1
           and seq > $2
           and seq <= $3
           and ($4::text is null or activity_type = $4)
           and ($5::boolean is null or (source_id is not null) = $5)
           and ($6::timestamptz is null or created_at >= $6)
         order by seq
         limit $7
      ) as found
  ) as measured
 where bytes_so_far <= $8 or bytes_so_far = body_bytes
 order by seq;

-- name: newest_rows
-- The same from the newest down.
select id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
       convert_to(request_body::text, 'UTF8') as request_body,
       convert_to(response_body::text, 'UTF8') as response_body,
       duration_ms, status, error_detail, created_at
  from (
    select *, sum(body_bytes) over (order by seq desc rows unbounded preceding) as bytes_so_far
      from (
        select *, coalesce(pg_column_size(request_body)::bigint
                           * case pg_column_compression(request_body)
                                  when 'pglz' then 88 when 'lz4' then 256 else 1 end, 0)
                + coalesce(pg_column_size(response_body)::bigint
                           * case pg_column_compression(response_body)
                                  when 'pglz' then 88 when 'lz4' then 256 else 1 end, 0) as body_bytes
          from feed
         where workspace_id = $1
           and seq > $2
           and seq <= $3
           and ($4::text is null or activity_type = $4)
           and ($5::boolean is null or (source_id is not null) = $5)
           and ($6::timestamptz is null or created_at >= $6)
         order by seq desc
         limit $7
      ) as found
  ) as measured
 where bytes_so_far <= $8 or bytes_so_far = body_bytes
 order by seq desc;

-- name: acknowledge
-- Monotonic: a stale or repeated mark changes nothing, and a mark beyond the newest row is capped.
update feeds set acked_seq = greatest(acked_seq, least($2, last_seq))
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
