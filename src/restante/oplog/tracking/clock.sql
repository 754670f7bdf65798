-- name: restart
-- Those that are ahead of the wall clock, if no table is tracked.
with now as (
    select (extract(epoch from clock_timestamp()) * 1000000)::bigint as microseconds
), clock as (
    select relname,
           case when relname = 'op_era' then microseconds else (microseconds / 1000) << 15 end as value
      from pg_class, now
     where relnamespace = 'restante'::regnamespace
       and relkind = 'S'
       and relname in ('op_clock', 'op_clock_mark', 'op_era')
)
select relname, setval(('restante.' || relname)::regclass, value)
  from clock
 where pg_sequence_last_value(('restante.' || relname)::regclass) > value
   and not exists (select from restante.op_tables);
