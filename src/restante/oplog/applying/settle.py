"""
Looks again at deletes that found no record.

A transaction that was open at that moment may have inserted the record, under an older version, or
applied an older op of the same key.  Nobody could see it then, and after its commit the record
would be there although the newest op of its key is a delete.  Once every transaction of that time
is over, such a record is removed.
"""

from restante.database import sql
from restante.database.pool import Database, Tx
from restante.oplog import tables
from restante.oplog.applying import records
from restante.oplog.tables import TrackedTable

queries = sql.load("restante.oplog.applying", "settle")

_BATCH = 1000


async def settle(db: Database) -> int:
    """
    One pass over the noted deletes; returns how many records were removed.

    A delete that is seen for the first time is committed: from now on every new transaction knows
    of it, and it waits for those that are open.
    """
    async with db.connection() as connection:
        if not await connection.fetchval(queries.is_any):
            return 0
        await connection.execute(queries.mark)
        tracked = await tables.all_tables(connection)
        await connection.execute(queries.forget_untracked)
    removed = 0
    for table in tracked:
        if not table.is_missing:
            removed += await _settle_table(db, table)
    return removed


async def _settle_table(db: Database, table: TrackedTable) -> int:
    removed = 0
    while True:
        async with db.transaction() as tx:
            rows = await tx.fetch(queries.take_due, table.id, _BATCH)
            if rows:
                removed += await _remove_revived(tx, table, [row["data"] for row in rows])
        if len(rows) < _BATCH:
            return removed


async def _remove_revived(tx: Tx, table: TrackedTable, keys: list[str]) -> int:
    await records.begin(tx, [table])
    await records.lock(tx, table, keys, for_delete=True)
    facts = await records.facts(tx, table, keys)
    revived = [
        key
        for key, fact in zip(keys, facts, strict=True)
        if fact.has_record and fact.newest is not None and fact.newest.is_delete
    ]
    await records.delete(tx, table, revived)
    return len(revived)
