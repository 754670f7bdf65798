"""
Drops the logs of tables that are not tracked any more.

A log is a partition of `ops`, which every writer of every tracked table uses.  So it is detached
concurrently, which blocks none of them, but waits for those that are under way.  Where it stops,
the next pass goes on.  A sweep may be at work on parts of the same logs, so it has to end first.
"""

from restante.database import locks, partitions
from restante.database.partitions import LOCK_TIMEOUT_MILLISECONDS, Partition, PartitionState
from restante.database.pool import Connection, Database
from restante.oplog.tracking import relations


async def drop(db: Database) -> None:
    """Drop them all; raises TableBusy if a transaction stays open that has used the op log."""
    async with db.connection() as connection:
        if not await relations.leftover_logs(connection):
            return
    async with (
        db.session() as connection,
        locks.held_if_free(connection, "oplog leftovers") as is_ours,
        locks.held_if_free(connection, "sweep") as no_sweep_runs,
        locks.lock_timeout(connection, LOCK_TIMEOUT_MILLISECONDS),
    ):
        may_drop = is_ours and no_sweep_runs
        for log in await relations.leftover_logs(connection) if may_drop else ():
            await _drop(connection, log)


async def _drop(connection: Connection, log: Partition) -> None:
    if log.state is PartitionState.ATTACHED:
        await partitions.detach(connection, log)
    elif log.state is PartitionState.DETACHING:
        await partitions.finish_detaching(connection, log)
    await partitions.drop(connection, log.name)
