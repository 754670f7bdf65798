"""Migrations on a real database: once, in order, side by side with other releases."""

import asyncio
import secrets
from urllib.parse import urlsplit

import asyncpg
import pytest
from waiting import until

from restante.database import migrate
from restante.database.pool import SCHEMA
from restante.database.rules import BOTH_PHASES, Migration, Phase, parse
from restante.errors import CodeTooOld, MigrationFailed

pytestmark = pytest.mark.anyio


def release(*files: tuple[str, str]) -> list[Migration]:
    """The migrations of an invented release."""
    return [parse(name, text) for name, text in files]


OURS = (
    "0001_pre_letters.sql",
    "create table letters (id int primary key, body text); insert into letters values (1, 'a');",
)
NEWER_PRE = ("0002_pre_stamp.sql", "alter table letters add column stamp text;")
NEWER_POST = ("0003_post_body.sql", "-- oldest code: 2\nalter table letters drop column body;")


def database_name(dsn: str) -> str:
    return urlsplit(dsn).path.lstrip("/")


async def fetchval(dsn: str, query: str):
    connection = await asyncpg.connect(dsn, server_settings={"search_path": SCHEMA})
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


async def test_ten_servers_that_start_at_once_run_each_migration_once(empty_dsn: str):
    files = release(OURS)

    ran = await asyncio.gather(
        *(migrate.apply(empty_dsn, files, phases={Phase.PRE}) for _ in range(10))
    )

    assert sorted(len(todo) for todo in ran) == [0] * 9 + [1]
    assert await fetchval(empty_dsn, "select count(*) from letters") == 1


async def test_the_second_run_does_nothing(empty_dsn: str):
    await migrate.apply(empty_dsn, release(OURS), phases=BOTH_PHASES)

    assert await migrate.apply(empty_dsn, release(OURS), phases=BOTH_PHASES) == []


async def test_the_previous_release_works_after_a_newer_one_migrated(empty_dsn: str):
    """Promise 9: both run during an upgrade, and the older one may be started again."""
    older, newer = release(OURS), release(OURS, NEWER_PRE, NEWER_POST)
    await migrate.apply(empty_dsn, older, phases={Phase.PRE})

    ran = await migrate.apply(empty_dsn, newer, phases={Phase.PRE})

    assert [m.number for m in ran] == [2]
    assert await migrate.apply(empty_dsn, older, phases={Phase.PRE}) == []
    assert await fetchval(empty_dsn, "select body from letters") == "a"


async def test_the_previous_release_is_refused_after_a_post_migration(empty_dsn: str):
    older, newer = release(OURS), release(OURS, NEWER_PRE, NEWER_POST)
    await migrate.apply(empty_dsn, older, phases={Phase.PRE})

    await migrate.apply(empty_dsn, newer, phases=BOTH_PHASES)

    with pytest.raises(CodeTooOld, match="Install the newer release"):
        await migrate.apply(empty_dsn, older, phases={Phase.PRE})


async def test_a_migration_that_fails_is_rolled_back(empty_dsn: str):
    broken = ("0002_pre_broken.sql", "create table half (id int); select 1/0;")

    with pytest.raises(MigrationFailed, match="0002_pre_broken failed: division by zero"):
        await migrate.apply(empty_dsn, release(OURS, broken), phases={Phase.PRE})

    assert await fetchval(empty_dsn, "select to_regclass('half')") is None
    assert await fetchval(empty_dsn, "select max(number) from schema_migrations") == 1


async def test_a_migration_that_meets_a_lock_is_retried(empty_dsn: str):
    """Between the tries it leaves the lock queue, so that writers never wait behind it."""
    await migrate.apply(empty_dsn, release(OURS), phases={Phase.PRE})
    holder = await asyncpg.connect(empty_dsn, server_settings={"search_path": SCHEMA})
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute("lock table letters in access share mode")
    with_timeout = (NEWER_PRE[0], "set local lock_timeout = '50ms'; " + NEWER_PRE[1])

    applying = asyncio.create_task(
        migrate.apply(empty_dsn, release(OURS, with_timeout), phases={Phase.PRE})
    )
    waits = "select exists (select from pg_locks where not granted)"
    await until(lambda: holder.fetchval(waits))
    await transaction.rollback()

    assert [m.number for m in await applying] == [2]
    await holder.close()


async def test_an_interrupted_index_build_is_started_again(empty_dsn: str):
    """IF NOT EXISTS would keep the invalid index that a failed build leaves."""
    await migrate.apply(empty_dsn, release(OURS), phases={Phase.PRE})
    connection = await asyncpg.connect(empty_dsn, server_settings={"search_path": SCHEMA})
    await connection.execute("insert into letters values (2, 'a')")
    build = "create unique index concurrently if not exists letters_body on letters (body)"
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute(build)
    await connection.execute("delete from letters where id = 2")
    await connection.close()

    index = ("0002_pre_index.sql", f"-- transaction: none\n{build};")
    await migrate.apply(empty_dsn, release(OURS, index), phases={Phase.PRE})

    assert await fetchval(
        empty_dsn,
        "select indisvalid from pg_index where indexrelid = 'letters_body'::regclass",
    )


@pytest.mark.parametrize("owns_schema", [True, False])
async def test_a_user_needs_only_to_own_the_schema(empty_dsn: str, owns_schema: bool):
    """In a shared database, the right to create schemas is rarely granted."""
    role = f"tenant_{secrets.token_hex(4)}"
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute(f"create role {role}; grant {role} to current_user")
    if owns_schema:
        await connection.execute(f"create schema restante authorization {role}")
    await connection.execute(
        f"alter role current_user in database {database_name(empty_dsn)} set role {role}"
    )
    await connection.close()

    applying = migrate.apply(empty_dsn, release(OURS), phases={Phase.PRE})

    if owns_schema:
        assert len(await applying) == 1
    else:
        with pytest.raises(MigrationFailed, match=r"may not create its tables.*schema restante"):
            await applying


OLD_UPLOAD = """
    insert into uploads (workspace_id, file_id, bucket, name, mimetype, size, sha256,
                         created_at, expires_at)
    values (gen_random_uuid(), gen_random_uuid(), now(), 'a', '', 68719476737,
            decode(repeat('00', 32), 'hex'), now(), now())
"""


async def test_large_files_are_allowed_without_a_scan_of_the_uploads(empty_dsn: str):
    """A row that the new check refuses does not stop it: nobody has looked at the old rows."""
    before = [one for one in migrate.shipped() if one.number < 5]
    await migrate.apply(empty_dsn, before, phases={Phase.PRE})
    connection = await asyncpg.connect(empty_dsn, server_settings={"search_path": SCHEMA})
    await connection.execute("alter table uploads drop constraint uploads_size_check")
    await connection.execute(OLD_UPLOAD)
    await connection.execute(
        "alter table uploads add constraint uploads_size_check check (size > 0) not valid"
    )

    await migrate.apply(empty_dsn, migrate.shipped()[:5], phases={Phase.PRE})

    with pytest.raises(asyncpg.CheckViolationError, match="uploads_size_check"):
        await connection.execute(OLD_UPLOAD)
    largest = OLD_UPLOAD.replace("68719476737", "68719476736")
    await connection.execute(largest)
    await connection.close()
    checks = (
        "select array_agg(convalidated) from pg_constraint"
        " where conname in ('uploads_size_check', 'uploads_display_name_check')"
    )
    assert await fetchval(empty_dsn, checks) == [False, False]


def test_the_shipped_files_are_in_order_and_well_formed():
    numbers = [migration.number for migration in migrate.shipped()]

    assert numbers == list(range(1, len(numbers) + 1))
