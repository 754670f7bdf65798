"""A database that accepts no writes: refused with a sentence, not ready, and left on failover."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from callers import Part, ask, registered
from cluster import TEMPLATE, dsn_of, shared_cluster
from processes import restante
from sites import SiteFactory, running_site, settings_for
from waiting import until

from restante.database.pool import Database
from restante.errors import DatabaseForbidden

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("set default_transaction_read_only = off")
        yield connection
    finally:
        await connection.close()


async def set_read_only(dsn: str, *, to: bool) -> None:
    """As an operator does before maintenance; sessions that are open are ended."""
    database = urlsplit(dsn).path[1:]
    async with connected(dsn) as connection:
        await connection.execute(
            f"alter database {database} set default_transaction_read_only = {to}"
        )
        if to:
            await connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )


async def test_a_read_only_database_refuses_writes_is_not_ready_and_recovers(
    dsn: str, run_site: SiteFactory
):
    """Its connections stay read-only when the database no longer is; they must be replaced."""
    async with run_site() as site:
        caller = await registered(site)
        await set_read_only(dsn, to=True)
        await until(lambda: reads_again(caller))

        refused = await caller.upload(Part())
        ready = await ask(site, "GET", "/ready")
        await set_read_only(dsn, to=False)
        await until(lambda: is_ready(site))
        accepted = await caller.upload(Part())

    assert (refused.status, refused.json["code"]) == (503, "database_read_only")
    assert refused.headers["Retry-After"] == "5"
    assert (ready.status, ready.json["code"]) == (503, "not_ready")
    assert "accepts no writes" in ready.json["error"]
    assert accepted.status == 200


async def reads_again(caller: Any) -> bool:
    return (await caller.read_feed()).status == 200


async def is_ready(site: Any) -> bool:
    return (await ask(site, "GET", "/ready")).status == 200


@pytest.fixture
def other_cluster() -> Iterator[str]:
    with shared_cluster() as dsn:
        yield dsn


@pytest.mark.slow
async def test_after_a_failover_writes_go_to_the_host_that_accepts_them(
    dsn: str, other_cluster: str, tmp_path: Path
):
    """The sessions of the demoted host stay open, and refuse every write."""
    database = urlsplit(dsn).path[1:]
    async with connected(other_cluster) as first:
        await first.execute(f"create database {database} template {TEMPLATE}")
        both = hosts(dsn_of(other_cluster, database), dsn)
        async with running_site(settings_for(both, tmp_path)) as site:
            caller = await registered(site)
            await first.execute("alter system set default_transaction_read_only = on")
            await first.execute("select pg_reload_conf()")
            await until(lambda: is_read_only(first))

            refused = await caller.upload(Part())
            later = await registered(site)

    # A background pass may have met the demoted host first; then this is the new host's answer.
    assert refused.json["code"] in {"database_read_only", "workspace_unknown"}
    async with connected(dsn) as second:
        found = await second.fetch("select id from restante.workspaces")
    assert [str(row["id"]) for row in found] == [later.id]


async def is_read_only(connection: Any) -> bool:
    await connection.execute("reset default_transaction_read_only")
    return await connection.fetchval("show default_transaction_read_only") == "on"


def hosts(*dsns: str) -> str:
    """One DSN for several hosts."""
    places = [parse_qs(urlsplit(dsn).query) for dsn in dsns]
    where = ",".join(place["host"][0] for place in places)
    ports = ",".join(place["port"][0] for place in places)
    path = urlsplit(dsns[0]).path
    return f"postgresql://restante@{path}?host={where}&port={ports}&target_session_attrs=read-write"


@pytest.fixture
async def reader_dsn(dsn: str) -> AsyncIterator[str]:
    """The same database, for a role that can only read."""
    async with connected(dsn) as connection:
        role = f"reader_{urlsplit(dsn).path[1:]}"
        await connection.execute(
            f"create role {role}; grant usage on schema restante to {role};"
            f" grant select on all tables in schema restante to {role}"
        )
        yield f"{dsn}&role={role}"
        await connection.execute(f"drop owned by {role}; drop role {role}")


async def test_a_missing_right_is_a_sentence(reader_dsn: str):
    db = await Database.open(
        reader_dsn, pool_size=2, acquire_timeout_seconds=5, statement_timeout_seconds=20
    )

    with pytest.raises(DatabaseForbidden, match=r"lacks a right: permission denied for table"):
        async with db.connection() as connection:
            await connection.execute("delete from uploads")
    await db.close()


async def test_a_command_without_the_right_to_write_prints_one_line(
    dsn: str, reader_dsn: str, tmp_path: Path
):
    async with connected(dsn) as connection:
        await connection.execute(
            "insert into restante.answers"
            " (workspace_id, idempotency_key, fingerprint, answer, expires_at)"
            " values (gen_random_uuid(), 'a key', '', '{}', now() - interval '1 day')"
        )

    outcome = await asyncio.to_thread(
        restante, "sweep", "--data-dir", tmp_path, RESTANTE_DATABASE_URL=reader_dsn
    )

    assert (outcome.code, outcome.stderr.count("\n")) == (1, 1), outcome.stderr
    assert "The database role lacks a right" in outcome.stderr
