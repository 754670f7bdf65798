"""
Remembers every op that was ever logged on a node, whatever becomes of the log.

So it can be told in the end whether a change was lost, or a record came back, without a report.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import asyncpg
from oplog.served_nodes import Key, Node, Version, key_of

# In the transaction that logs the op; a copy of what stays of a partition is not seen.
_WATCH = """
create table public.witnessed (
    name text, key text, ulid text, host text, is_delete boolean, approximate boolean, data text,
    primary key (name, key, ulid, host)
);
create function public.witness() returns trigger language plpgsql as $$
begin
    insert into public.witnessed
    select t.name, new.key, new.ulid::text, h.host, new.action = 'd', new.approximate,
           new.data::text
      from restante.op_tables as t, restante.op_hosts as h
     where t.id = new.table_id and h.id = new.origin
        on conflict do nothing;
    return null;
end
$$;
create trigger witness after insert on restante.ops
   for each row execute function public.witness();
"""


class Change(NamedTuple):
    """What an op has made of a record; None: it was deleted."""

    version: Version
    record: Any


@dataclass(frozen=True, slots=True)
class Testimony:
    """What was ever logged on a node, and which losses it reports."""

    changes: dict[Key, list[Change]]  # without those whose version says only "not newer"
    bodies: set[str]
    lost: dict[Key, list[Change]]
    ops: int
    dropped_ops: int


async def watch(node: Node) -> None:
    """From now on, every op is remembered."""
    connection = await node.connect()
    await connection.execute(_WATCH)
    await connection.close()


async def testimony(node: Node) -> Testimony:
    connection = await node.connect()
    try:
        return await _testimony(connection)
    finally:
        await connection.close()


async def _testimony(connection: asyncpg.Connection) -> Testimony:
    seen = await connection.fetch("select * from public.witnessed")
    kept = await connection.fetchval("select count(*) from restante.ops")
    lost = await connection.fetch(
        "select table_name, key, lost_ulid::text as ulid, lost_origin, lost::text as lost"
        " from restante.op_conflicts"
    )
    changes, reported = defaultdict[Key, list[Change]](list), defaultdict[Key, list[Change]](list)
    for row in seen:
        if not row["approximate"]:
            record = None if row["is_delete"] else json.loads(row["data"])
            version = Version(row["ulid"], row["host"])
            changes[key_of(row["name"], row["key"])].append(Change(version, record))
    for row in lost:
        version = Version(row["ulid"], row["lost_origin"])
        record = json.loads(row["lost"] or "{}")
        reported[key_of(row["table_name"], row["key"])].append(Change(version, record))
    bodies = {json.loads(row["data"]).get("body") for row in seen if not row["is_delete"]}
    return Testimony(changes, bodies, reported, len(seen), len(seen) - kept)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is gone without a reason, and how often the newest change of a record was reported."""

    sentences: list[str]
    reported: int


async def judged(nodes: Sequence[Node]) -> Verdict:
    """
    Look for changes that are gone although nothing newer was made, and nobody reports it.

    A delete that is gone is a record that has come back.
    """
    found = {node: await testimony(node) for node in nodes}
    rows, reported = await nodes[0].rows(), 0
    lines = [
        f"{node.name} never logged {value[:30]}"
        for node, its in found.items()
        for value in node.acked
        if value not in its.bodies
    ]
    for key in {key for its in found.values() for key in its.changes}:
        changes = [change for its in found.values() for change in its.changes.get(key, [])]
        last = max(changes, key=lambda change: change.version)
        lost = [change for its in found.values() for change in its.lost.get(key, [])]
        if rows.get(key) == last.record:
            continue
        if any(_reports(one, last) for one in lost):
            reported += 1
        else:
            lines.append(f"{key} is {rows.get(key)}, and the last change was {last}; lost {lost}")
    return Verdict(lines, reported)


def _reports(lost: Change, change: Change) -> bool:
    """Under its version; or, if its op was dropped, under one that is not older."""
    is_same = lost.record == change.record
    return lost.version == change.version or (is_same and lost.version.ulid >= change.version.ulid)
