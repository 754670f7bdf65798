"""
The clock of the log, which never goes back while there is a log.

It is above every version that this node has logged or applied.  Without a tracked table there is
none, and a clock that was far ahead can start again from the wall clock.
"""

import structlog

from restante.database import sql
from restante.database.pool import Tx

log = structlog.get_logger()

queries = sql.load("restante.oplog.tracking", "clock")


async def restart_if_unused(tx: Tx) -> None:
    """Set clock and era back to the wall clock, if they are ahead and no table is tracked."""
    if rows := await tx.fetch(queries.restart):
        log.warning("oplog_clock_restarted", sequences=[row["relname"] for row in rows])
