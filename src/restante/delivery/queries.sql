-- name: put_chunks
-- Nothing refers to these bytes yet, so the commit is not synced.  The commit that publishes them
-- flushes the WAL up to and including them.
insert into chunks (bucket, workspace_id, file_id, seq, bytes)
select $1, $2, piece.file_id, piece.seq, piece.bytes
  from unnest($3::uuid[], $4::int[], $5::bytea[]) as piece (file_id, seq, bytes),
       (select set_config('synchronous_commit', 'off', true)) as unsynced;

-- name: publish
-- All or nothing: the counter, the files, their feed rows, the last bytes and the remembered answer
-- are one statement, so a small request is one round trip.  It returns no row, and stores nothing,
-- when there is no room or when the key was used before.  (A new key for which there is no room would
-- be remembered anyway; the caller wraps a request with a key in a transaction.)  Without a bucket the
-- bytes go to the current one by the database's clock, which the sweep uses too.
with target as materialized (
    select coalesce($11::timestamptz, date_trunc('second', statement_timestamp())) as bucket
), remembered as (
    insert into answers (workspace_id, idempotency_key, fingerprint, answer, expires_at)
    select $1, $2, $3, $4, $5 where $2::text is not null
        on conflict (workspace_id, idempotency_key) do update
       set fingerprint = excluded.fingerprint, answer = excluded.answer,
           expires_at = excluded.expires_at
     where answers.expires_at <= $12
    returning true
), promised as (
    select bytes, files from reservations where id = $6 for update
), room as (
    update feeds
       set last_seq = last_seq + $7::int,
           waiting_files = waiting_files + $7::int,
           waiting_bytes = waiting_bytes + $8::bigint,
           reserved_files = reserved_files - coalesce((select files from promised), 0),
           reserved_bytes = reserved_bytes - coalesce((select bytes from promised), 0),
           feed_bytes = feed_bytes + $29::bigint,
           unacked_bytes = unacked_bytes + $29::bigint,
           written_hour = hour.starts,
           written_bytes = greatest(
               case written_hour when hour.starts then written_bytes else 0 end + $30::bigint, 0),
           written_total = greatest(written_total + $30::bigint, 0)
      from (select date_trunc('hour', statement_timestamp(), 'UTC') as starts) as hour
     where workspace_id = $1
       and ($2::text is null or exists (select from remembered))
       and ($6::uuid is null or exists (select from promised))
       and waiting_bytes + reserved_bytes - coalesce((select bytes from promised), 0) + $8 <= $9
       and waiting_files + reserved_files - coalesce((select files from promised), 0) + $7 <= $10
       and unacked_bytes + $29::bigint <= $31
       and feed_bytes + $29::bigint <= $33
       and case written_hour when hour.starts then written_bytes else 0 end + $30::bigint <= $32
    returning last_seq
), freed as (
    delete from reservations using room where id = $6
), stored as (
    insert into uploads (workspace_id, file_id, bucket, name, mimetype, size, sha256,
                         created_at, expires_at, display_name, source_id)
    select $1, file.id, target.bucket, file.name, file.mimetype, file.size, file.sha256, $12, $13,
           file.display_name, $35::uuid
      from room, target, unnest($14::uuid[], $15::text[], $16::text[], $17::bigint[], $18::bytea[],
                                $34::text[])
              as file (id, name, mimetype, size, sha256, display_name)
), kept as (
    insert into chunks (bucket, workspace_id, file_id, seq, bytes)
    select target.bucket, $1, piece.file_id, piece.seq, piece.bytes
      from room, target, unnest($19::uuid[], $20::int[], $21::bytea[]) as piece (file_id, seq, bytes)
), announced as (
    insert into feed (id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
                      request_body, status, created_at, bytes)
    -- The bodies are sent as text: an application's connection may have its own codec for json.  No
    -- two rows have the same time, so that a reader can page back by it.
    select line.id, $1, room.last_seq - $7 + line.number, $22, $35::uuid, $1, $23, line.summary,
           line.body::json, $24,
           $12::timestamptz + (line.number - 1) * interval '1 microsecond', line.bytes
      from room, unnest($25::uuid[], $26::text[], $27::text[], $28::int[])
              with ordinality as line (id, summary, body, bytes, number)
)
select last_seq from room;

-- name: current_search_path
select current_setting('search_path');

-- name: enter_schema
select set_config('search_path', $1, true),
       set_config('synchronous_commit',
                  case current_setting('synchronous_commit')
                       when 'off' then 'on' else current_setting('synchronous_commit') end, true);

-- name: leave_schema
select set_config('search_path', $1, true);

-- name: remembered_answer
select fingerprint, answer from answers
 where workspace_id = $1 and idempotency_key = $2 and expires_at > $3;

-- name: get_upload
-- Absent, acknowledged, expired and another workspace's give the same answer.  $4: acknowledged ones
-- are wanted too, for as long as they exist.
select workspace_id, file_id, bucket, name, mimetype, size, sha256,
       created_at, fetched_at, acked_at, expires_at, coalesce(display_name, name) as display_name,
       source_id
  from uploads
 where workspace_id = $1 and file_id = $2
   and case when acked_at is null then expires_at > $3 else $4::boolean end;

-- name: unacked_uploads
select file_id, name, mimetype as mime_type, size, encode(sha256, 'hex') as sha256,
       created_at, fetched_at, expires_at, coalesce(display_name, name) as display_name,
       source_id
  from uploads
 where workspace_id = $1 and acked_at is null and expires_at > $2
   and (created_at, file_id) > ($3, $4)
 order by created_at, file_id
 limit $5;

-- name: created_at
-- In any state: the last file of the previous page may have been acknowledged since.
select created_at from uploads where workspace_id = $1 and file_id = $2;

-- name: read_chunks
select seq, bytes from chunks
 where bucket = $1 and workspace_id = $2 and file_id = $3 and seq >= $4 and seq < $5
 order by seq;

-- name: mark_fetched
-- Best effort, so the commit is not synced.
update uploads set fetched_at = $3
  from (select set_config('synchronous_commit', 'off', true)) as unsynced
 where workspace_id = $1 and file_id = $2 and acked_at is null and expires_at > $3;

-- name: acknowledge
-- One statement, so that a retry cannot fall between a check and a write.  The first time stays, also
-- if the file was reopened since: who acknowledges and reopens in turns would keep it for ever.  Only
-- an acknowledgement of a waiting file frees its room.  `seen` reads the statement's snapshot and `locked` waits
-- for a concurrent delete: a row that is in the first and not in the second was swept meanwhile.
with seen as (
    select name, size from uploads
     where workspace_id = $1 and file_id = $2 and (acked_at is not null or expires_at > $3)
), locked as (
    select acked_at from uploads
     where workspace_id = $1 and file_id = $2 and (acked_at is not null or expires_at > $3)
       for update
), acked as (
    update uploads set acked_at = coalesce(first_acked_at, $3)
      from locked
     where workspace_id = $1 and file_id = $2 and locked.acked_at is null
    returning uploads.size
), freed as (
    update feeds
       set waiting_bytes = waiting_bytes - acked.size, waiting_files = waiting_files - 1
      from acked
     where workspace_id = $1
)
select exists (select from acked) as is_first, not exists (select from locked) as is_gone, name, size
  from seen;

-- name: reopen
-- For a workspace that acknowledged a file and then lost it: the file can be fetched again, counts in
-- the quota again, and is announced again.  The limits are checked with the counters locked, as for
-- every new row: whoever acknowledges and reopens in turns would exceed them.  The upload is locked
-- first, as by an acknowledgement, so that the two cannot deadlock.  A file for which the quota has no
-- room waits for one more ack retention only, or the quota could be exceeded for as long as files live.
with acked as (
    select size from uploads
     where workspace_id = $1 and file_id = $2 and acked_at >= $3
       for update
), counter as (
    update feeds
       set last_seq = last_seq + 1,
           waiting_bytes = waiting_bytes + acked.size, waiting_files = waiting_files + 1,
           feed_bytes = feed_bytes + $12::int,
           unacked_bytes = unacked_bytes + $12::int,
           written_hour = hour.starts,
           written_bytes = case written_hour when hour.starts then written_bytes else 0 end + $15::int,
           written_total = written_total + $15::int
      from acked, (select date_trunc('hour', statement_timestamp(), 'UTC') as starts) as hour
     where workspace_id = $1
       and unacked_bytes + $12::int <= $13
       and feed_bytes + $12::int <= $14
       and case written_hour when hour.starts then written_bytes else 0 end + $15::int <= $16
    returning last_seq, waiting_bytes + reserved_bytes <= $17 and waiting_files + reserved_files <= $18
              as is_within_quota
), reopened as (
    update uploads
       set acked_at = null, first_acked_at = coalesce(first_acked_at, acked_at), fetched_at = null,
           expires_at = case when is_within_quota then greatest(expires_at, $4) else $4 end
      from counter
     where workspace_id = $1 and file_id = $2
)
insert into feed (id, workspace_id, seq, activity_type, source_id, target_id, method, summary,
                  request_body, status, created_at, bytes)
select $5, $1, counter.last_seq, $7, $19::uuid, $1, $8, $9, $10, $11, $6, $12 from counter
returning seq;

-- name: get_acked
select workspace_id, file_id, bucket, name, mimetype, size, sha256,
       created_at, fetched_at, acked_at, expires_at, coalesce(display_name, name) as display_name,
       source_id
  from uploads
 where workspace_id = $1 and file_id = $2 and acked_at is not null;

-- name: expire
-- Waits for a lock on the row, so an acknowledgement comes before or after this.  The sweep frees its
-- room, as for every upload that expires.
with before as (
    select acked_at, expires_at, name, size from uploads
     where workspace_id = $1 and file_id = $2
       for update
), expired as (
    update uploads set expires_at = $3
      from before
     where workspace_id = $1 and file_id = $2
       and before.acked_at is null and before.expires_at > $3
    returning true
)
select exists (select from expired) as is_first, acked_at, least(expires_at, $3) as expired_at,
       name, size
  from before;

-- name: held_for
-- What is kept for a workspace, and how long.
select count(*) filter (where acked_at is null and expires_at > $2) as waiting_files,
       coalesce(sum(size) filter (where acked_at is null and expires_at > $2), 0)::bigint as waiting_bytes,
       max(expires_at) filter (where acked_at is null and expires_at > $2) as waiting_until,
       count(*) filter (where acked_at is not null) as acked_files,
       coalesce(sum(size) filter (where acked_at is not null), 0)::bigint as acked_bytes
  from uploads
 where workspace_id = $1;

-- name: expire_waiting
-- A batch; waits for locks, so that an acknowledgement comes before or after this.
with due as (
    select file_id from uploads
     where workspace_id = $1 and acked_at is null and expires_at > $2
     order by file_id
     limit $3
       for update
)
update uploads set expires_at = $2
  from due
 where uploads.workspace_id = $1 and uploads.file_id = due.file_id
   and acked_at is null and expires_at > $2
returning uploads.file_id;

-- name: uploads_in_any_state
-- For the operator, and rare: an index that begins with the file would cost every upload, and without
-- one the million uploads that a server may hold are scanned in half a second.
select workspace_id, file_id, bucket, name, coalesce(display_name, name) as display_name,
       mimetype as mime_type, size, encode(sha256, 'hex') as sha256,
       created_at, fetched_at, acked_at, expires_at, state, acked_at + $8::interval as reopenable_until
  from (select *,
               case when acked_at is not null then 'acked'
                    when expires_at <= $1 then 'expired'
                    when fetched_at is not null then 'fetched'
                    else 'never_fetched'
               end as state
          from uploads) as in_any_state
 where ($2::uuid is null or workspace_id = $2)
   and ($3::uuid is null or file_id = $3)
   and ($4::text is null or state = $4)
   and (created_at, file_id) > ($5, $6)
 order by created_at, file_id
 limit $7;

-- name: partition_of
-- Where its first chunk is; no row if the bytes are gone.
select tableoid::regclass::text from chunks
 where bucket = $1 and workspace_id = $2 and file_id = $3 and seq = 0;

-- name: delete_due
-- Bounded: a backlog of millions must not hold locks for minutes.  Locked rows are left for the next
-- pass, and so are the expired files of a workspace whose counters are locked, because their room
-- could not be freed.  It waits for no lock, so two sweepers cannot deadlock.
with acknowledged as (
    select workspace_id, file_id from uploads
     where acked_at is not null and acked_at < $1
     order by acked_at limit $3 for update skip locked
), expired as (
    select workspace_id, file_id from uploads
     where acked_at is null and expires_at < $2
     order by expires_at limit $3 for update skip locked
), locked as (
    select workspace_id from feeds
     where workspace_id in (select workspace_id from expired)
       for update skip locked
), due as (
    select workspace_id, file_id from acknowledged
    union all
    select workspace_id, file_id from expired join locked using (workspace_id)
), gone as (
    delete from uploads using due
     where uploads.workspace_id = due.workspace_id and uploads.file_id = due.file_id
    returning uploads.workspace_id, uploads.size, uploads.acked_at is not null as was_acked
), unacked as (
    select workspace_id, sum(size) as bytes, count(*) as files
      from gone where not was_acked group by workspace_id
), freed as (
    update feeds
       set waiting_bytes = waiting_bytes - unacked.bytes,
           waiting_files = waiting_files - unacked.files
      from unacked
     where feeds.workspace_id = unacked.workspace_id
)
select count(*) filter (where was_acked) as acked, count(*) filter (where not was_acked) as expired
  from gone;

-- name: reserve
-- Takes room, or changes a reservation to this much, and counts what is about to be written.  Either
-- way the reservation lasts from now on, by the database's clock: the servers' clocks differ.  Nothing
-- is visible yet, so the commit is not synced.  Returns no row when there is no room; $11 must fit too.
with held as (
    select bytes, files from reservations where id = $1 for update
), room as (
    update feeds
       set reserved_bytes = reserved_bytes + $3::bigint - coalesce((select bytes from held), 0),
           reserved_files = reserved_files + $4::int - coalesce((select files from held), 0),
           written_hour = hour.starts,
           written_bytes = case written_hour when hour.starts then written_bytes else 0 end + $9::bigint,
           written_total = written_total + $9::bigint
      from (select date_trunc('hour', clock_timestamp(), 'UTC') as starts,
                   set_config('synchronous_commit', 'off', true)) as hour
     where workspace_id = $2
       and waiting_bytes + reserved_bytes - coalesce((select bytes from held), 0)
           + greatest($3::bigint, $11::bigint) <= $5
       and waiting_files + reserved_files - coalesce((select files from held), 0) + $4 <= $6
       and case written_hour when hour.starts then written_bytes else 0 end + $9::bigint <= $10
    returning true
)
insert into reservations (id, workspace_id, bucket, bytes, files, expires_at)
select $1, $2, coalesce($8::timestamptz, date_trunc('second', clock_timestamp())), $3, $4, clock_timestamp() + $7::interval
  from room
    on conflict (id) do update
   set bytes = excluded.bytes, files = excluded.files, expires_at = excluded.expires_at
returning bucket, not exists (select from held) as is_new;

-- name: renew
-- Returns those that it has renewed.  A locked one is being published or released; the sweep may be
-- deleting it, so it must not look as if it lasted.
with unlocked as (
    select id from reservations where id = any($1::uuid[]) for update skip locked
), renewed as (
    update reservations set expires_at = clock_timestamp() + $2::interval
      from unlocked, (select set_config('synchronous_commit', 'off', true)) as unsynced
     where reservations.id = unlocked.id
    returning reservations.id
)
select id from renewed;

-- name: is_kept
-- Whether the bytes that a file has in a bucket stay: they do if the bucket is not sealed after a
-- reservation names it.
select exists (
    select from chunks
     where bucket = $1 and workspace_id = $2 and file_id = $3
       and not exists (select from pg_trigger
                        where tgrelid = chunks.tableoid and tgname = 'sealed')
       and not exists (select from pg_constraint
                        where conrelid = chunks.tableoid and conname = 'sealed')
);

-- name: release
with freed as (
    delete from reservations where id = $1 returning workspace_id, bytes, files
)
update feeds
   set reserved_bytes = reserved_bytes - freed.bytes, reserved_files = reserved_files - freed.files
  from freed, (select set_config('synchronous_commit', 'off', true)) as unsynced
 where feeds.workspace_id = freed.workspace_id;

-- name: release_expired
-- Waits for no lock: a locked reservation, or one of a workspace whose counters are locked, is left for
-- the next pass.
with expired as (
    select id, workspace_id from reservations
     where expires_at < $1 order by expires_at limit $2 for update skip locked
), locked as (
    select workspace_id from feeds
     where workspace_id in (select workspace_id from expired)
       for update skip locked
), released as (
    delete from reservations
     using expired join locked using (workspace_id)
     where reservations.id = expired.id
    returning reservations.workspace_id, reservations.bytes, reservations.files
), room as (
    select workspace_id, sum(bytes) as bytes, sum(files) as files from released group by workspace_id
), freed as (
    update feeds
       set reserved_bytes = reserved_bytes - room.bytes, reserved_files = reserved_files - room.files
      from room, (select set_config('synchronous_commit', 'off', true)) as unsynced
     where feeds.workspace_id = room.workspace_id
)
select count(*) from released;

-- name: count_expired_reservations
select count(*) from (select from reservations where expires_at < $1 limit $2) as expired;

-- name: count_expired_answers
select count(*) from (select from answers where expires_at < $1 limit $2) as expired;

-- name: delete_expired_answers
with deleted as (
    delete from answers
     where (workspace_id, idempotency_key) in (
         select workspace_id, idempotency_key from answers
          where expires_at < $1 order by expires_at limit $2 for update skip locked
     )
    returning true
)
select count(*) from deleted;

-- name: usage_of_workspace
select waiting_bytes + reserved_bytes as bytes, waiting_files + reserved_files as files
  from feeds where workspace_id = $1;

-- name: usage_of_server
select coalesce(sum(waiting_bytes), 0)::bigint as waiting_bytes,
       coalesce(sum(waiting_files), 0)::bigint as waiting_files,
       coalesce(sum(reserved_bytes), 0)::bigint as reserved_bytes,
       coalesce(sum(reserved_files), 0)::bigint as reserved_files
  from feeds;

-- name: workspace_frees_at
select expires_at from uploads
 where workspace_id = $1 and acked_at is null order by expires_at limit 1;

-- name: due_uploads
-- Two index ranges, both empty when nothing is due; counted up to a limit, whatever the backlog.
select (select count(*) from (select from uploads
                               where acked_at is not null and acked_at < $1 limit $3) as few) as acked,
       (select count(*) from (select from uploads
                               where acked_at is null and expires_at < $2 limit $3) as few) as expired;

-- name: live_in
-- The files of each bucket that are not due, up to a limit: a bucket with more is not worth moving.
-- With it, the workspace that has most of the bytes.
select bucket_range.number, live.files, live.bytes, live.workspace_id, live.held_bytes, live.held_files,
       live.since, live.until
  from unnest($1::timestamptz[], $2::timestamptz[]) with ordinality as bucket_range (begins, ends, number),
       lateral (
           select sum(count(*)) over () as files, (sum(sum(size)) over ())::bigint as bytes,
                  workspace_id, sum(size)::bigint as held_bytes, count(*) as held_files,
                  min(created_at) as since, max(expires_at) as until
             from (select workspace_id, size, created_at, expires_at
                     from uploads
                    where bucket >= bucket_range.begins and bucket < bucket_range.ends
                      and (acked_at is null or acked_at >= $3)
                      and (acked_at is not null or expires_at >= $4)
                    limit $5) as few
            group by workspace_id
            order by held_bytes desc, workspace_id
            limit 1
       ) as live;

-- name: arriving_in
select bucket_range.number, count(*) as uploads
  from unnest($1::timestamptz[], $2::timestamptz[]) with ordinality as bucket_range (begins, ends, number)
  join reservations on bucket >= bucket_range.begins and bucket < bucket_range.ends
 group by bucket_range.number;

-- name: is_bucket_in_use
-- Asked after the partition is sealed: from then on the answer can only change from yes to no.  A
-- reservation counts until it is deleted, even if it has expired: until then it can be published.
select exists (select from uploads where bucket >= $1 and bucket < $2)
    or exists (select from reservations where bucket >= $1 and bucket < $2);

-- name: files_in
select workspace_id, file_id, bucket, size from uploads
 where bucket >= $1 and bucket < $2
 order by workspace_id, file_id
 limit $3;

-- name: move_file
-- One commit copies the bytes and points the row at the copy: a reader finds one or the other.  A row
-- that is locked is left for the next pass.
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

-- name: begin_move
-- A large file is copied in steps.  A reservation without room, with the file's own id, keeps the bucket
-- of the copy until it is complete.  If there is one, an earlier pass has begun: its bucket stays.  A pass
-- that keeps copies for less time than another server does not shorten it.
insert into reservations (id, workspace_id, bucket, bytes, files, expires_at)
values ($2, $1, $3, 0, 0, clock_timestamp() + $4::interval)
    on conflict (id) do update
   set expires_at = greatest(reservations.expires_at, excluded.expires_at)
returning bucket;

-- name: copied_chunks
-- They are copied in order, so the last one says how many there are.
select coalesce(max(seq) + 1, 0) from chunks
 where bucket = $1 and workspace_id = $2 and file_id = $3;

-- name: copy_chunks
-- Nothing refers to the copy yet, so the commit is not synced.
with kept as (
    update reservations set expires_at = greatest(expires_at, clock_timestamp() + $6::interval)
      from (select set_config('synchronous_commit', 'off', true)) as unsynced
     where id = $2
    returning bucket
)
insert into chunks (bucket, workspace_id, file_id, seq, bytes)
select kept.bucket, chunks.workspace_id, chunks.file_id, chunks.seq, chunks.bytes
  from kept, chunks
 where chunks.workspace_id = $1 and chunks.file_id = $2 and chunks.bucket = $3
   and chunks.seq >= $4 and chunks.seq < $5;

-- name: end_move
-- One commit points the row at the copy and ends its reservation.  A row that is locked is left for the
-- next pass, and so is one whose reservation has expired: then nothing has kept the copy.
with upload as (
    select workspace_id, file_id from uploads
     where workspace_id = $1 and file_id = $2 and bucket = $3
       for update skip locked
), held as (
    delete from reservations using upload
     where reservations.id = upload.file_id
    returning reservations.bucket
)
update uploads set bucket = held.bucket from held
 where uploads.workspace_id = $1 and uploads.file_id = $2
returning uploads.size;

-- name: upload_totals
-- One scan of the table: totals by bucket, and by workspace for those with most bytes, acknowledged ones
-- included, and most unfetched ones.  $2 has the starts of the buckets in order; what is older than the first has number 0.
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
           row_number() over (partition by is_bucket order by bytes desc, workspace_id) as place,
           row_number() over (partition by is_bucket order by silent_bytes desc, workspace_id) as silent_place
      from counted
)
select * from placed
 where is_bucket or place <= $3 or (silent_place <= $4 and silent_files > 0)
 order by place;
