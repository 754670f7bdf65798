"""The tracked tables as the catalogue has them now, and the hosts that ops come from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Literal
from uuid import UUID, uuid4

import msgspec

from restante.database import sql
from restante.database.partitions import PartitionedTable
from restante.database.pool import Connection, Row
from restante.errors import TooManyHosts
from restante.oplog import positions, ulids
from restante.oplog.positions import Position
from restante.oplog.rules import CLOCK_SKEW, OwnName
from restante.text import MAX_QUOTED, printable

queries = sql.load("restante.oplog", "tables")

# The log: a partition per tracked table, and below it one per range of arrival.  They are as wide
# as the retention allows, and created well ahead: without one the application's own writes would
# fail, server or not.
OPS = PartitionedTable("ops", bound_of=datetime.isoformat, moment_of=datetime.fromisoformat)
LOG_WIDTH = timedelta(days=30)
LEAST_LEAD = timedelta(days=30)

State = Literal["tracked", "paused"]

# Each host that ever made an op has a row, and a peer may relay ops of others: of so many whom the
# operator has named neither as a peer nor in its relays, from all peers and from each.  The rows
# stay: whether the log still has an op of a host is known only after reading all of it, and an op
# whose host is gone would reach nobody.
MAX_HOSTS = 1000
MAX_HOSTS_OF_A_PEER = 100


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a tracked table."""

    name: str
    type: str
    is_generated: bool = False
    is_nullable: bool = True
    has_default: bool = False
    is_identity: bool = False  # GENERATED ALWAYS: written only with OVERRIDING SYSTEM VALUE


@dataclass(frozen=True, slots=True)
class TrackedTable:
    """
    A table whose changes are logged.

    `name` is what peers call it.  Without columns it was dropped or renamed.
    """

    id: int
    name: str
    schema_name: str
    table_name: str
    key_columns: tuple[str, ...]
    columns: tuple[Column, ...] = ()
    key_map: Mapping[str, str] = field(default_factory=dict[str, str])  # name in JSON: column
    state: State = "tracked"
    floor: UUID = ulids.LOWEST  # the largest ULID that was ever dropped from its log
    floor_origin: str = ""
    trimmed: Position | None = None  # the last position that was ever dropped
    taken_snapshot: bool = False
    unlogged: Position | None = None  # of the last track or resume: what was before may have no op

    @property
    def relation(self) -> str:
        """Its schema and name, quoted for a statement."""
        return f"{sql.quoted(self.schema_name)}.{sql.quoted(self.table_name)}"

    @property
    def log(self) -> str:
        """The partition of `ops` that holds its ops."""
        return f"ops_{self.id}"

    @property
    def unlogged_ulid(self) -> UUID:
        """Everything that was logged here is above it."""
        return self.unlogged.ulid if self.unlogged else ulids.LOWEST

    @property
    def is_missing(self) -> bool:
        return not self.columns


async def all_tables(connection: Connection) -> list[TrackedTable]:
    """Every tracked table, the paused ones too, by name."""
    return [_table(row) for row in await connection.fetch(queries.all_tables, None)]


async def find(connection: Connection, name: str) -> TrackedTable | None:
    """The tracked table that peers call so."""
    row = await connection.fetchrow(queries.all_tables, name)
    return _table(row) if row else None


async def log_sizes(connection: Connection) -> dict[int, int]:
    """The bytes of each table's log on disk, by the table's number."""
    return {row["id"]: row["bytes"] for row in await connection.fetch(queries.log_sizes)}


def _table(row: Row) -> TrackedTable:
    details = zip(
        row["column_names"],
        row["types"],
        row["are_generated"],
        row["are_nullable"],
        row["have_default"],
        row["are_identity"],
        strict=True,
    )
    return TrackedTable(
        row["id"],
        row["name"],
        row["schema_name"],
        row["table_name"],
        tuple(row["key_columns"]),
        tuple(Column(*one) for one in details),
        msgspec.json.decode(row["key_map"], type=dict[str, str]),
        row["state"],
        row["floor"],
        row["floor_origin"],
        positions.parsed(row["trimmed"]),
        row["taken_snapshot"],
        positions.parsed(row["unlogged"]),
    )


async def own_host(connection: Connection) -> str:
    """The name under which this node's changes are known; one is made up if it has none yet."""
    return await connection.fetchval(queries.own_host) or await identify(connection, None)


async def own_name(connection: Connection) -> OwnName:
    """
    The same, with the moment from which on all changes in this name are in our log.

    That is the start of the present era, or when the node got its name.  The clock of the log may
    have been ahead of it then, but not by more than CLOCK_SKEW.
    """
    row = await connection.fetchrow(queries.own_name)
    if row is None:
        return OwnName(await identify(connection, None), ulids.HIGHEST)
    began = datetime.fromtimestamp(max(row["era"] / 1_000_000, row["named_at"]), UTC)
    return OwnName(row["host"], ulids.lowest_at(began + CLOCK_SKEW))


async def identify(connection: Connection, host: str | None) -> str:
    """
    Set the name of this node, normalised; None keeps the one it has.

    A node that was never given one has a random name, which it keeps until then.
    """
    if host is None:
        known = await connection.fetchval(queries.own_host)
        if known is not None:
            return known
        host = f"urn:uuid:{uuid4()}"
    await connection.execute(queries.set_own_host, await host_id(connection, host))
    return host


async def host_id(connection: Connection, host: str, *, peer_id: int | None = None) -> int:
    """
    The number of a host in `ops`; `peer_id` is the peer that names it.

    Raises TooManyHosts if it is new and there is no room.
    """
    for _ in range(2):
        known = await connection.fetchval(queries.host_id, host)
        if known is not None:
            return known
        await connection.execute(queries.add_host, host, peer_id, MAX_HOSTS, MAX_HOSTS_OF_A_PEER)
    known = await connection.fetchval(queries.host_id, host)
    if known is None:
        raise TooManyHosts(
            f"There is no room for another host, {printable(host, max_length=MAX_QUOTED)}: "
            f"{MAX_HOSTS_OF_A_PEER} are taken from one peer, and {MAX_HOSTS} hosts from all. "
            "Name those that are real with `peers add --relays`, or add them as peers."
        )
    return known
