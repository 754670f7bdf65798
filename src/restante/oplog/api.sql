-- name: next_ulid
select restante.op_ulid(restante.op_tick(1), right(replace(gen_random_uuid()::text, '-', ''), 16));

-- name: insert
insert into {relation} ({columns}) overriding system value
select {columns} from json_populate_recordset(null::{relation}, $1::json);

-- name: update
update {relation} as t set {changes}
  from json_populate_recordset(null::{relation}, $1::json) as r
 where {same_key};

-- name: delete
delete from {relation} as t
 using json_populate_recordset(null::{relation}, $1::json) as r
 where {same_key};
