"""Settings, pins, samples and growth."""

from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from factories import DAY, HOUR, NOW, Content, make_upload

from restante.ids import WorkspaceId
from restante.retention import store as retention
from restante.retention.space import SpaceSamples
from restante.retention.store import RetentionSettings

pytestmark = pytest.mark.anyio


# Settings ----------------------------------------------------------------------------------------


async def test_the_last_saved_settings_are_those_that_commands_read(connection: Any):
    settings = [RetentionSettings(n * HOUR, n * DAY) for n in (1, 2)]
    before = await retention.saved_settings(connection)

    for one in settings:
        await retention.save_settings(connection, one)

    assert before is None
    assert await retention.saved_settings(connection) == settings[-1]


# Pins --------------------------------------------------------------------------------------------


async def test_a_short_transaction_is_no_pin(connection: Any, connections: Any):
    reader = await connections()
    async with reader.transaction():
        await reader.execute("select from uploads")

        found = await retention.pins(connection)

    assert f"process {reader.get_server_pid()}" not in {pin.who.split(" (")[0] for pin in found}


async def test_a_long_transaction_is_named_with_the_way_out(connection: Any, connections: Any):
    reader = await connections()
    pid = reader.get_server_pid()
    async with reader.transaction():
        await reader.execute("select from uploads")

        found = await retention.pins(connection, open_for=timedelta(0))

    (pin,) = [pin for pin in found if pin.who.startswith(f"process {pid} ")]
    assert pin.what == "an open transaction"
    assert f"pg_terminate_backend({pid})" in pin.way_out
    assert pin.seconds > 0


@pytest.fixture
async def slot(connection: Any) -> AsyncIterator[str]:
    """A replication slot that keeps WAL and that nobody reads."""
    name = f"test_{uuid4().hex}"
    await connection.execute("select pg_create_physical_replication_slot($1, true)", name)
    yield name
    await connection.execute("select pg_drop_replication_slot($1)", name)


async def test_a_replication_slot_is_named_with_the_wal_it_keeps(
    connection: Any, workspace_id: WorkspaceId, slot: str
):
    await make_upload(connection, workspace_id, Content(bytes(200_000)))

    (pin,) = [pin for pin in await retention.pins(connection) if slot in pin.who]

    assert pin.bytes > 0
    assert "nobody reads it" in pin.what
    assert "drop the slot" in pin.way_out


# Growth ------------------------------------------------------------------------------------------


async def take(connection: Any, *samples: tuple[timedelta, int]) -> None:
    for ago, size in samples:
        await retention.take_sample(connection, size, now=NOW - ago)


async def growth(connection: Any) -> float | None:
    return await retention.growth_bytes_per_day(connection, now=NOW)


async def test_growth_is_unknown_before_the_samples_cover_an_hour(connection: Any):
    assert await growth(connection) is None

    await take(connection, (timedelta(minutes=59), 0), (timedelta(0), 10**6))

    assert await growth(connection) is None


async def test_growth_is_bytes_a_day_since_the_first_sample(connection: Any):
    await take(connection, (2 * DAY, 1000), (DAY, 9000), (timedelta(0), 5000))

    assert await growth(connection) == pytest.approx(2000)


async def test_growth_of_tables_that_shrink_is_negative(connection: Any):
    await take(connection, (12 * HOUR, 1000), (timedelta(0), 400))

    assert await growth(connection) == pytest.approx(-1200)


async def test_growth_is_measured_over_a_week_and_older_samples_are_deleted(connection: Any):
    """A sample is deleted only when growth no longer depends on it."""
    await take(connection, (30 * DAY, 0), (7 * DAY, 0), (6 * DAY, 600), (timedelta(0), 1200))
    before = await growth(connection)

    deleted = await SpaceSamples().delete_due(connection, now=NOW)

    assert before == pytest.approx(100)
    assert await growth(connection) == before
    assert deleted == {"samples": 1}
    assert await connection.fetchval("select count(*) from space_samples") == 3


async def test_servers_that_sample_at_once_record_one(connection: Any):
    await take(connection, (DAY, 100), (DAY, 300))

    assert await connection.fetchval("select count(*) from space_samples") == 1


async def test_growth_of_a_table_is_known_once_it_is_in_samples_an_hour_apart(connection: Any):
    """Samples of an older release have no sizes of single tables, and a new table has none yet."""
    take = retention.take_sample
    await take(connection, 500, now=NOW - timedelta(days=2))
    await take(connection, 1000, {"ops": 600, "feed": 400}, now=NOW - timedelta(hours=12))
    early = await retention.growth_by_table(connection, now=NOW)

    await take(connection, 2000, {"ops": 1600, "feed": 300, "new": 100}, now=NOW)

    assert early == {}
    assert await retention.growth_by_table(connection, now=NOW) == pytest.approx(
        {"ops": 2000, "feed": -200}
    )
