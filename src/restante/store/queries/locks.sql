-- name: try_lock
select pg_try_advisory_lock(hashtextextended('restante.' || $1, 0));

-- name: unlock
select pg_advisory_unlock(hashtextextended('restante.' || $1, 0));
