"""The pool on a real Postgres: bounded, errors translated once, lost connections replaced."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest
from links import Link
from waiting import until

from restante.database import driver_errors, locks
from restante.database.pool import SEARCH_PATH, Database, Tx, dedicated
from restante.errors import (
    CodeTooOld,
    DatabaseFull,
    DatabaseReadOnly,
    DatabaseRefused,
    DatabaseUnavailable,
    StatementTimedOut,
)

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def pool(
    dsn: str, *, size: int = 2, acquire_seconds: float = 5, statement_seconds: float = 20
) -> AsyncIterator[Database]:
    db = await Database.open(
        dsn,
        pool_size=size,
        acquire_timeout_seconds=acquire_seconds,
        statement_timeout_seconds=statement_seconds,
    )
    try:
        yield db
    finally:
        await db.close()


async def terminate_all_others(connection: Any) -> None:
    """What a restart, a fail-over or an operator does to our connections."""
    terminated = await connection.fetch(
        "select pid, pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    pids = [row["pid"] for row in terminated]
    await until(
        lambda: connection.fetchval(
            "select not exists (select from pg_stat_activity where pid = any($1))", pids
        )
    )


async def test_a_full_pool_raises_instead_of_waiting_for_ever(dsn: str):
    async with (
        pool(dsn, size=2, acquire_seconds=0.05) as db,
        db.connection(),
        db.connection(),
    ):
        with pytest.raises(
            DatabaseUnavailable, match=r"No database connection became free within 0\.05 s\."
        ):
            await db.connection().__aenter__()


async def test_a_pool_never_has_more_connections_than_its_size(dsn: str):
    async with pool(dsn, size=3) as db:
        counted = await asyncio.gather(*(our_connections(db) for _ in range(30)))

    assert max(counted) <= 3


async def our_connections(db: Database) -> int:
    async with db.connection() as connection:
        return await connection.fetchval(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and application_name = 'restante'"
        )


async def test_a_waiting_request_gets_the_connection_that_becomes_free(dsn: str):
    async with pool(dsn, size=2) as db:
        first, second = db.connection(), db.connection()
        await first.__aenter__()
        await second.__aenter__()
        waiting = asyncio.create_task(answer(db))

        await first.__aexit__(None, None, None)

        assert await waiting == 1
        await second.__aexit__(None, None, None)


async def answer(db: Database) -> int:
    async with db.connection() as connection:
        return await connection.fetchval("select 1")


async def test_a_slow_statement_is_cancelled_and_its_connection_is_kept(dsn: str):
    async with pool(dsn, statement_seconds=0.05) as db:
        async with db.connection() as connection:
            before = await connection.fetchval("select pg_backend_pid()")

        with pytest.raises(StatementTimedOut, match="took too long") as caught:
            async with db.connection() as connection:
                await connection.execute("select pg_sleep(60)")

        assert isinstance(caught.value.__cause__, asyncpg.QueryCanceledError)
        async with db.connection() as connection:
            assert await connection.fetchval("select pg_backend_pid()") == before


async def test_an_idle_transaction_is_ended_by_the_server(dsn: str):
    """An open transaction keeps vacuum from cleaning every table."""
    async with pool(dsn, statement_seconds=0.05) as db:
        with pytest.raises(DatabaseUnavailable) as caught:  # noqa: PT012 - what comes out of the transaction counts
            async with db.transaction() as tx:
                await tx.fetchval("select 1")
                await until_closed(tx)
                await tx.fetchval("select 1")

        assert caught.value.__cause__ is not None
        assert await answer(db) == 1


async def until_closed(tx: Tx) -> None:
    async def closed() -> bool:
        return tx.is_closed()

    await until(closed)


async def test_lost_connections_are_replaced(dsn: str, connections: Callable[[], Any]):
    """A restart of Postgres costs the requests in flight and nothing else."""
    async with pool(dsn) as db:
        async with db.connection() as one, db.connection() as other:
            pids = {await each.fetchval("select pg_backend_pid()") for each in (one, other)}

        await terminate_all_others(await connections())

        async with db.connection() as one, db.connection() as other:
            fresh = {await each.fetchval("select pg_backend_pid()") for each in (one, other)}
        assert not pids & fresh


async def test_the_loss_of_a_connection_in_use_is_translated(
    dsn: str, connections: Callable[[], Any]
):
    observer = await connections()

    async with pool(dsn) as db:
        with pytest.raises(DatabaseUnavailable) as caught:  # noqa: PT012 - what comes out of the transaction counts
            async with db.transaction() as tx:
                await terminate_all_others(observer)
                await tx.fetchval("select 1")

        assert caught.value.__cause__ is not None
        assert await answer(db) == 1


@pytest.mark.parametrize("statement", ["select 1", "select pg_sleep(60)"])
async def test_no_error_of_the_driver_reaches_a_caller_when_a_session_is_terminated(
    dsn: str, connections: Callable[[], Any], statement: str
):
    """The driver raises different errors, depending on the moment; callers see one kind."""
    observer = await connections()

    async with pool(dsn) as db:

        async def ask_until_it_fails() -> None:
            async with db.connection() as connection:
                while True:
                    await connection.execute(statement)

        asking = asyncio.create_task(ask_until_it_fails())
        await until_active(observer)
        await terminate_all_others(observer)

        with pytest.raises(DatabaseUnavailable):
            await asking


async def until_active(observer: Any) -> None:
    await until(
        lambda: observer.fetchval(
            "select exists (select from pg_stat_activity where datname = current_database()"
            " and application_name = 'restante' and query_start is not null)"
        )
    )


async def test_an_error_rolls_the_whole_transaction_back(db: Database):
    async with db.connection() as connection:
        await connection.execute("create table letters (id int primary key)")

    with pytest.raises(ValueError, match="changed my mind"):  # noqa: PT012 - what comes out of the transaction counts
        async with db.transaction() as tx:
            await tx.execute("insert into letters values (1)")
            raise ValueError("changed my mind")

    async with db.connection() as connection:
        assert await connection.fetchval("select count(*) from letters") == 0


async def test_a_cancelled_transaction_is_rolled_back_and_its_connection_is_released(dsn: str):
    """A client that goes away cancels its request in the middle of anything."""
    async with pool(dsn, size=2) as db:
        async with db.connection() as connection:
            await connection.execute("create table letters (id int primary key)")
        inserted = asyncio.Event()

        async def insert_and_wait() -> None:
            async with db.transaction() as tx:
                await tx.execute("insert into letters values (1)")
                inserted.set()
                await tx.execute("select pg_sleep(60)")

        working = asyncio.create_task(insert_and_wait())
        await inserted.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(10):
                await working

        async with db.connection() as one, db.connection() as _other:
            assert await one.fetchval("select count(*) from letters") == 0


async def test_a_read_only_transaction_cannot_write(db: Database):
    with pytest.raises(DatabaseReadOnly):
        async with db.transaction(readonly=True) as tx:
            await tx.execute("create table letters (id int)")


async def test_our_own_errors_and_errors_in_sql_pass_unchanged(db: Database):
    """Only failures of the environment are translated; a bug keeps its trace."""
    with pytest.raises(CodeTooOld):
        async with db.connection():
            raise CodeTooOld("This release is too old.")
    with pytest.raises(asyncpg.UndefinedTableError):
        async with db.connection() as connection:
            await connection.execute("select * from no_such_table")


async def test_what_the_database_refuses_is_a_sentence_for_commands(db: Database):
    async with db.connection() as connection:
        with (
            pytest.raises(DatabaseRefused, match='column "nothing" does not exist'),
            driver_errors.refusal_named(),
        ):
            await connection.fetchval("select nothing")
    with pytest.raises(StatementTimedOut), driver_errors.refusal_named():
        raise StatementTimedOut("It took too long.")


async def test_every_connection_uses_our_schema_and_our_timeouts(dsn: str):
    async with (
        pool(dsn, statement_seconds=7) as db,
        db.connection() as pooled,
        dedicated(dsn, statement_timeout_seconds=7) as own,
    ):
        for connection in (pooled, own):
            assert await connection.fetchval("show search_path") == SEARCH_PATH
            assert await connection.fetchval("show statement_timeout") == "7s"
            assert await connection.fetchval("show application_name") == "restante"


async def test_synchronous_commit_is_on(db: Database):
    """What we confirm is on disk, although the test cluster's own setting is off."""
    async with db.connection() as connection:
        setting = await connection.fetchval("show synchronous_commit")

    assert setting == "on"


async def test_closing_terminates_a_query_that_does_not_end(dsn: str):
    async with asyncio.timeout(10):
        async with pool(dsn) as db:
            started = asyncio.Event()

            async def work() -> None:
                async with db.connection() as connection:
                    started.set()
                    await connection.execute("select pg_sleep(60)")

            working = asyncio.create_task(work())
            await started.wait()

    with pytest.raises(DatabaseUnavailable):
        await working


async def test_the_error_for_an_unreachable_database_has_no_password(dsn: str):
    with pytest.raises(DatabaseUnavailable, match=r"cannot be reached: .*RESTANTE_DATABASE_URL\."):
        await Database.open(
            "postgresql://restante:secret@/restante?host=/nonexistent",
            pool_size=2,
            acquire_timeout_seconds=1,
            statement_timeout_seconds=1,
        )


@pytest.mark.parametrize(
    "refusal",
    [
        asyncpg.InternalServerError("could not write init file: No space left on device"),
        asyncpg.DiskFullError('could not extend file "base/5/1259": No space left on device'),
    ],
)
def test_a_full_disk_is_named_when_postgres_accepts_no_session(refusal: Exception):
    """The operator must not look for the fault in the address."""
    with (
        pytest.raises(DatabaseFull, match=r"No space left on device\. Free space on its disk\."),
        driver_errors.unreachable_translated(),
    ):
        raise refusal

    assert isinstance(driver_errors.translation(refusal), DatabaseFull)


async def test_a_lock_has_one_holder_at_a_time(connections: Callable[[], Any]):
    first, second = await connections(), await connections()

    async with locks.held(first, "letters", wait_seconds=5):
        with pytest.raises(
            DatabaseUnavailable, match=r"held the lock 'letters' for more than 0\.1"
        ):
            async with locks.held(second, "letters", wait_seconds=0.1):
                pytest.fail("the lock has two holders")

    async with locks.held(second, "letters", wait_seconds=5):
        pass


async def test_another_name_is_another_lock(connections: Callable[[], Any]):
    first, second = await connections(), await connections()

    async with (
        locks.held(first, "letters", wait_seconds=5),
        locks.held(second, "parcels", wait_seconds=5),
    ):
        pass


async def test_the_next_process_gets_the_lock_when_its_holder_dies(connections: Callable[[], Any]):
    """Postgres releases the locks of a killed process, whatever it was doing."""
    first, second, observer = await connections(), await connections(), await connections()
    holder = await first.fetchval("select pg_backend_pid()")
    acquired = asyncio.Event()

    async def wait_for_lock() -> None:
        async with locks.held(second, "letters", wait_seconds=10):
            acquired.set()

    async with locks.held(first, "letters", wait_seconds=5):
        waiting = asyncio.create_task(wait_for_lock())
        await until_tried(observer)
        assert not acquired.is_set()

        await observer.execute("select pg_terminate_backend($1)", holder)
        await waiting
        await until_closed(first)

    assert acquired.is_set()


async def until_tried(observer: Any) -> None:
    await until(
        lambda: observer.fetchval(
            "select count(*) = 2 from pg_stat_activity where datname = current_database()"
            " and query like '%pg_try_advisory_lock%' and pid <> pg_backend_pid()"
        )
    )


async def test_the_lock_is_released_when_the_work_fails(connections: Callable[[], Any]):
    first, second = await connections(), await connections()

    with pytest.raises(ValueError, match="broken"):
        async with locks.held(first, "letters", wait_seconds=5):
            raise ValueError("broken")

    async with locks.held(second, "letters", wait_seconds=0.1):
        pass


async def test_a_silent_connection_costs_one_request(dsn: str):
    """The others are as silent: they are replaced before anyone waits for them."""
    async with Link(dsn).listening() as link, pool(link.dsn, statement_seconds=0.5) as db:
        async with db.connection() as one, db.connection() as other:
            await one.fetchval("select 1")
            await other.fetchval("select 1")
        link.silence()

        with pytest.raises(StatementTimedOut):
            await answer(db)

        async with db.connection() as one, db.connection() as other:
            assert await one.fetchval("select 1") == await other.fetchval("select 1")


async def test_a_reset_session_has_our_settings_again(dsn: str):
    async with pool(dsn, size=1) as db:
        async with db.session() as connection:
            await connection.execute("set search_path = public; set statement_timeout = 0")

        async with db.connection() as connection:
            assert await connection.fetchval("show search_path") == SEARCH_PATH
            assert await connection.fetchval("show statement_timeout") == "20s"
