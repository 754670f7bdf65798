"""
The statements on a tracked table, built from its names.

Names are quoted, and types are written as the catalogue writes them; values are parameters.  The
first parameter of each is a JSON array of records.
"""
# ruff: noqa: S608 - the names come from the catalogue, and are quoted

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from restante.database import sql
from restante.oplog.tables import Column, TrackedTable


@dataclass(frozen=True, slots=True)
class Target:
    """What the statements of a table depend on."""

    relation: str
    log: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]


def target_of(table: TrackedTable) -> Target:
    """The part of a table that its statements depend on."""
    return Target(table.relation, table.log, table.key_columns, table.columns)


@dataclass(frozen=True, slots=True)
class KeyStatements:
    """The statements of one table that do not depend on the columns of a record."""

    lock: tuple[str, str]  # for updates, and for deletes
    facts: str
    delete: str


@lru_cache(maxsize=1000)
def of_keys(target: Target) -> KeyStatements:
    """
    Keys are renamed to k0, k1, ... so that no name of a column can be mistaken for one of ours.

    Each look-up is written as a subquery per key, so that it uses the index of the key whatever
    the statistics of a table that has just grown.
    """
    keys = [column for name in target.key for column in target.columns if column.name == name]
    incoming = _incoming(keys)
    ks = [f"k{i}" for i in range(len(keys))]
    names = ", ".join(ks)
    matches = " and ".join(f"t.{sql.quoted(c.name)} = r.k{i}" for i, c in enumerate(keys))
    order = ", ".join(f"t.{sql.quoted(column.name)}" for column in keys)
    lock = (
        f"select count(*) from (select from {incoming} as r ({names}, at)"
        f" join {target.relation} as t on {matches} order by {order} for"
    )
    r_names = ", ".join(f"r.{k}" for k in ks)
    return KeyStatements(
        lock=(f"{lock} no key update of t) as locked", f"{lock} update of t) as locked"),
        facts=f"""
            with r as materialized (
                select r.*, keys.key, hashtextextended(keys.key, 0) as key_hash
                  from {incoming} as r ({names}, at)
                 cross join lateral (select json_build_array({r_names})::text as key) as keys
            )
            select r.at, r.key, r.key_hash, newest.*,
                   exists (select from {target.relation} as t where {matches}) as has_record
              from r
              left join lateral (
                select ops.ulid, op_hosts.host, ops.action = 'd', ops.approximate
                  from restante.{sql.quoted(target.log)} as ops
                  join restante.op_hosts on op_hosts.id = ops.origin
                 where ops.key_hash = r.key_hash and ops.key = r.key
                 order by ops.ulid desc
                 fetch first 1 row with ties
              ) as newest on true""",
        delete=f"delete from {target.relation} as t using {incoming} as r ({names}, at)"
        f" where {matches}",
    )


def _incoming(columns: Sequence[Column]) -> str:
    """The given records as rows, numbered from 1."""
    return f"rows from (json_to_recordset($1::json) as ({_definitions(columns)})) with ordinality"


def _definitions(columns: Sequence[Column]) -> str:
    return ", ".join(f"{sql.quoted(column.name)} {column.type}" for column in columns)


@lru_cache(maxsize=1000)
def insert(target: Target, names: frozenset[str]) -> str:
    """Insert records that have these columns, unless one has the key already."""
    columns = [c for c in target.columns if c.name in names and not c.is_generated]
    quoted = [sql.quoted(column.name) for column in columns]
    return (
        f"insert into {target.relation} ({', '.join(quoted)}) overriding system value"
        f" select {', '.join(f'r.{name}' for name in quoted)}"
        f" from json_to_recordset($1::json) as r({_definitions(columns)})"
        f" on conflict ({', '.join(map(sql.quoted, target.key))}) do nothing"
    )


@lru_cache(maxsize=1000)
def create(target: Target, names: frozenset[str]) -> str:
    """
    Insert and log records that have these columns, if the log has no op of their keys.

    Returns how many were inserted; null, and nothing was done, if the log has an op with the hash
    of one of the keys.  A key that the table has is an error of Postgres: ON CONFLICT would cost
    a tenth more.
    """
    columns = [
        c
        for c in target.columns
        if c.name in names and (not c.is_generated or c.name in target.key)
    ]
    numbers = {column.name: f"c{i}" for i, column in enumerate(columns)}
    written = [column.name for column in columns if not column.is_generated]
    keys = ", ".join(f"r.{numbers[name]}" for name in target.key)
    log = f"restante.{sql.quoted(target.log)}"
    return f"""
        with r as materialized (
            select r.*, keys.key, hashtextextended(keys.key, 0) as key_hash
              from rows from (
                json_to_recordset($1::json) as ({_definitions(columns)}),
                json_array_elements($1::json),
                unnest(string_to_array($2, ',')::integer[], string_to_array($3, ',')::integer[])
              ) as r ({", ".join(numbers.values())}, data, op, n)
             cross join lateral (select json_build_array({keys})::text as key) as keys
        ), known as materialized (
            -- In the order of the index, so that it is used whatever the statistics say.
            select exists (
                select from (
                    select from {log} as ops
                     where ops.key_hash = any (array(select r.key_hash from r))
                     order by ops.key_hash, ops.ulid
                     limit 1
                ) as op
            ) as is_any
        ), written as (
            insert into {target.relation} ({", ".join(map(sql.quoted, written))})
            overriding system value
            select {", ".join(f"r.{numbers[name]}" for name in written)}
              from r
             where not (select is_any from known)
            returning 1
        ), logged as (
            insert into {log} (
                table_id, arrived_at, era, xid, ulid, n, origin, action, approximate,
                key_hash, old_hash, key, data
            )
            select $4, arrival.at, arrival.era, arrival.xid,
                   ($5::uuid[])[r.op], r.n, ($6::integer[])[r.op], 'c', ($7::boolean[])[r.op],
                   r.key_hash, null, r.key, r.data
              from r
             cross join (
                select clock_timestamp() as at,
                       restante.op_current_era() as era,
                       pg_current_xact_id()::text::bigint as xid
                offset 0
              ) as arrival
             where not (select is_any from known)
        )
        select case when not is_any then (select count(*) from written) end from known"""


@lru_cache(maxsize=1000)
def update(target: Target, names: frozenset[str]) -> str | None:
    """Set these columns of records that exist; None if there is nothing to set but the key."""
    columns = [c for c in target.columns if c.name in names and not c.is_generated]
    changed = [c for c in columns if c.name not in target.key and not c.is_identity]
    if not changed:
        return None
    assignments = ", ".join(f"{name} = r.{name}" for name in (sql.quoted(c.name) for c in changed))
    matches = " and ".join(f"t.{name} = r.{name}" for name in map(sql.quoted, target.key))
    return (
        f"update {target.relation} as t set {assignments}"
        f" from json_to_recordset($1::json) as r({_definitions(columns)}) where {matches}"
    )
