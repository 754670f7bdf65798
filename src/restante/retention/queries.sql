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

-- name: sizes
-- As the filesystem sees them: heap, TOAST and indexes.  Waits for whoever has one of them locked.
select name, coalesce(pg_total_relation_size(to_regclass(quote_ident(name))), 0) as bytes
  from unnest($1::text[]) as name;

-- name: give_up_at_once
select set_config('lock_timeout', $1, true);

-- name: tables
-- Every table and every leaf of ours.
select relname as name, coalesce(pg_stat_get_dead_tuples(oid), 0) as dead_rows
  from pg_class
 where relnamespace = 'restante'::regnamespace and relkind = 'r';

-- name: uploads
-- One pass over the table, which may be long: by bucket, of which there are few, and by workspace, of which
-- come only those with most bytes waiting and those that have not fetched most.  The beginnings of the
-- buckets come in order; what is before the first of them has the number 0.
with counted as (
    select grouping(workspace_id) = 1 as is_bucket, bucket_number, workspace_id,
           count(*) filter (where acked_at is null and expires_at > $1 and fetched_at is null) as never_fetched,
           count(*) filter (where acked_at is null and expires_at > $1 and fetched_at is not null) as fetched,
           count(*) filter (where acked_at is not null) as acked,
           count(*) filter (where acked_at is null and expires_at <= $1) as expired,
           sum(size)::bigint as bytes,
           coalesce(sum(size) filter (where acked_at is not null or expires_at > $1), 0)::bigint as live_bytes,
           coalesce(sum(size) filter (where acked_at is null), 0)::bigint as waiting_bytes,
           min(created_at) filter (where acked_at is null) as waiting_since,
           count(*) filter (where is_silent) as silent_files,
           coalesce(sum(size) filter (where is_silent), 0)::bigint as silent_bytes,
           min(created_at) filter (where is_silent) as silent_since,
           max(expires_at) filter (where is_silent) as silent_until
      from (select *, width_bucket(bucket, $2::timestamptz[]) as bucket_number,
                   -- Nobody has fetched it for an hour.
                   acked_at is null and fetched_at is null
                       and created_at < $1::timestamptz - interval '1 hour' as is_silent
              from uploads) as each
     group by grouping sets ((workspace_id), (bucket_number))
), placed as (
    select *,
           row_number() over (partition by is_bucket order by waiting_bytes desc, workspace_id) as place,
           row_number() over (partition by is_bucket order by silent_bytes desc, workspace_id) as silent_place
      from counted
)
select * from placed
 where is_bucket or place <= $3 or (silent_place <= $4 and silent_files > 0)
 order by place;

-- name: workspaces_active
select count(*) from workspaces where status = 'active';

-- name: lags
-- How far each workspace is behind in its feed, the furthest first.
select workspace_id, last_seq - acked_seq as behind from feeds
 where last_seq > acked_seq
 order by behind desc, workspace_id
 limit $1;

-- name: oldest_transactions
select pid, coalesce(nullif(application_name, ''), backend_type) as who,
       extract(epoch from clock_timestamp() - xact_start)::float as seconds
  from pg_stat_activity
 where xact_start is not null and pid <> pg_backend_pid()
   and datname = current_database()
   and clock_timestamp() - xact_start > interval '1 minute'
 order by xact_start
 limit 5;

-- name: slots
select slot_name as who, active,
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint as bytes
  from pg_replication_slots
 where restart_lsn is not null
 order by bytes desc
 limit 5;

-- name: take_sample
-- One row a pass, for as long as the growth is looked at.
with forgotten as (
    delete from space_samples where taken_at < $1::timestamptz - interval '8 days'
)
insert into space_samples (taken_at, bytes) values ($1, $2) on conflict do nothing;

-- name: growth
-- Bytes a day over the samples of the last week, once they cover an hour.
select (last.bytes - first.bytes) / (extract(epoch from last.taken_at - first.taken_at) / 86400)::float
  from (select * from space_samples where taken_at > $1::timestamptz - interval '7 days'
         order by taken_at limit 1) as first,
       (select * from space_samples order by taken_at desc limit 1) as last
 where last.taken_at - first.taken_at >= interval '1 hour';

-- name: data_directory
-- Only of a server on this machine: the same path elsewhere would tell of another disk.
select setting from pg_settings
 where name = 'data_directory'
   and (inet_server_addr() is null or inet_server_addr() <<= '127.0.0.0/8' or inet_server_addr() = '::1');
