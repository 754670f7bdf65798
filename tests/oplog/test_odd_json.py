"""What the type json takes and other parsers do not must not hold up the rest of a log."""

import asyncio
import json
import threading
from pathlib import Path

import pytest
from oplog.meshes import Member, mesh, reads
from waiting import until

from restante.errors import PeerUnreachable
from restante.oplog import answers

pytestmark = pytest.mark.anyio

ODD = {
    "half a pair": r'{"a": "\ud800"}',
    "the other half": r'{"a": "\udc00 and \ud83d\ude00"}',
    "deep": "[" * 450 + "]" * 450,
    "zero": r'{"a": "\u0000"}',
    "a number": '{"a": 1e400, "b": 12345678901234567890.123456789}',
}


TABLE = "create table public.odd (id text primary key, v json)"
# As the value of a column, Postgres takes the others only in SQL, and not in a record.
APPLIED = {name: ODD[name] for name in ("deep", "a number")}


async def insert(node: Member) -> None:
    for name, value in ODD.items():
        await node.sql.execute("insert into public.odd values ($1, $2)", name, value)
    await node.sql.execute("insert into public.odd values ('last', '{}')")


async def arrived(node: Member) -> tuple[dict[str, str], set[str]]:
    """What was applied, and what was parked."""
    rows = await node.sql.fetch("select id, v::text from public.odd where id <> 'last'")
    parked = await node.sql.fetch("select data::text from restante.op_parked")
    return {row["id"]: row["v"] for row in rows}, {json.loads(row["data"])["id"] for row in parked}


async def test_json_that_only_postgres_takes_holds_nothing_up(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        for node in (a, b):
            await node.sql.execute(TABLE)
            await node.track("odd")
        await reads(b, a)
        await insert(a)

        await until(lambda: b.sql.fetchval("select true from public.odd where id = 'last'"))

        applied, parked = await arrived(b)
    assert applied == APPLIED
    assert parked == ODD.keys() - APPLIED.keys()


async def test_json_that_only_postgres_takes_does_not_end_a_snapshot(cluster: str, tmp_path: Path):
    """Records from before the table was tracked arrive by a snapshot only."""
    async with mesh(cluster, tmp_path, 2) as (a, b):
        for node in (a, b):
            await node.sql.execute(TABLE)
        await insert(a)
        for node in (a, b):
            await node.track("odd")
        await reads(b, a)

        await until(lambda: b.sql.fetchval("select cursor <> '' from restante.op_peers"))

        applied, parked = await arrived(b)
    assert applied == APPLIED
    assert parked == ODD.keys() - APPLIED.keys()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" + b"1," * 6_000_000 + b"1,[]" * 2_000_000 + b"1]", id="values"),
        pytest.param(
            b"["
            + b",".join(
                [b'{"ulid":"x","host":"h","action":"create","table":"t","data":[]}'] * 30_000
            )
            + b"]",
            id="ops",
        ),
    ],
)
def test_a_page_with_too_many_values_is_refused_before_it_takes_memory(body: bytes):
    with pytest.raises(PeerUnreachable, match="more than"):
        answers.ops(body)


def test_a_page_of_a_snapshot_has_the_same_bound():
    body = b'{"entries":[' + b'{"data":{}},' * 5_000_001 + b"]}"

    with pytest.raises(PeerUnreachable, match="more than 10000000 values"):
        answers.snapshot_page(body)


async def test_other_requests_have_their_turns_while_a_large_page_is_decoded():
    """A page of 64 MiB takes tenths of a second."""
    has_gone_on = threading.Event()

    def decode(_body: bytes) -> bool:
        return has_gone_on.wait(timeout=30)

    decoding = asyncio.create_task(answers.in_thread_if_large(decode, bytes(1024 * 1024)))
    await asyncio.sleep(0)
    has_gone_on.set()

    assert await decoding
