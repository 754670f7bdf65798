"""What the type json takes and other parsers do not must not hold up the rest of a log."""

import json
from pathlib import Path

import pytest
from oplog.meshes import mesh, reads
from waiting import until

from restante.errors import PeerUnreachable
from restante.oplog import remote

pytestmark = pytest.mark.anyio

ODD = {
    "half a pair": r'{"a": "\ud800"}',
    "the other half": r'{"a": "\udc00 and \ud83d\ude00"}',
    "deep": "[" * 450 + "]" * 450,
    "zero": r'{"a": "\u0000"}',
    "a number": '{"a": 1e400, "b": 12345678901234567890.123456789}',
}


async def test_json_that_only_postgres_takes_holds_nothing_up(cluster: str, tmp_path: Path):
    async with mesh(cluster, tmp_path, 2) as (a, b):
        for node in (a, b):
            await node.sql.execute("create table public.odd (id text primary key, v json)")
            await node.track("odd")
        await reads(b, a)
        for name, value in ODD.items():
            await a.sql.execute("insert into public.odd values ($1, $2)", name, value)
        await a.sql.execute("insert into public.odd values ('last', '{}')")

        await until(lambda: b.sql.fetchval("select true from public.odd where id = 'last'"))

        rows = await b.sql.fetch("select id, v::text from public.odd where id <> 'last'")
        parked = await b.sql.fetch("select key from restante.op_parked")
    applied = {row["id"]: row["v"] for row in rows}
    assert applied == {name: ODD[name] for name in ("deep", "a number")}
    # As the value of a column, Postgres takes these only in SQL, and not in a record.
    assert {json.loads(row["key"])[0] for row in parked} == ODD.keys() - applied.keys()


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
        remote._ops(body)
