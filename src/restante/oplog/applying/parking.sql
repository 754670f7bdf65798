-- name: is_full
-- Whether a peer has its share of the room for all ($2): half of what others have left, but not more than $3,
-- and $4 in any case.  It is only computed when the table is large; deleted rows may still take space in it.
select case
    when pg_total_relation_size('restante.op_parked') < least($2::bigint, $3::bigint) then false
    else (select coalesce(sum(size) filter (where peer_id = $1), 0)
                 >= greatest($4::bigint,
                             least($3, ($2 - coalesce(sum(size) filter (where peer_id <> $1), 0)) / 2))
            from (select peer_id, pg_column_size(data) + 300 as size from restante.op_parked) as one)
end;

-- name: park
insert into restante.op_parked (
    peer_id, table_name, ulid, origin, action, approximate, key_hash, key, reason, sentence,
    data, data_hash, parked_at, tried_at
)
select $1, new.table_name, new.ulid, new.origin, new.action::"char", new.approximate,
       new.key_hash, new.key, new.reason, new.sentence,
       new.data, hashtextextended(new.data::text, 0), $2, $2
  from rows from (
    unnest($3::text[], $4::uuid[], $5::text[], $6::text[], $7::boolean[], $8::bigint[], $9::text[],
           $10::text[], $11::text[]),
    json_array_elements($12::json)
  ) as new (table_name, ulid, origin, action, approximate, key_hash, key, reason, sentence, data)
    on conflict (table_name, ulid, origin, data_hash) do update
   set reason = excluded.reason, sentence = excluded.sentence;
