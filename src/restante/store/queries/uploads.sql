-- name: put_chunks
-- Invisible so far: nothing points at these bytes.  The commit is not waited for; the one that
-- publishes them syncs the log up to and including them.
insert into chunks (bucket, workspace_id, file_id, seq, bytes)
select $1, $2, piece.file_id, piece.seq, piece.bytes
  from unnest($3::uuid[], $4::int[], $5::bytea[]) as piece (file_id, seq, bytes),
       (select set_config('synchronous_commit', 'off', true)) as unsynced;

-- name: publish
-- All or nothing: the counter, the files, their feed rows, the last bytes and the remembered answer
-- are one statement, so a small request is one round trip.  No row comes back, and nothing is
-- stored, when there is no room or when the key was used before.  (A key that is new and has no room
-- would be remembered all the same: whoever sends a key wraps this in a transaction.)
with remembered as (
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
           reserved_bytes = reserved_bytes - coalesce((select bytes from promised), 0)
     where workspace_id = $1
       and ($2::text is null or exists (select from remembered))
       and ($6::uuid is null or exists (select from promised))
       and waiting_bytes + reserved_bytes - coalesce((select bytes from promised), 0) + $8 <= $9
       and waiting_files + reserved_files - coalesce((select files from promised), 0) + $7 <= $10
    returning last_seq
), freed as (
    delete from reservations using room where id = $6
), stored as (
    insert into uploads (workspace_id, file_id, bucket, name, mimetype, size, sha256,
                         created_at, expires_at)
    select $1, file.id, $11, file.name, file.mimetype, file.size, file.sha256, $12, $13
      from room, unnest($14::uuid[], $15::text[], $16::text[], $17::bigint[], $18::bytea[])
              as file (id, name, mimetype, size, sha256)
), kept as (
    insert into chunks (bucket, workspace_id, file_id, seq, bytes)
    select $11, $1, piece.file_id, piece.seq, piece.bytes
      from room, unnest($19::uuid[], $20::int[], $21::bytea[]) as piece (file_id, seq, bytes)
), announced as (
    insert into feed (id, workspace_id, seq, activity_type, target_id, method, summary,
                      request_body, status, created_at)
    select line.id, $1, room.last_seq - $7 + line.number, $22, $1, $23, line.summary,
           line.body, $24, $12
      from room, unnest($25::uuid[], $26::text[], $27::json[])
              with ordinality as line (id, summary, body, number)
)
select last_seq from room;

-- name: remembered_answer
select fingerprint, answer from answers
 where workspace_id = $1 and idempotency_key = $2 and expires_at > $3;

-- name: get_upload
-- Absent, acknowledged, expired and somebody else's are one answer.
select workspace_id, file_id, bucket, name, mimetype, size, sha256,
       created_at, fetched_at, acked_at, expires_at
  from uploads
 where workspace_id = $1 and file_id = $2 and acked_at is null and expires_at > $3;

-- name: waiting_uploads
select workspace_id, file_id, bucket, name, mimetype, size, sha256,
       created_at, fetched_at, acked_at, expires_at
  from uploads
 where workspace_id = $1 and acked_at is null and expires_at > $2
   and (created_at, file_id) > ($3, $4)
 order by created_at, file_id
 limit $5;

-- name: created_at
-- In any state: a reader of the list may have acknowledged the file that its page ended with.
select created_at from uploads where workspace_id = $1 and file_id = $2;

-- name: read_chunks
select seq, bytes from chunks
 where bucket = $1 and workspace_id = $2 and file_id = $3 and seq between $4 and $5
 order by seq;

-- name: mark_fetched
-- Best effort, so its commit is not waited for.
update uploads set fetched_at = $3
  from (select set_config('synchronous_commit', 'off', true)) as unsynced
 where workspace_id = $1 and file_id = $2 and acked_at is null and expires_at > $3;

-- name: find_upload
-- In any state but expired: whether there is something to acknowledge.
select true from uploads
 where workspace_id = $1 and file_id = $2 and (acked_at is not null or expires_at > $3);

-- name: acknowledge
-- One statement, so that a retry cannot fall between a check and a write.  The first time stays; only
-- the first gives the room back.
with before as (
    select acked_at, name, size from uploads
     where workspace_id = $1 and file_id = $2 and (acked_at is not null or expires_at > $3)
       for update
), acked as (
    update uploads set acked_at = $3
      from before
     where workspace_id = $1 and file_id = $2 and before.acked_at is null
    returning uploads.size
), given_back as (
    update feeds
       set waiting_bytes = waiting_bytes - acked.size, waiting_files = waiting_files - 1
      from acked
     where workspace_id = $1
)
select exists (select from acked) as first_time, name, size from before;

-- name: reopen
-- A workspace that acknowledged a file and then lost it: the file waits again, takes its room again,
-- and is announced again, so that whoever follows the feed fetches it.
with reopened as (
    update uploads
       set acked_at = null, fetched_at = null, expires_at = greatest(expires_at, $4)
     where workspace_id = $1 and file_id = $2 and acked_at >= $3
    returning size, name
), counter as (
    update feeds
       set last_seq = last_seq + 1,
           waiting_bytes = waiting_bytes + reopened.size, waiting_files = waiting_files + 1
      from reopened
     where workspace_id = $1
    returning last_seq
), announced as (
    insert into feed (id, workspace_id, seq, activity_type, target_id, method, summary,
                      request_body, status, created_at)
    select $5, $1, counter.last_seq, announcement.activity_type, $1, announcement.method,
           announcement.summary, announcement.body, announcement.status, $6
      from counter, (values ($7, $8, $9, $10::json, $11))
                        as announcement (activity_type, method, summary, body, status)
)
select size, name from reopened;

-- name: get_acked
select workspace_id, file_id, bucket, name, mimetype, size, sha256,
       created_at, fetched_at, acked_at, expires_at
  from uploads
 where workspace_id = $1 and file_id = $2 and acked_at is not null;

-- name: expire
-- Whoever holds the row is waited for, so an acknowledgement comes before or after this.  Its room is
-- given back by the sweep, as for every upload that expires.
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
select exists (select from expired) as first_time, acked_at, least(expires_at, $3) as expired_at,
       name, size
  from before;

-- name: standing
-- For the operator, who asks seldom: an index that begins with the file would cost every upload, and
-- without one the million uploads that may wait are looked through in half a second.
select workspace_id, file_id, bucket, name, mimetype, size, sha256,
       created_at, fetched_at, acked_at, expires_at, state
  from (select *,
               case when acked_at is not null then 'acked'
                    when expires_at <= $1 then 'expired'
                    when fetched_at is not null then 'fetched'
                    else 'never_fetched'
               end as state
          from uploads) as standing
 where ($2::uuid is null or workspace_id = $2)
   and ($3::uuid is null or file_id = $3)
   and ($4::text is null or state = $4)
   and (created_at, file_id) > ($5, $6)
 order by created_at, file_id
 limit $7;

-- name: leaf_of
-- Where the first of its bytes are; none if they are gone.
select tableoid::regclass::text from chunks
 where bucket = $1 and workspace_id = $2 and file_id = $3 and seq = 0;

-- name: sweep
-- Bounded: a backlog of millions must not hold locks for minutes.  A row that somebody holds is left
-- for the next pass, and so are the expired files of a workspace whose counters somebody holds: they
-- could not give their room back.  Nothing is waited for, so two sweepers cannot wait for each other.
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
), unclaimed as (
    select workspace_id, sum(size) as bytes, count(*) as files
      from gone where not was_acked group by workspace_id
), given_back as (
    update feeds
       set waiting_bytes = waiting_bytes - unclaimed.bytes,
           waiting_files = waiting_files - unclaimed.files
      from unclaimed
     where feeds.workspace_id = unclaimed.workspace_id
)
select count(*) filter (where was_acked) as acked, count(*) filter (where not was_acked) as expired
  from gone;
