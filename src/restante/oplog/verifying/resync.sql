-- name: progress
select phase, records from op_snapshots where peer_id = $1 and table_id = $2;

-- name: failure
select failure from op_peers where id = $1;
