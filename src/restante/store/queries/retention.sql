-- name: due_uploads
-- Two index ranges; both are empty when nothing is due.
-- Counted up to a limit, so that no backlog is too long to begin with.
select (select count(*) from (select from uploads
                               where acked_at is not null and acked_at < $1 limit $3) as few) as acked,
       (select count(*) from (select from uploads
                               where acked_at is null and expires_at < $2 limit $3) as few) as expired;

-- name: live_in
-- What lives in each bucket and is not due, up to a limit: a bucket with more is not worth moving.
-- With it, the workspace that has most of it.
select leaf.number, live.files, live.bytes, live.workspace_id, live.held_bytes, live.held_files,
       live.since, live.until
  from unnest($1::timestamptz[], $2::timestamptz[]) with ordinality as leaf (begins, ends, number),
       lateral (
           select sum(count(*)) over () as files, (sum(sum(size)) over ())::bigint as bytes,
                  workspace_id, sum(size)::bigint as held_bytes, count(*) as held_files,
                  min(created_at) as since, max(expires_at) as until
             from (select workspace_id, size, created_at, expires_at
                     from uploads
                    where bucket >= leaf.begins and bucket < leaf.ends
                      and (acked_at is null or acked_at >= $3)
                      and (acked_at is not null or expires_at >= $4)
                    limit $5) as few
            group by workspace_id
            order by held_bytes desc, workspace_id
            limit 1
       ) as live;

-- name: arriving_in
select leaf.number, count(*) as uploads
  from unnest($1::timestamptz[], $2::timestamptz[]) with ordinality as leaf (begins, ends, number)
  join reservations on bucket >= leaf.begins and bucket < leaf.ends
 group by leaf.number;

-- name: is_in_use
-- Asked once the leaf is sealed: from then on the answer can only turn from yes to no.  A reservation
-- counts until it is taken back, however late it is: as long as it is there it can be published.
select exists (select from uploads where bucket >= $1 and bucket < $2)
    or exists (select from reservations where bucket >= $1 and bucket < $2);

-- name: files_in
select workspace_id, file_id from uploads
 where bucket >= $1 and bucket < $2
 order by workspace_id, file_id
 limit $3;

-- name: move_file
-- The bytes are copied and the row points at the copy, in one commit: a reader finds one or the other.
-- A file that a client holds is left for the next pass.
with upload as (
    select workspace_id, file_id, bucket, size from uploads
     where workspace_id = $1 and file_id = $2 and bucket <> $3
       for update skip locked
), copied as (
    insert into chunks (bucket, workspace_id, file_id, seq, bytes)
    select $3, chunks.workspace_id, chunks.file_id, chunks.seq, chunks.bytes
      from upload
      join chunks on chunks.bucket = upload.bucket
                 and chunks.workspace_id = upload.workspace_id
                 and chunks.file_id = upload.file_id
), moved as (
    update uploads set bucket = $3 from upload
     where uploads.workspace_id = upload.workspace_id and uploads.file_id = upload.file_id
    returning uploads.size
)
select size from moved;

-- name: trim_feeds
-- How far each feed is trimmed with this leaf, whose name is put in; a batch of workspaces at a time,
-- for the rows of all of them must not be locked at once.
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

-- name: keep_choice
insert into chosen_retention (ack_seconds, feed_seconds) values ($1, $2)
    on conflict (only_row) do update
   set ack_seconds = excluded.ack_seconds, feed_seconds = excluded.feed_seconds;

-- name: choice
select ack_seconds, feed_seconds from chosen_retention;
