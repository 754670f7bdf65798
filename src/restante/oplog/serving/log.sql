-- name: plan_once
select set_config('plan_cache_mode', 'force_generic_plan', true);

-- name: horizon
-- Every transaction below `xid` has ended, and every one of an older era: but a prepared transaction
-- survives a restart, and then its era is not complete either.
select op_current_era() as era,
       op_horizon() as xid,
       (select (extract(epoch from min(prepared)) * 1000000)::bigint
          from pg_prepared_xacts where database = current_database()) as prepared;

-- name: era_at
select era from ops where era <= $1 order by era desc limit 1;

-- name: clock
-- A sequence changes at once, before its transaction commits.
select last_value as clock,
       op_horizon() as oldest_xid
  from op_clock;

-- name: new_xid
-- Above every transaction that has begun to write.  The end of a snapshot is not: it is the one after the
-- last that has ended, and younger ones may be open.
select pg_current_xact_id()::text::bigint;

-- name: marks
select id, name, key_map, floor, trimmed, taken_snapshot from op_tables order by name;

-- name: window
-- The next records, with their data as long as all of them together fit into $8 bytes, and the first
-- one that does not.  Only what is compressed must be read to know its size.
with looked_at as (
    select table_id, era, xid, ulid, n, origin, action, approximate, data,
           case when pg_column_compression(data) is null then pg_column_size(data)
                else octet_length(data::text) end as size
      from ops
     where table_id in (visible)
       and (era, xid, ulid, n) > ($1, $2, $3, $4)
       and (era, xid) < ($5, $6)
     order by era, xid, ulid, n
     limit $7
), summed as (
    select *, sum(size) over (order by era, xid, ulid, n rows unbounded preceding) as total
      from looked_at
)
select table_id, era, xid, ulid, n, action::text as action, approximate, size,
       (select host from op_hosts where id = origin) as host,
       case when total <= $8 then data end as data
  from summed
 where total - size <= $8
 order by era, xid, ulid, n;

-- name: outdated
-- The records of a part of the log, up to a ULID, that are not the newest of their keys.
select era, xid, ulid, n
  from ops as old
 where table_id in (visible)
   and (era, xid, ulid, n) > ($1, $2, $3, $4)
   and (era, xid, ulid, n) <= ($5, $6, $7, $8)
   and ulid <= $9
   and exists (
       select from ops as newer
        where newer.table_id = old.table_id
          and newer.key_hash = old.key_hash
          and newer.key = old.key
          and (newer.ulid > old.ulid or newer.ulid = old.ulid
               and (select host from op_hosts where id = newer.origin)
                 > (select host from op_hosts where id = old.origin))
   );

-- name: page_end
-- How many of the next records fit into a page, and where it can end: after the last record of a ULID,
-- because some readers know nothing finer.  One record more is looked at, to see where a ULID ends.
with looked_at as (
    select era, xid, ulid, n, table_id, origin, action, approximate,
           case when pg_column_compression(data) is null then pg_column_size(data)
                else octet_length(data::text) end as size
      from ops
     where table_id in (visible)
       and (era, xid, ulid, n) > ($1, $2, $3, $4)
       and (era, xid) < ($5, $6)
     order by era, xid, ulid, n
     limit $7 + 1
), flagged as (
    select era, xid, ulid, n, size,
           lag(xid) over arrival is distinct from xid
           or lag(ulid) over arrival is distinct from ulid
           or lag(action) over arrival is distinct from action
           or lag(table_id) over arrival is distinct from table_id
           or lag(origin) over arrival is distinct from origin
           or lag(approximate) over arrival is distinct from approximate as starts_op,
           lead(xid) over arrival is distinct from xid
           or lead(ulid) over arrival is distinct from ulid as ends_ulid
      from looked_at
    window arrival as (order by era, xid, ulid, n)
), summed as (
    select era, xid, ulid, n, ends_ulid,
           row_number() over arrival as number,
           sum(size + case when starts_op then $10::int else $11::int end) over arrival as bytes,
           count(*) filter (where starts_op) over arrival as ops
      from flagged
    window arrival as (order by era, xid, ulid, n rows unbounded preceding)
), ends as (
    select count(*) as looked_at,
           max(number) filter (where number <= $7 and bytes <= $8 and ops <= $9) as fitting,
           max(number) filter (where number <= $7 and bytes <= $8 and ops <= $9 and ends_ulid)
               as whole
      from summed
)
select ends.looked_at, ends.fitting, ends.whole, one.number, one.era, one.xid, one.ulid, one.n,
       one.bytes, one.ops
  from ends join summed as one on one.number in (1, ends.fitting, ends.whole);

-- name: last_before
select era, xid, ulid, n, approximate, arrived_at,
       exists (select from ops
                where (era, xid, ulid, n) = (last.era, last.xid, last.ulid, 0)) as has_first
  from (
    select era, xid, ulid, n, approximate, arrived_at
      from ops
     where (era, xid) < ($1, $2)
     order by era desc, xid desc, ulid desc, n desc
     limit 1
  ) as last;

-- name: op_start
-- The first record, after a position, of the op that a record belongs to.
select n, approximate
  from (
    select n, approximate,
           lag(action) over arrival is distinct from action
           or lag(table_id) over arrival is distinct from table_id
           or lag(origin) over arrival is distinct from origin
           or lag(approximate) over arrival is distinct from approximate as starts_op
      from ops
     where table_id in (visible)
       and (era, xid, ulid, n) > ($1, $2, $3, $4)
       and (era, xid, ulid) = ($5, $6, $7)
       and n <= $8
    window arrival as (order by n)
  ) as records
 where starts_op
 order by n desc
 limit 1;

-- name: previous
select era, xid, ulid, n
  from ops
 where (era, xid, ulid, n) < ($1, $2, $3, $4)
 order by era desc, xid desc, ulid desc, n desc
 limit 1;

-- name: first_of_ulid
-- The op itself rather than a part of it that arrived later, if both are there.
select era, xid, ulid, n
  from ops
 where ulid = $1
   and (era, xid) < ($2, $3)
 order by n > 0 or approximate, era, xid, n
 limit 1;

-- name: last_of_ulid
select n
  from ops
 where (era, xid, ulid) = ($1, $2, $3)
 order by n desc
 limit 1;

-- name: first_from
select era, xid, ulid, n, arrived_at
  from ops
 where (era, xid) >= ($1, $2)
   and (era, xid) < ($3, $4)
 order by era, xid, ulid, n
 limit 1;

-- name: lowest_ulid
select ulid from ops where table_id in (visible) order by ulid limit 1;
