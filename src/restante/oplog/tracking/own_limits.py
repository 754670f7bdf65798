"""How long the ops of one table are kept, if not as long as those of the others."""

from dataclasses import dataclass
from datetime import timedelta

from restante.database import sql
from restante.database.pool import Connection
from restante.oplog.tables import LOG_WIDTH
from restante.oplog.trimming import picture
from restante.oplog.trimming.limits import width as log_width

queries = sql.load("restante.oplog.tracking", "relations")

_NAMES = ("retention_days", "cap_days", "cap_bytes")

DEFAULT = -1  # instead of a limit: the table has none of its own


@dataclass(frozen=True, slots=True)
class OwnLimits:
    """The limits of one table; None keeps what it has, 0 is no limit."""

    retention_days: float | None = None
    cap_days: float | None = None
    cap_bytes: int | None = None

    @property
    def are_given(self) -> bool:
        return self != OwnLimits()


async def store(connection: Connection, table_id: int, limits: OwnLimits) -> None:
    """Change those that are given."""
    await connection.execute(
        queries.set_limits, table_id, limits.retention_days, limits.cap_days, limits.cap_bytes
    )


async def of_tables(connection: Connection) -> dict[int, OwnLimits]:
    """The limits that tables have of their own, by the table's number."""
    rows = await connection.fetch(queries.limits)
    return {row["id"]: OwnLimits(*(row[name] for name in _NAMES)) for row in rows}


async def width(connection: Connection, limits: OwnLimits) -> timedelta:
    """How wide the first partitions of a table with these limits are."""
    saved = await picture.saved_limits(connection)
    own = {name: getattr(limits, name) for name in _NAMES if getattr(limits, name) != DEFAULT}
    return log_width(picture.policy_of(dict.fromkeys(_NAMES) | own, saved), LOG_WIDTH)
