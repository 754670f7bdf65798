"""`schema.sql`, which is for readers, is what the migrations create."""

import os
import subprocess
from importlib.resources import files
from pathlib import Path

import asyncpg
import pytest

from restante.database.pool import SCHEMA
from restante.postgres.binaries import choose_binaries

pytestmark = pytest.mark.anyio


def dumped(dsn: str) -> list[str]:
    """Everything but the rows, as pg_dump writes it."""
    chosen = os.environ.get("TEST_POSTGRES_BIN")
    pg_dump = choose_binaries(Path(chosen) if chosen else None, major=None).bin_dir / "pg_dump"
    if not pg_dump.exists():
        pytest.skip(f"there is no pg_dump in {pg_dump.parent}")
    done = subprocess.run(
        [pg_dump, "--schema-only", "--no-owner", f"--schema={SCHEMA}", dsn],
        capture_output=True,
        text=True,
        check=True,
    )
    # A line with a backslash is for psql, and contains a secret that changes with each dump.
    return [line for line in done.stdout.splitlines() if line and not line.startswith(("--", "\\"))]


async def test_schema_sql_is_what_the_migrations_create(dsn: str, empty_dsn: str):
    connection = await asyncpg.connect(empty_dsn)
    await connection.execute(files("restante.database").joinpath("schema.sql").read_text())
    await connection.close()

    as_written, as_migrated = dumped(empty_dsn), dumped(dsn)

    assert as_written == as_migrated
    assert any(line.startswith("CREATE TABLE") for line in as_written)
