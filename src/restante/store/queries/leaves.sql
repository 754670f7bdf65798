-- name: leaves
-- Every leaf of our tables, and every table that was one and was left over.  Sizes are asked for apart.
-- The bounds are read back from the catalogue: it, and not our arithmetic, decides where rows go.  They
-- are asked for without saying whose they are: otherwise Postgres would wait for whoever has it locked.
select parent.relname as table_name,
       leaf.relname as name,
       case when not pg_inherits.inhdetachpending then pg_get_expr(leaf.relpartbound, 0) end as bounds,
       case when pg_inherits.inhdetachpending then 'detaching'
            -- By a trigger; by a constraint in databases where an older release is at work.
            when exists (select from pg_trigger
                          where tgrelid = leaf.oid and tgname = 'sealed')
              or exists (select from pg_constraint
                          where conrelid = leaf.oid and conname = 'sealed') then 'sealed'
            else 'attached' end as state
  from pg_inherits
  join pg_class parent on parent.oid = pg_inherits.inhparent
  join pg_class leaf on leaf.oid = pg_inherits.inhrelid
 where parent.oid in ('chunks'::regclass, 'feed'::regclass)
union all
select split_part(relname, '_', 1), relname, null, 'detached'
  from pg_class
 where relnamespace = 'restante'::regnamespace
   and relkind = 'r'
   and not relispartition
   and relname ~ '^(chunks|feed)_\d{8}_\d{6}$'
 order by 1, 2;

-- name: take_turns
-- Waited for as long as a statement may run: at a first start the one before may create hundreds.
select pg_advisory_xact_lock(hashtextextended('restante.leaves.' || $1, 0));

-- name: give_up_early
-- Whoever waits for a lock on the parent holds up everyone who comes after.
select set_config('lock_timeout', '2s', true);
