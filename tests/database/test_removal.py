"""How far the removal of a partition has come, its size, and the locks that are in the way."""

import os
from typing import Any

import asyncpg
import pytest
from factories import HOUR, make_workspace
from sweeps import (
    CHUNKS,
    FEED,
    PAST,
    attached_to,
    detach_half_way,
    locked,
    make_old,
    make_partition,
    partition_names,
    size_of,
    state_of,
)

from restante.database import partitions
from restante.database.partitions import Partition, PartitionState
from restante.database.pool import Database, translated
from restante.database.spans import Span
from restante.errors import TableBusy

pytestmark = pytest.mark.anyio

TABLES = [CHUNKS, FEED]


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Any) -> Any:
    connection = await connections()
    await connection.execute("set timezone = 'UTC'; set datestyle = 'ISO'")
    return connection


@pytest.fixture
async def bucket(connection: Any) -> Partition:
    """A bucket with a past range."""
    name = await make_partition(connection, CHUNKS)
    return (await found_in(connection))[name]


async def found_in(connection: Any) -> dict[str, Partition]:
    return {one.name: one for one in await partitions.partitions_of(connection, TABLES)}


# The catalogue -----------------------------------------------------------------------------------


async def test_every_partition_is_listed_with_its_range_and_its_state(
    connection: Any, bucket: Partition, connections: Any
):
    sealed, detaching = [
        await make_partition(connection, CHUNKS, PAST + n * HOUR) for n in range(1, 3)
    ]
    detached = await make_partition(connection, FEED, PAST + HOUR)
    await partitions.seal(connection, sealed)
    await partitions.detach(connection, attached_to("feed", detached, FEED))
    await detach_half_way(connections, attached_to("chunks", detaching, CHUNKS))

    found = await found_in(connection)

    assert found[bucket.name] == Partition(
        "chunks", bucket.name, PartitionState.ATTACHED, Span(PAST, PAST + HOUR), "chunks"
    )
    assert found[sealed].state is PartitionState.SEALED
    assert found[sealed].span == Span(PAST + HOUR, PAST + 2 * HOUR)
    assert found[detaching] == Partition(
        "chunks", detaching, PartitionState.DETACHING, None, "chunks"
    )
    assert found[detached] == Partition("feed", detached, PartitionState.DETACHED, None, None)
    assert set(found) == await partition_names(connection, CHUNKS) | await partition_names(
        connection, FEED
    )


async def test_a_table_with_a_similar_name_is_not_taken_for_a_leftover(
    connection: Any, bucket: Partition
):
    """It would be dropped by the next sweep."""
    for name in (
        "chunks_backup",
        "chunks_20260101",
        "chunks_20260101_000000_copy",
        "chunks_backup_20260101_000000",
        "my_chunks_20260101_000000",
        "feeds_20260101_000000",
    ):
        await connection.execute(f"create table {name} ()")
    await connection.execute("create schema elsewhere")
    await connection.execute("create table elsewhere.chunks_20260102_000000 ()")
    await connection.execute("create view chunks_20260103_000000 as select 1")

    found = await found_in(connection)

    assert {one.state for one in found.values()} == {PartitionState.ATTACHED}


async def test_a_partition_that_an_older_release_has_sealed_is_sealed(
    connection: Any, bucket: Partition
):
    """The older release uses a constraint; a second seal is harmless."""
    await connection.execute(
        f"alter table {bucket.name} add constraint sealed check (false) not valid"
    )
    found = (await found_in(connection))[bucket.name]
    await partitions.seal(connection, bucket.name)
    await partitions.detach(connection, bucket)

    assert found.state is PartitionState.SEALED
    assert await state_of(connection, bucket.name) == "detached"


# Sealing -----------------------------------------------------------------------------------------


async def test_a_sealed_partition_refuses_rows_and_can_be_sealed_again(
    connection: Any, bucket: Partition
):
    """The writer gets TableBusy; a retry finds another partition."""
    workspace_id = await make_workspace(connection)
    await make_old(connection, workspace_id, data=b"x")
    for _ in range(2):
        await partitions.seal(connection, bucket.name)

    with pytest.raises(TableBusy) as refused, translated():
        await make_old(connection, workspace_id, data=b"y")

    assert isinstance(refused.value.__cause__, asyncpg.CheckViolationError)
    assert await state_of(connection, bucket.name) == "sealed"
    assert await connection.fetchval("select bytes from chunks") == b"x"


# Sizes -------------------------------------------------------------------------------------------


async def test_a_size_is_heap_toast_and_indexes(connection: Any, bucket: Partition):
    workspace_id = await make_workspace(connection)
    await make_old(connection, workspace_id, 4, data=os.urandom(256 * 1024))

    (found,) = await partitions.with_sizes(connection, [bucket])

    assert found.bytes > 4 * 256 * 1024
    assert found.bytes == await size_of(connection, bucket.name)
    assert not found.is_locked


async def test_a_partition_that_was_dropped_meanwhile_has_no_size(
    connection: Any, bucket: Partition
):
    await connection.execute(f"drop table {bucket.name}")

    (found,) = await partitions.with_sizes(connection, [bucket])

    assert (found.bytes, found.is_locked) == (0, False)


async def test_a_locked_partition_is_marked_and_the_others_are_measured(
    connection: Any, bucket: Partition, connections: Any
):
    """Neither its bounds nor its size are waited for: the lock is never released here."""
    other = await make_partition(connection, CHUNKS, PAST + HOUR)
    async with locked(await connections(), bucket.name, "access exclusive"):
        found = list((await found_in(connection)).values())
        measured = {one.name: one for one in await partitions.with_sizes(connection, found)}

    assert bucket in found
    assert (measured[bucket.name].bytes, measured[bucket.name].is_locked) == (0, True)
    assert (measured[other].bytes > 0, measured[other].is_locked) == (True, False)
    assert await connection.fetchval("show lock_timeout") == "0"


async def test_the_drop_of_a_detached_partition_returns_its_bytes(
    connection: Any, bucket: Partition
):
    await partitions.detach(connection, bucket)
    size = await size_of(connection, bucket.name)

    freed = await partitions.drop(connection, bucket.name)

    assert freed == size > 0
    assert await state_of(connection, bucket.name) == "gone"
