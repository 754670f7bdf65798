"""What is stored of a peer while its log is read: cursors that are wrong, gaps, failures."""

from dataclasses import replace
from datetime import datetime
from uuid import UUID

import structlog

from restante.database import sql
from restante.database.pool import Connection
from restante.oplog import ulids
from restante.oplog.peers import Peer
from restante.oplog.remote import Page

log = structlog.get_logger()

queries = sql.load("restante.oplog.pulling", "pull")


async def pulled(  # noqa: PLR0913 - each argument is one fact, named by its caller
    connection: Connection,
    peer: Peer,
    page: Page,
    failure: str | None,
    *,
    read_all_at: datetime | None,
    now: datetime,
) -> None:
    """
    A page was applied; `failure` is what is wrong nevertheless.

    If it was the end of the log, `read_all_at` is when it was asked for.
    """
    await connection.execute(
        queries.pulled,
        peer.id,
        now,
        "restante" if page.is_ours else "ulid",
        page.skew_seconds,
        page.unreadable,
        failure,
        read_all_at,
    )


async def read_without(connection: Connection, peer: Peer) -> set[int]:
    """The tables that wait for snapshots, whose ops are left out from here on."""
    rows = await connection.fetch(queries.read_without, peer.id, peer.cursor)
    return {row["table_id"] for row in rows}


async def count_gap(connection: Connection, peer: Peer, gap: UUID) -> None:
    """Once, and only if the cursor stands there."""
    if await connection.fetchval(queries.count_gap, peer.id, ulids.text_of(gap)):
        log.warning("gap", peer=peer.host, available_from=ulids.text_of(gap))


async def drop_cursor(connection: Connection, peer: Peer, problem: str, *, now: datetime) -> Peer:
    """Read the log from its beginning; returns the peer as it is then."""
    await connection.execute(queries.drop_cursor, peer.id, peer.cursor, now)
    await connection.execute(queries.forget_gaps, peer.id)
    await cursor_problem(connection, peer, problem, now=now)
    return replace(peer, cursor="")


async def cursor_problem(
    connection: Connection, peer: Peer, problem: str, *, now: datetime
) -> None:
    """For the operator, with the time."""
    said = f"{now:%Y-%m-%d %H:%M:%S} UTC: {problem}"
    await connection.execute(queries.note_cursor_problem, peer.id, said)
    log.warning("cursor_problem", peer=peer.host, cursor=peer.cursor, reason=problem)


async def failed(connection: Connection, peer: Peer, reason: str, *, now: datetime) -> None:
    """Nothing could be read; it is logged once."""
    if await connection.fetchval(queries.failed, peer.id, now, reason):
        log.warning("pull_failed", peer=peer.host, reason=reason)
