"""
Readers get every op once, while transactions commit in any order and ops arrive late.

The reader in the order of ULIDs is there to show that the run would catch a mistake.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from oplog.logs import Page, Reader, add_table, append, old_reader, own_reader
from sites import Site, SiteFactory

from restante.oplog import ulids
from restante.wire import oplog as wire

pytestmark = pytest.mark.anyio

WRITERS = 8
TRANSACTIONS = 40
LATE_SHARE = 0.05
LONG_SHARE = 0.2
PAGE = 20


class Written:
    """What the writers have committed."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.is_over = asyncio.Event()


async def write(connection: Any, table: int, number: int, written: Written, seed: int) -> None:
    """Short and long transactions; some ops are those of a peer that was away."""
    chance = random.Random(seed + number)
    for turn in range(TRANSACTIONS):
        async with connection.transaction():
            made: list[int] = []
            for part in range(chance.randint(1, 4)):
                one = number * 1_000_000 + turn * 1000 + part
                late = None
                if chance.random() < LATE_SHARE:
                    moment = await connection.fetchval("select clock_timestamp()")
                    ago = timedelta(seconds=chance.uniform(1, 3600))
                    late = UUID(int=ulids.lowest_at(moment - ago).int + chance.getrandbits(60))
                await append(connection, table, {"id": one}, {"id": -one - 1}, ulid=late)
                made += [one, -one - 1]
            if chance.random() < LONG_SHARE:
                await connection.fetchval("select pg_sleep($1)", chance.uniform(0, 0.05))
        written.ids += made


async def read_all(
    read: Callable[[str], Awaitable[tuple[list[int], str]]], written: Written
) -> list[int]:
    """Read page after page until the writers are done and nothing more comes."""
    seen: list[int] = []
    cursor = ""
    while True:
        was_over = written.is_over.is_set()
        found, cursor = await read(cursor)
        seen += found
        if was_over and not found:
            return seen


def by_position(reader: Reader) -> Callable[[str], Awaitable[tuple[list[int], str]]]:
    async def read(cursor: str) -> tuple[list[int], str]:
        page = await reader.read(position=cursor, limit=PAGE, wait=0.2)
        return ids_of(page), page.headers[wire.NEXT_POSITION]

    return read


def by_ulid(
    reader: Reader, *, knows_scanned: bool
) -> Callable[[str], Awaitable[tuple[list[int], str]]]:
    """As the two generations of the existing program do: the newer one knows one header more."""

    async def read(cursor: str) -> tuple[list[int], str]:
        page = await reader.read(after=cursor, limit=PAGE)
        if page.ops:
            cursor = page.ulids[-1]
        scanned = page.headers.get(wire.LAST_SCANNED_ULID, "")
        return ids_of(page), max(cursor, scanned) if knows_scanned else cursor

    return read


def in_ulid_order(connection: Any) -> Callable[[str], Awaitable[tuple[list[int], str]]]:
    async def read(cursor: str) -> tuple[list[int], str]:
        rows = await connection.fetch(
            "select ulid, (data->>'id')::bigint as id from restante.ops where ulid > $1 "
            "order by ulid, n limit $2",
            ulids.parsed(cursor) or ulids.LOWEST,
            2 * PAGE,
        )
        return [row["id"] for row in rows], ulids.text_of(rows[-1]["ulid"]) if rows else cursor

    return read


def ids_of(page: Page) -> list[int]:
    return [record["id"] for record in page.records]


async def test_readers_get_every_op_exactly_once(run_site: SiteFactory, connections: Any):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    async with run_site() as site:
        seen, written = await run(site, connections, seed)

    for name in ("position", "older", "newer"):
        counted = Counter(seen[name])
        assert set(counted) == set(written.ids), name
        assert max(counted.values()) == 1, name
    missed = set(written.ids) - set(seen["in the order of ULIDs"])
    assert missed, "a reader that does it wrong misses nothing, so this test sees nothing"


async def run(site: Site, connections: Any, seed: int) -> tuple[dict[str, list[int]], Written]:
    setup = await connections()
    table, other = await add_table(setup, "files"), await add_table(setup, "others")
    written, unseen = Written(), Written()
    visible: dict[str, Any] = {"tables": ["files"]}
    readers = {
        "position": by_position(await own_reader(site, "http://own.example", **visible)),
        "older": by_ulid(
            await old_reader(site, "http://older.example", **visible), knows_scanned=False
        ),
        "newer": by_ulid(
            await old_reader(site, "http://newer.example", **visible), knows_scanned=True
        ),
        "in the order of ULIDs": in_ulid_order(await connections()),
    }
    writers = [
        write(await connections(), table, number, written, seed) for number in range(WRITERS)
    ]
    writers.append(write(await connections(), other, WRITERS, unseen, seed))

    async def write_all() -> None:
        await asyncio.gather(*writers)
        written.is_over.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write_all())
        reading = {
            name: tasks.create_task(read_all(read, written)) for name, read in readers.items()
        }
    return {name: task.result() for name, task in reading.items()}, written
