-- name: leaves_of
-- The bounds are read back from the catalogue: it, and not our arithmetic, decides where rows go.
select leaf.relname as name,
       pg_get_expr(leaf.relpartbound, leaf.oid) as bounds
  from pg_inherits
  join pg_class leaf on leaf.oid = pg_inherits.inhrelid
 where pg_inherits.inhparent = to_regclass($1)
   and not pg_inherits.inhdetachpending
 order by leaf.relname;

-- name: take_turns
-- Waited for as long as a statement may run: at a first start the one before may create hundreds.
select pg_advisory_xact_lock(hashtextextended('restante.leaves.' || $1, 0));

-- name: give_up_early
-- Whoever waits for a lock on the parent holds up everyone who comes after.
select set_config('lock_timeout', '2s', true);
