"""
The text of the triggers that capture changes.  Pure.

A tracked table has a function of its own, so that Postgres caches its plans, and triggers for
INSERT, UPDATE, DELETE and TRUNCATE, on each of its partitions too.  The function runs with our
rights: the writer needs none on our schema.  It has a fast path, without a join, for what nearly
every statement does, and leaves the rest to `op_capture_statements`.
"""

from collections.abc import Sequence
from string import Template

from restante.database import sql
from restante.oplog.tracking.trackable import Facts

queries = sql.load("restante.oplog.tracking", "triggers")

# Postgres fires triggers in the order of their names.  What other triggers did before is noticed.
NAMES = ("restante_insert", "restante_update", "restante_delete", "restante_truncate")

# An op has at most so many records; a longer statement makes several.
RECORDS_PER_OP = 500

_MAX_FAST_RECORDS = 1_000_000  # their hashes are in memory

# Values have one text form, whatever the writer's settings.
SETTINGS = {
    "search_path": "pg_catalog, pg_temp",
    "timezone": "'UTC'",
    "datestyle": "'ISO'",
    "intervalstyle": "'postgres'",
    "extra_float_digits": "1",
    "bytea_output": "'hex'",
    "lc_monetary": "'C'",
}

_BODY = Template(queries.capture)
_COLUMNS = "table_id, arrived_at, era, xid, ulid, n, origin, action, key_hash, old_hash, key, data"


def function_name(table_id: int) -> str:
    """The function that captures the changes of a table."""
    return f"restante.op_capture_{table_id}"


def function(table_id: int, facts: Facts) -> str:
    """The statement that creates or replaces it, for the table as it is now."""
    keys = facts.key_columns or ()
    old_hash = (
        "hash_record_extended(o.*, 0)"
        if facts.has_hash
        else "hashtextextended(cast((o.*) as text), 0)"
    )
    body = _BODY.substitute(
        id=table_id,
        batch=RECORDS_PER_OP,
        batch_less_1=RECORDS_PER_OP - 1,
        max_fast=_MAX_FAST_RECORDS,
        relation=facts.oid,
        shape=f"({facts.shape})",
        columns=_COLUMNS,
        new_key=_key("n", keys),
        old_key=_key("o", keys),
        old_key_object=_key_object("o", keys),
        same_key=_same_key(keys, is_exact=facts.is_key_exact),
        new_key_lists=_key_lists("n", keys, is_exact=facts.is_key_exact),
        old_key_lists=_key_lists("o", keys, is_exact=facts.is_key_exact),
        old_hash=old_hash,
    )
    settings = "\n".join(f"set {name} = {value}" for name, value in SETTINGS.items())
    return (
        f"create or replace function {function_name(table_id)}() returns trigger\n"
        f"language plpgsql security definer\n{settings}\nas {_literal(body)}"
    )


def install(table_id: int, relation: str) -> list[str]:
    """The statements that create or replace the triggers of a table or partition."""
    call = f"execute function {function_name(table_id)}()"
    new, old = "new table as new_rows", "old table as old_rows"
    creations = (
        f"after insert on {relation} referencing {new} for each statement {call}",
        f"after update on {relation} referencing {old} {new} for each statement {call}",
        f"after delete on {relation} referencing {old} for each statement {call}",
        f"before truncate on {relation} execute function restante.op_refuse_truncate()",
    )
    return [
        *(
            f"create or replace trigger {name} {creation}"
            for name, creation in zip(NAMES, creations, strict=True)
        ),
        # Also for a session that is a replica of something else: its changes are news to our peers.
        switch(relation, "enable always"),
    ]


def switch(relation: str, how: str) -> str:
    """The statement that enables or disables all of them."""
    return f"alter table {relation} {', '.join(f'{how} trigger {name}' for name in NAMES)}"


def removal(relation: str) -> list[str]:
    """The statements that drop the triggers of a table or partition, those that it has."""
    return [f"drop trigger if exists {name} on {relation}" for name in NAMES]


def _key(row: str, keys: Sequence[str]) -> str:
    return f"json_build_array({', '.join(f'{row}.{sql.quoted(key)}' for key in keys)})::text"


def _same_key(keys: Sequence[str], *, is_exact: bool) -> str:
    """Whether a record has kept its key; its text, if equal values may have different ones."""
    if not is_exact:
        return f"{_key('n', keys)} = {_key('o', keys)}"
    return " and ".join(f"n.{name} = o.{name}" for name in map(sql.quoted, keys))


def _key_lists(row: str, keys: Sequence[str], *, is_exact: bool) -> str:
    """All keys of a statement, to compare; their texts, if equal values may have different ones."""
    if not is_exact:
        return f"array_agg({_key(row, keys)})"
    return ", ".join(f"array_agg({row}.{sql.quoted(key)})" for key in keys)


def _key_object(row: str, keys: Sequence[str]) -> str:
    parts = (f"{_literal(key)}, {row}.{sql.quoted(key)}" for key in keys)
    return f"json_build_object({', '.join(parts)})"


def _literal(text: str) -> str:
    """A string, also for a session that has standard_conforming_strings off."""
    return "E'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
