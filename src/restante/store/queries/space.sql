-- name: tables
-- As the filesystem sees them, leaves added to their table, and so is a leaf that was left over.  One
-- that is being detached is not measured: whoever finishes that waits for us, and we would for them.
select coalesce(parent.relname, substring(class.relname from '^(chunks|feed)_\d{8}_\d{6}$'),
                class.relname) as name,
       sum(case when pg_inherits.inhdetachpending then 0
                else pg_total_relation_size(class.oid) end)::bigint as bytes,
       coalesce(sum(pg_stat_get_dead_tuples(class.oid)), 0)::bigint as dead_rows,
       count(*) filter (where parent.oid is not null) as leaves
  from pg_class class
  left join pg_inherits on pg_inherits.inhrelid = class.oid
  left join pg_class parent on parent.oid = pg_inherits.inhparent
 where class.relnamespace = 'restante'::regnamespace and class.relkind = 'r'
 group by 1
 order by bytes desc;

-- name: live_bytes
select coalesce(sum(size), 0)::bigint from uploads;

-- name: upload_states
-- Never fetched and fetched come from the unacknowledged index, the acknowledged from theirs.
select count(*) filter (where acked_at is null and expires_at > $1 and fetched_at is null) as never_fetched,
       count(*) filter (where acked_at is null and expires_at > $1 and fetched_at is not null) as fetched,
       count(*) filter (where acked_at is not null) as acked,
       count(*) filter (where acked_at is null and expires_at <= $1) as expired
  from uploads;

-- name: states_by_workspace
select workspace_id,
       count(*) filter (where acked_at is null and expires_at > $1 and fetched_at is null) as never_fetched,
       count(*) filter (where acked_at is null and expires_at > $1 and fetched_at is not null) as fetched,
       count(*) filter (where acked_at is not null) as acked,
       count(*) filter (where acked_at is null and expires_at <= $1) as expired,
       coalesce(sum(size) filter (where acked_at is null), 0)::bigint as waiting_bytes,
       min(created_at) filter (where acked_at is null) as waiting_since
  from uploads
 group by workspace_id
 order by waiting_bytes desc, workspace_id
 limit $2;

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

-- name: silent_workspaces
-- Files that nobody has fetched for an hour, by the workspace they wait for.
select workspace_id, count(*) as files, sum(size)::bigint as bytes,
       extract(epoch from $1 - min(created_at))::float as seconds, max(expires_at) as until
  from uploads
 where acked_at is null and fetched_at is null and created_at < $1::timestamptz - interval '1 hour'
 group by workspace_id
 order by bytes desc, workspace_id
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

-- name: lead
-- The end of the last leaf of each table says how far ahead of the clock they reach.
select parent.relname as table_name, pg_get_expr(leaf.relpartbound, leaf.oid) as bounds
  from pg_inherits
  join pg_class parent on parent.oid = pg_inherits.inhparent
  join pg_class leaf on leaf.oid = pg_inherits.inhrelid
 where parent.oid in ('chunks'::regclass, 'feed'::regclass)
   and not pg_inherits.inhdetachpending;

-- name: data_directory
-- Only of a server on this machine: the same path elsewhere would tell of another disk.
select setting from pg_settings
 where name = 'data_directory'
   and (inet_server_addr() is null or inet_server_addr() <<= '127.0.0.0/8' or inet_server_addr() = '::1');
