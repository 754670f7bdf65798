"""Values have one text on every node; keys for which that is not enough are warned of."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from oplog.captured import track

from restante.database.pool import Database, Tx
from restante.oplog.applying import records
from restante.oplog.snapshots import snapshot
from restante.oplog.tables import TrackedTable
from restante.oplog.tracking import triggers
from restante.oplog.verifying import digests

pytestmark = pytest.mark.anyio

PLAIN = "create table public.pages (id text primary key, price money)"


@asynccontextmanager
async def other_settings(db: Database) -> AsyncIterator[Tx]:
    """A transaction in a session that writes values in other ways."""
    async with db.transaction() as tx:
        for name, value in {
            "timezone": "Asia/Tokyo",
            "datestyle": "German",
            "intervalstyle": "iso_8601",
            "extra_float_digits": "0",
            "bytea_output": "escape",
            "lc_monetary": "C.UTF-8",
        }.items():
            await tx.execute("select set_config($1, $2, true)", name, value)
        yield tx


async def applying(tx: Tx, table: TrackedTable) -> None:
    await records.begin(tx, [table])


async def comparing(tx: Tx, _table: TrackedTable) -> None:
    await tx.execute(digests.queries.canonical, "on")


@pytest.mark.parametrize(
    "begin", [applying, snapshot.make_canonical, comparing], ids=["apply", "snapshot", "verify"]
)
async def test_all_that_read_or_write_values_have_the_settings_of_capture(
    db: Database, connections: Any, begin: Any
):
    await (await connections()).execute(PLAIN)
    table = (await track(db)).table

    async with other_settings(db) as tx:
        await begin(tx, table)
        found = {
            name: (await tx.fetchval("select pg_catalog.current_setting($1)", name)).split(",")[0]
            for name in triggers.SETTINGS
            if name != "search_path"
        }

    assert found == {
        name: value.strip("'") for name, value in triggers.SETTINGS.items() if name != "search_path"
    }


LOOSE = [
    "numeric",
    "real",
    "interval",
    "jsonb",
    "numeric[]",
    "numrange",
    "nummultirange",
    "price",
    "price[]",
    "pair",
    "bpchar",
    'text collate "case_blind"',
]
EXACT = ["text", "integer", "uuid", "timestamptz", "money", "bytea", "char(3)", "int4range", "inet"]


@pytest.mark.parametrize(
    ("kind", "is_loose"), [(kind, True) for kind in LOOSE] + [(kind, False) for kind in EXACT]
)
async def test_a_key_whose_equal_values_may_have_different_texts_is_warned_of(
    db: Database, connections: Any, kind: str, is_loose: bool
):
    writer = await connections()
    await writer.execute("set search_path = public")
    await writer.execute("create domain price as numeric")
    await writer.execute("create type pair as (n integer, size interval)")
    # As those of ICU can be, which not every build has.
    await writer.execute("create collation case_blind (locale = 'C')")
    await writer.execute(
        "update pg_collation set collisdeterministic = false where collname = 'case_blind'"
    )
    await writer.execute(f"create table pages (id {kind} primary key)")

    warnings = (await track(db)).warnings

    assert [text.startswith("Equal values of its key (id)") for text in warnings] == (
        [True] if is_loose else []
    )
