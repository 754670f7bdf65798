"""The bytes on disk are bounded: one process never writes more, whatever becomes of its uploads."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from factories import NOW, make_parts
from waiting import until

from restante.database import partitions
from restante.database.pool import Database
from restante.delivery.receive import Incoming, Receiver
from restante.delivery.rules import MIB, Usage
from restante.errors import ServerFull
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

BELOW_A_WINDOW = MIB - 1  # arrives whole before anything is written


async def write(incoming: Incoming, size: int) -> None:
    await incoming.begin_file("a.bin", "", now=NOW)
    await incoming.write(bytes(size), now=NOW)


async def abort(receiver: Receiver, workspace_id: WorkspaceId, size: int) -> None:
    async with receiver.receive(workspace_id, size) as incoming:
        await write(incoming, size)


async def publish(receiver: Receiver, workspace_id: WorkspaceId, size: int) -> None:
    async with receiver.receive(workspace_id, size) as incoming:
        await write(incoming, size)
        await incoming.end_file(now=NOW)
        await incoming.publish(now=NOW)


async def repeat(act: Callable[[], Awaitable[object]]) -> None:
    """Ten times, unless it is refused."""
    for _ in range(10):
        await act()


@pytest.mark.parametrize("fresh_seconds", [0, 3600])
@pytest.mark.parametrize("act", [abort, publish])
async def test_dead_bytes_on_disk_are_bounded(
    db: Database, workspace_id: WorkspaceId, fresh_seconds: float, act: Any
):
    """What was aborted or acknowledged takes space until its bucket is dropped."""
    parts = make_parts(db, server_max_stored_bytes=6 * MIB, fresh_seconds=fresh_seconds)

    with pytest.raises(ServerFull, match="until deleted ones are swept"):
        await repeat(lambda: act(parts.receiver, workspace_id, 2 * MIB))


@pytest.mark.parametrize("fresh_seconds", [0, 3600])
async def test_small_files_fill_the_disk_too(
    db: Database, workspace_id: WorkspaceId, fresh_seconds: float
):
    """They are written by the statement that publishes them."""
    parts = make_parts(db, server_max_stored_bytes=4 * MIB, fresh_seconds=fresh_seconds)

    with pytest.raises(ServerFull):
        await repeat(lambda: publish(parts.receiver, workspace_id, BELOW_A_WINDOW))


async def test_what_uploads_in_progress_will_write_counts_after_every_read(
    db: Database, workspace_id: WorkspaceId
):
    """It is not in the sizes of the buckets yet."""
    receiver = make_parts(db, server_max_stored_bytes=4 * MIB, fresh_seconds=0).receiver
    async with AsyncExitStack() as arriving:
        for _ in range(3):
            incoming = await arriving.enter_async_context(receiver.receive(workspace_id, MIB))
            await write(incoming, BELOW_A_WINDOW)

        with pytest.raises(ServerFull):
            await receiver.server.check(Usage(MIB + 3, 1))


async def test_bytes_that_are_being_written_during_a_read_count(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """The sizes do not have them, and their statement has not ended."""
    receiver = make_parts(db, server_max_stored_bytes=4 * MIB, fresh_seconds=0).receiver
    async with receiver.receive(workspace_id, 3 * MIB) as incoming:
        await incoming.begin_file("a.bin", "", now=NOW)
        async with connection.transaction():
            await connection.execute("lock table chunks in share mode")
            await incoming.write(bytes(3 * MIB // 2), now=NOW)
            waits = "select exists (select from pg_locks where not granted)"
            await until(lambda: connection.fetchval(waits))

            with pytest.raises(ServerFull):
                await receiver.server.check(Usage(MIB + 1, 1))


async def test_what_an_aborted_upload_did_not_write_is_free_at_once(
    db: Database, workspace_id: WorkspaceId
):
    """A sender that comes back is not refused until the sizes are read again."""
    receiver = make_parts(db, server_max_stored_bytes=4 * MIB, fresh_seconds=3600).receiver
    await repeat(lambda: abort(receiver, workspace_id, BELOW_A_WINDOW))

    await receiver.server.check(Usage(3 * MIB, 1))


async def test_the_sizes_are_read_every_few_seconds_however_many_uploads_come(
    db: Database, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    reads, sizes = 0, partitions.sizes

    async def counted(*args: Any) -> Any:
        nonlocal reads
        reads += 1
        return await sizes(*args)

    monkeypatch.setattr(partitions, "sizes", counted)
    server = make_parts(db).receiver.server
    server.usage_fresh_seconds = 0

    await asyncio.gather(*(server.check(Usage(1, 1)) for _ in range(20)))

    assert reads == 1
