-- name: tables
-- What pg_dump reads.
select namespace.nspname as schema_name, class.relname as table_name
  from pg_class class
  join pg_namespace namespace on namespace.oid = class.relnamespace
 where class.relkind in ('r', 'p')
   and class.relpersistence <> 't'
   and namespace.nspname <> 'information_schema'
   and namespace.nspname not like 'pg\_%';

-- name: limit_lock_waits
set lock_timeout = '10s';

-- name: begin
begin isolation level repeatable read read only;

-- name: rollback
rollback;

-- name: export_snapshot
select pg_export_snapshot();

-- name: counts
select clock_timestamp() as taken_at,
       (select count(*) from workspaces where status = 'active') as workspaces,
       count(*) as files,
       coalesce(sum(size), 0)::bigint as file_bytes
  from uploads;

-- name: other_roles
select rolname from pg_roles where rolname <> current_user and rolname not like 'pg\_%' order by rolname;

-- name: database_bytes
-- About what pg_dump reads: all tables without the chunks.
select coalesce(sum(pg_table_size(class.oid)), 0)::bigint
  from pg_class class
  join pg_namespace namespace on namespace.oid = class.relnamespace
 where class.relkind = 'r'
   and namespace.nspname <> 'information_schema'
   and namespace.nspname not like 'pg\_%'
   and not (namespace.nspname = 'restante' and class.relname like 'chunks\_%');

-- name: chunks_of_uploads
-- Bytes of files that were swept, and of uploads that are still arriving, stay out: nobody can
-- fetch them.
select chunks.bucket, chunks.workspace_id, chunks.file_id, chunks.seq, chunks.bytes
  from chunks
  join uploads using (bucket, workspace_id, file_id)

-- name: load_without_triggers
-- A sealed bucket refuses rows by a trigger, also those that it had when it was sealed.
set session_replication_role = replica;

-- name: incomplete_uploads
-- The length of stored bytes is known without reading them.
select count(*)
  from uploads
 where size is distinct from (
        select sum(octet_length(chunks.bytes))
          from chunks
         where chunks.bucket = uploads.bucket
           and chunks.workspace_id = uploads.workspace_id
           and chunks.file_id = uploads.file_id
       );

-- name: analyze
analyze;

-- name: checkpoint
checkpoint;
