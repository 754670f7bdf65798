"""Changes of the schema of a tracked table, its partitions, and a dump of the database."""

import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from cluster import cloned
from oplog.captured import OWN, changes_of, log_of, records_of, replayed, track

from restante.database.pool import Database
from restante.oplog import tables
from restante.oplog.tracking import capture, schema_changes
from restante.postgres.binaries import choose_binaries

pytestmark = pytest.mark.anyio

CHANGES = {
    "an added column": "alter table pages add more integer default 5",
    "an added column without a hash function": "alter table pages add more json",
    "a dropped column": "alter table pages drop body",
    "a renamed column": "alter table pages rename body to text",
    "another type": "alter table pages alter n type numeric(10, 2)",
    "another type of the key": "alter table pages alter id type varchar(20)",
    "a renamed key": "alter table pages rename id to name",
    "a renamed table": "alter table pages rename to sheets",
    "another schema": "create schema app; alter table pages set schema app",
    "an added generated column": "alter table pages add twice int generated always as (n) stored",
    "a dropped column before the key": "alter table pages drop first",
}


@pytest.fixture
async def writer(db: Database, connections: Any) -> Any:
    """A connection of the application, whose plans are cached; `pages` is tracked."""
    connection = await connections()
    await connection.execute("set search_path = public")
    await connection.execute(
        "create table pages (first integer, id text primary key, n integer, body text)"
    )
    await track(db)
    for n in range(7):  # Postgres caches a generic plan after five
        await connection.execute(f"insert into pages (id, n) values ('{n}', {n})")
        await connection.execute(f"update pages set n = n + 1 where id = '{n}'")
    await connection.execute("delete from pages where id = '6'")
    return connection


def name_after(change: str) -> tuple[str, str]:
    """The names of the table and of its key after a change."""
    table = {"a renamed table": "public.sheets", "another schema": "app.pages"}
    return table.get(change, "public.pages"), "name" if change == "a renamed key" else "id"


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_refreshed", [False, True], ids=["at once", "after a refresh"])
async def test_capture_goes_on_after(
    db: Database, writer: Any, connections: Any, change: str, is_refreshed: bool
):
    """In a session that has cached its plans, while another one changes the schema."""
    other = await connections()
    await other.execute("set search_path = public")
    await other.execute(CHANGES[change])
    if is_refreshed:
        assert not any(one.is_problem for one in await schema_changes.refresh(db))
    table, key = name_after(change)

    await writer.execute(f"insert into {table} ({key}, n) values ('new', 1), ('gone', 1)")
    await writer.execute(f"update {table} set n = n + 1")
    await writer.execute(f"update {table} set {key} = 'moved' where {key} = '0'")
    await writer.execute(f"delete from {table} where {key} = 'gone'")

    assert await replayed(writer) == await records_of(writer, table)


async def test_a_refresh_that_finds_nothing_new_locks_nothing(
    db: Database, writer: Any, connections: Any
):
    async with writer.transaction():
        await writer.execute("insert into pages (id) values ('x')")

        assert await schema_changes.refresh(db) == []


async def test_a_renamed_table_is_followed(db: Database, writer: Any):
    await writer.execute("alter table pages rename to sheets; alter table sheets rename id to name")

    (found,) = await schema_changes.refresh(db)
    async with db.connection() as connection:
        table = await tables.find(connection, "pages")

    assert "is called public.sheets now" in found.sentence
    assert not found.is_problem
    assert table is not None
    assert (table.table_name, table.key_columns) == ("sheets", ("name",))
    assert await schema_changes.refresh(db) == []


async def test_a_dropped_table_is_named(db: Database, writer: Any):
    await writer.execute("drop table pages")

    (found,) = await schema_changes.refresh(db)

    assert found.is_problem
    assert "public.pages was dropped" in found.sentence
    assert "restante oplog untrack pages" in found.sentence


async def test_a_lost_key_refuses_writes_and_is_named(db: Database, writer: Any):
    """Its changes cannot be logged any more; better an error than a silent difference."""
    await writer.execute("alter table pages drop id")

    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="its key is gone"):
        await writer.execute("insert into pages (n) values (1)")
    (found,) = await schema_changes.refresh(db)
    await capture.untrack(db, "pages")
    await writer.execute("insert into pages (n) values (1)")

    assert "has no primary key any more" in found.sentence


async def test_another_key_is_named(db: Database, writer: Any):
    await writer.execute(
        "alter table pages drop constraint pages_pkey; update pages set body = id;"
        " alter table pages add primary key (body)"
    )

    (found,) = await schema_changes.refresh(db)

    assert "was (id) and is (body) now" in found.sentence


@pytest.mark.parametrize(
    "loss",
    ["alter table pages disable trigger all", "drop trigger restante_update on pages"],
)
async def test_lost_triggers_are_named_and_mended_by_pause_and_resume(
    db: Database, writer: Any, loss: str
):
    await writer.execute(loss)

    (found,) = await schema_changes.refresh(db)
    await capture.pause(db, "pages", now=datetime.now(UTC))
    paused = await schema_changes.refresh(db)
    await capture.resume(db, "pages", host=OWN, now=datetime.now(UTC))
    await writer.execute("update pages set n = 0")

    assert "missing or disabled" in found.sentence
    assert "restante oplog pause" in found.sentence
    assert paused == []
    assert await schema_changes.refresh(db) == []
    assert await replayed(writer) == await records_of(writer)


async def test_a_table_that_took_the_name_is_another_one(db: Database, writer: Any):
    """The tracked table is the one with the triggers."""
    await writer.execute("alter table pages rename to old; create table pages (id int primary key)")

    (found,) = await schema_changes.refresh(db)

    assert "called public.old now" in found.sentence


# Partitions --------------------------------------------------------------------------------------


@pytest.fixture
async def parted(db: Database, connections: Any) -> Any:
    """A connection; `parts` is tracked, with partitions at two levels."""
    connection = await connections()
    await connection.execute(
        "set search_path = public;"
        "create table parts (id integer primary key, n integer) partition by range (id);"
        "create table low partition of parts for values from (0) to (100);"
        "create table high partition of parts for values from (100) to (300)"
        " partition by range (id);"
        "create table higher partition of high for values from (100) to (200)"
    )
    await track(db, "parts")
    return connection


async def test_writes_to_the_table_and_to_its_partitions_are_logged_once(parted: Any):
    await parted.execute("insert into parts values (1, 1), (101, 1)")
    await parted.execute("insert into low values (2, 2); insert into high values (102, 2)")
    await parted.execute("insert into higher values (103, 3); update higher set n = 4")
    await parted.execute("update parts set n = n + 1; delete from low where id = 2")

    log = await log_of(parted, "parts")
    assert await replayed(parted, "parts") == await records_of(parted, "parts")
    assert len(log) == 5 + 3 + 5 + 1


async def test_a_record_that_moves_to_another_partition_is_logged(parted: Any):
    await parted.execute("insert into parts values (1, 1), (2, 2), (101, 3)")

    await parted.execute("update parts set id = id + 101 where id in (1, 2)")
    await parted.execute("update parts set id = 3, n = 9 where id = 101")

    assert await replayed(parted, "parts") == await records_of(parted, "parts")


async def test_a_partition_whose_columns_have_another_order(parted: Any, db: Database):
    await parted.execute(
        "create table odd (n integer, gone text, id integer not null);"
        " alter table odd drop gone; alter table odd add primary key (id);"
        " alter table parts attach partition odd for values from (300) to (400)"
    )
    await schema_changes.refresh(db)

    await parted.execute(
        "insert into odd (id, n) values (301, 1); insert into parts values (302, 2)"
    )
    await parted.execute("update odd set n = 5; update parts set id = id + 1 where id = 302")

    assert await replayed(parted, "parts") == await records_of(parted, "parts")


async def test_a_new_partition_is_captured_after_a_refresh(parted: Any, db: Database):
    await parted.execute("create table newest partition of high for values from (200) to (300)")
    await parted.execute("insert into parts values (201, 1)")

    found = await schema_changes.refresh(db)
    await parted.execute("update newest set n = 2")

    assert [one.is_problem for one in found] == [False]
    assert "public.newest are captured" in found[0].sentence
    assert await replayed(parted, "parts") == await records_of(parted, "parts")
    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError):
        await parted.execute("truncate newest")


async def test_a_detached_partition_is_no_longer_captured_and_is_named(parted: Any, db: Database):
    await parted.execute("insert into parts values (1, 1)")
    await parted.execute("alter table parts detach partition low")

    (found,) = await schema_changes.refresh(db)
    await parted.execute("insert into low values (2, 2); truncate low")

    assert "public.low is no partition of the table any more" in found.sentence
    assert len(await log_of(parted, "parts")) == 1


async def test_all_parts_are_paused_and_untracked(parted: Any, db: Database):
    await capture.pause(db, "parts", now=datetime.now(UTC))
    await parted.execute("insert into low values (1, 1); insert into parts values (101, 1)")
    paused = await log_of(parted, "parts")
    await capture.resume(db, "parts", host=OWN, now=datetime.now(UTC))
    await parted.execute("insert into higher values (102, 1)")
    resumed = await log_of(parted, "parts")

    await capture.untrack(db, "parts")
    await parted.execute("truncate parts")

    assert (len(paused), len(resumed)) == (0, 1)


# Dump and restore --------------------------------------------------------------------------------


async def test_a_restored_database_goes_on_capturing(
    db: Database, writer: Any, dsn: str, cluster: str, tmp_path: Path
):
    """Triggers are restored after the data, so nothing is logged twice; types have new oids."""
    await writer.execute("create type mood as enum ('good', 'bad')")
    await writer.execute("create table faces (id text primary key, mood mood)")
    await track(db, "faces")
    await writer.execute("insert into faces values ('a', 'good')")
    before = await changes_of(writer)
    async with cloned(cluster, "template0") as other:
        _dump_and_restore(dsn, other, tmp_path / "dump")
        restored = await asyncpg.connect(other)
        try:
            after = await changes_of(restored)
            await restored.execute("update pages set n = n + 1; delete from pages where id = '1'")
            await restored.execute("update faces set mood = 'bad'")
            logged = await replayed(restored), await replayed(restored, "faces")
            kept = await records_of(restored), await records_of(restored, "public.faces")
            newest = await restored.fetchval("select max(ulid::text) from restante.ops")
        finally:
            await restored.close()
    assert after == before
    assert logged == kept
    assert newest > max(str(one.ulid) for one in await log_of(writer))


def _dump_and_restore(dsn: str, other: str, dump: Path) -> None:
    chosen = os.environ.get("TEST_POSTGRES_BIN")
    programs = choose_binaries(Path(chosen) if chosen else None, major=None).bin_dir
    if not (programs / "pg_dump").exists() or not (programs / "pg_restore").exists():
        pytest.skip(f"there is no pg_dump in {programs}")
    for command in (
        [programs / "pg_dump", "--format=custom", f"--file={dump}", dsn],
        [programs / "pg_restore", "--exit-on-error", f"--dbname={other}", dump],
    ):
        subprocess.run(command, check=True, capture_output=True)
