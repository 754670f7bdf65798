"""An upload on a disk that fills while it arrives."""

from typing import Any

import pytest
from factories import NOW, Counters, Parts, counters

from restante.delivery.blobs import WINDOW_CHUNKS
from restante.delivery.receive import Incoming
from restante.delivery.rules import CHUNK_BYTES
from restante.errors import DiskLow
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

WINDOW = bytes(WINDOW_CHUNKS * CHUNK_BYTES)
MORE_THAN_ANY_DISK = 1 << 62


@pytest.fixture
async def parts(parts: Parts, connection: Any) -> Parts:
    await parts.receiver.disk.locate(connection)
    return parts


def fill_the_disk(parts: Parts) -> None:
    parts.receiver.disk._chosen_reserve = MORE_THAN_ANY_DISK


async def begin(incoming: Incoming, content: bytes) -> None:
    await incoming.begin_file("a.bin", "text/plain", now=NOW)
    await incoming.write(content, now=NOW)


async def test_an_upload_is_refused_before_its_first_byte(parts: Parts, workspace_id: WorkspaceId):
    fill_the_disk(parts)

    with pytest.raises(DiskLow):
        await parts.stage(workspace_id, b"a")


async def test_a_long_upload_is_refused_as_soon_as_the_disk_is_low(
    parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    """Nothing of it is announced, and its reservation is released."""
    async with parts.receiver.receive(workspace_id, 3 * len(WINDOW)) as incoming:
        await begin(incoming, WINDOW)
        fill_the_disk(parts)
        with pytest.raises(DiskLow):
            await incoming.write(WINDOW, now=NOW)

    assert await counters(connection, workspace_id) == Counters()
    assert await connection.fetchval("select count(*) from reservations") == 0


async def test_a_short_upload_is_refused_when_it_is_published(
    parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    async with parts.receiver.receive(workspace_id, 1) as incoming:
        await begin(incoming, b"a")
        await incoming.end_file(now=NOW)
        fill_the_disk(parts)
        with pytest.raises(DiskLow):
            await incoming.publish(now=NOW)

    assert await counters(connection, workspace_id) == Counters()


async def test_a_repeated_request_gets_its_answer_on_a_low_disk(
    parts: Parts, workspace_id: WorkspaceId
):
    """It stores nothing: its sender only asks what became of the first one."""
    async with parts.receiver.receive(workspace_id, 1) as incoming:
        await begin(incoming, b"a")
        await incoming.end_file(now=NOW)
        first = await incoming.publish(now=NOW, key="key")
    fill_the_disk(parts)

    async with parts.receiver.receive(workspace_id, 1, repeats_key=True) as incoming:
        await begin(incoming, b"a")
        await incoming.end_file(now=NOW)
        repeated = await incoming.repeated_answer("key", now=NOW)

    assert repeated == first
