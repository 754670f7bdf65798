"""PgBouncer in front of the database: session mode works, the others are refused."""

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from callers import Part, registered
from listeners import reserved_port
from sites import running_site, settings_for
from waiting import until

from restante.database import migrate
from restante.database.pool import SEARCH_PATH, Database
from restante.database.rules import BOTH_PHASES
from restante.errors import PoolerUnusable

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed"),
]

OTHER_MODES = ["transaction", "statement"]


@contextmanager
def pgbouncer(dsn: str, mode: str) -> Iterator[str]:
    """Run it as the owner of the database's socket; yields a DSN that leads through it."""
    where = parse_qs(urlsplit(dsn).query)
    owner = pwd.getpwuid(Path(where["host"][0]).stat().st_uid)
    with (
        reserved_port() as reserved,
        tempfile.TemporaryDirectory(prefix="restante-pgbouncer-") as name,
    ):
        Path(name).chmod(0o755)
        port = reserved.getsockname()[1]
        config = Path(name) / "pgbouncer.ini"
        config.write_text(
            "[databases]\n"
            f"* = host={where['host'][0]} port={where['port'][0]} user=restante\n"
            "[pgbouncer]\n"
            f"listen_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = any\npool_mode = {mode}\ndefault_pool_size = 30\n"
        )
        command = [PGBOUNCER or "", str(config)]
        user = owner.pw_uid if os.getuid() == 0 else None  # it refuses to run as root
        with subprocess.Popen(command, stderr=subprocess.DEVNULL, user=user) as running:
            try:
                yield f"postgresql://restante@127.0.0.1:{port}{urlsplit(dsn).path}"
            finally:
                running.terminate()


@asynccontextmanager
async def pooled(dsn: str, mode: str) -> AsyncIterator[str]:
    with pgbouncer(dsn, mode) as through:
        await until(lambda: accepts(through))
        yield through


async def accepts(dsn: str) -> bool:
    where = urlsplit(dsn)
    with suppress(OSError), socket.create_connection((where.hostname, where.port or 0), 1):
        return True
    return False


async def test_a_server_runs_behind_a_pooler_in_session_mode(empty_dsn: str, tmp_path: Path):
    """All tables are in our schema, and we know which backend has our statements."""
    async with (
        pooled(empty_dsn, "session") as through,
        running_site(settings_for(through, tmp_path)) as site,
    ):
        caller = await registered(site)
        accepted = await caller.upload(Part())
        rows = await caller.feed()
        async with site.state.db.connection() as connection:
            search_path = await connection.fetchval("show search_path")
            backend = await connection.fetchval("select pg_backend_pid()")
            assert connection.backend.pid == backend

    assert (accepted.status, len(rows), search_path) == (200, 1, SEARCH_PATH)
    assert await schemas(empty_dsn) == {"restante"}


async def schemas(dsn: str) -> set[str]:
    """The schemas that have tables."""
    connection = await asyncpg.connect(dsn)
    found: Any = await connection.fetch(
        "select distinct schemaname from pg_tables"
        " where schemaname not in ('pg_catalog', 'information_schema')"
    )
    await connection.close()
    return {row["schemaname"] for row in found}


@pytest.mark.parametrize("mode", OTHER_MODES)
async def test_the_other_modes_are_refused_and_nothing_is_created(empty_dsn: str, mode: str):
    async with pooled(empty_dsn, mode) as through:
        for _ in range(3):
            with pytest.raises(PoolerUnusable, match="Restante needs session mode"):
                await migrate.apply(through, migrate.shipped(), phases=BOTH_PHASES)

    assert await schemas(empty_dsn) == set()


@pytest.mark.parametrize("mode", OTHER_MODES)
async def test_a_refused_pooler_keeps_none_of_our_settings(dsn: str, mode: str):
    """Its backends serve other applications too."""
    async with pooled(dsn, mode) as through:
        with pytest.raises(PoolerUnusable):
            await Database.open(
                through, pool_size=2, acquire_timeout_seconds=5, statement_timeout_seconds=20
            )
        connection = await asyncpg.connect(through, statement_cache_size=0)
        search_path = await connection.fetchval("show search_path")
        await connection.close()

    assert search_path == '"$user", public'
