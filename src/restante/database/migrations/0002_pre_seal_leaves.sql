-- Why:   a leaf is sealed by a trigger, which takes a lock that readers do not notice; a constraint, as before,
--        takes one that they queue behind.
-- Works with: 0001 code, which seals with a constraint and takes the trigger's refusal for that constraint's.

create function refuse_rows() returns trigger language plpgsql as $$
begin
    raise exception 'leaf "%" is "sealed"', tg_table_name
        using errcode = 'check_violation', constraint = 'sealed';
end
$$;
