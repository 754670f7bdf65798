"""The program in the embedding guide runs as it is written."""

import asyncio
import re
import sys
from pathlib import Path

import asyncpg
import pytest
from processes import clean_environment

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs/embedding.md").read_text()


async def test_the_example_commits_its_order_and_both_files_together(empty_dsn: str):
    """A reader pastes it, and sets DATABASE_URL."""
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)

    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", program),
        env=clean_environment(DATABASE_URL=empty_dsn),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()

    assert (process.returncode, errors) == (0, b"")
    assert b"invoice.txt One lamp: 40." in output
    assert b"warranty.txt Two years." in output
    connection = await asyncpg.connect(empty_dsn)
    orders = await connection.fetchval("select count(*) from public.orders")
    acked = await connection.fetchval(
        "select count(*) from restante.uploads where acked_at is not null"
    )
    await connection.close()
    assert (orders, acked) == (1, 2)
