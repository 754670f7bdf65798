"""Columns may have any name, also one that our statements use for something else."""

import json
import re
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from msgspec import Raw
from oplog.captured import log_of, records_of
from oplog.direct import SERVER, TAKER, Direct, Node, clock, new_node, take

from restante.oplog import api, tables, ulids
from restante.oplog.applying import statements
from restante.oplog.applying.apply import Source, apply_page
from restante.oplog.applying.statements import Target
from restante.oplog.rules import Channel
from restante.oplog.snapshots import snapshot, taking_page
from restante.oplog.tables import Column
from restante.oplog.tracking import triggers
from restante.oplog.verifying import comparison, digests
from restante.oplog.verifying.comparison import Here, Limits, Progress
from restante.oplog.verifying.verify import verify
from restante.wire import oplog as wire
from restante.wire.oplog_digests import KeyOrder, NodeDescription

pytestmark = pytest.mark.anyio

ACTIONS: dict[str, wire.ActionName] = {"c": "create", "u": "update", "d": "delete"}

_ALIAS = re.compile(r"\bas (?:materialized )?([a-z_]\w*)(?: ?\(([a-z]\w*(?:, [a-z]\w*)*)\))?")
_WITH = re.compile(r"\bwith (\w+) as")
_DECLARED = re.compile(r"^ {4}(\w+) (?:constant )?\w+(?:\[\])?(?: :=.*)?;$", re.MULTILINE)
_COMMENT = re.compile(r"--.*")
_NO_NAMES = {"xmin", "end", "return", "materialized", "ordinality"}


def our_names() -> list[str]:
    """What the statements on users' tables call things: aliases, columns, variables."""
    found = {"k0", "k1", "capture", "json_populate_record", "json_populate_recordset"}
    for text in _statements():
        bare = _COMMENT.sub("", text)
        found.update(_WITH.findall(bare), _DECLARED.findall(bare))
        for name, columns in _ALIAS.findall(bare):
            found |= {name, *filter(None, columns.split(", "))}
    return sorted(found - _NO_NAMES)


def _statements() -> Iterator[str]:
    for module in (snapshot, taking_page, digests, triggers, api):
        for name in module.queries:
            if "{" in (text := getattr(module.queries, name)):
                yield text
    target = Target("pages", "ops_1", ("id",), (_column("id"), _column("body")))
    keys = statements.of_keys(target)
    yield from (*keys.lock, keys.facts, keys.delete)
    yield statements.insert(target, frozenset({"id", "body"}))
    yield statements.update(target, frozenset({"id", "body"})) or ""


def _column(name: str) -> Column:
    return Column(name, "integer", is_generated=False, is_nullable=True, has_default=False)


NAMES = our_names()


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "MAX_RECORDS", 5)
    monkeypatch.setattr(snapshot, "MAX_ASKED_KEYS", 5)
    monkeypatch.setattr(snapshot, "MAX_SCANNED_KEYS", 5)
    monkeypatch.setattr(comparison, "ROWS_PER_RANGE", 2)
    monkeypatch.setattr(comparison, "_RANGES_AT_ONCE", 3)
    monkeypatch.setattr(comparison, "_RANGES_AT_ONCE_BY_TEXT", 3)
    monkeypatch.setattr(comparison, "_LOOK_AGAIN_SECONDS", 0.01)


async def pull(server: Node, taker: Node, names: Sequence[str]) -> None:
    """Apply what the server has captured."""
    ops = [
        wire.Op(
            ulids.text_of(one.ulid),
            one.host,
            ACTIONS[one.action],
            name,
            [Raw(json.dumps(one.data).encode())],
        )
        for name in names
        for one in await log_of(server.sql, name)
    ]
    peer = await taker.peer()
    source = Source(peer, Channel.PULL, None)
    end = str(await server.head())
    result = await apply_page(
        taker.db, ops, source, expected_cursor=peer.cursor, end_cursor=end, now=clock()
    )
    assert (result.stopped, result.parked, result.refused_by) == (None, 0, {})


async def tables_of(node: Node) -> list[tables.TrackedTable]:
    async with node.db.connection() as connection:
        return await tables.all_tables(connection)


async def side(node: Node) -> Here:
    return Here(node.db, (await node.peer()).id, None)


class OtherOrder(Here):
    """A side whose keys have another order, so that keys are compared as texts."""

    async def describe(self) -> NodeDescription:
        found = await super().describe()
        others = [msgspec.structs.replace(table, order="another") for table in found.tables]
        return msgspec.structs.replace(found, tables=others)


async def differences(server: Node, taker: Node) -> dict[str, list[tuple[str, str]]]:
    """The keys of each table that differ, by the order of the index and by text."""
    found: list[dict[str, list[tuple[str, str]]]] = []
    for kind in (Here, OtherOrder):
        report = await verify(
            await side(taker),
            kind(server.db, (await server.peer()).id, None),
            SERVER,
            limits=Limits(wait_seconds=0),
            progress=Progress(),
        )
        found.append(
            {one.table: sorted((key.key, key.what) for key in one.keys) for one in report.tables}
        )
    assert found[0] == found[1]
    return found[0]


async def different(server: Node, taker: Node, names: Sequence[str]) -> list[str]:
    """The names of the tables that are not equal."""
    return [
        name
        for name in names
        if await records_of(server.sql, name) != await records_of(taker.sql, name)
    ]


async def through_everything(cluster: str, columns: dict[str, tuple[str, str, str]]) -> None:
    """Tables by name: their definition, their key, and another column that is an integer."""
    names = sorted(columns)
    definitions = {name: columns[name][0] for name in names}
    async with (
        new_node(cluster, SERVER, TAKER, definitions) as server,
        new_node(cluster, TAKER, SERVER, definitions) as taker,
    ):
        for name, (_, key, other) in columns.items():
            await write(server, name, key, other)
        await pull(server, taker, names)
        assert not await different(server, taker, names)

        # The server has read what the taker has now, deletes a record, and forgets its log.
        await server.sql.execute(
            "update restante.op_peers set cursor = $1", str(await taker.head())
        )
        for name, (_, key, other) in columns.items():
            await server.sql.execute(f'delete from {name} where "{key}" in (3, 11)')
            await taker.sql.execute(f'insert into {name} ("{key}", "{other}") values (50, 5)')
        await server.drop_log()
        for name, (_, key, other) in columns.items():
            await server.sql.execute(f'delete from {name} where "{key}" = 4')
            await server.sql.execute(f'update {name} set "{other}" = 77 where "{key}" = 5')
        await take(server, taker)
        only_taker = [("[50]", "missing_there")]
        assert await differences(server, taker) == dict.fromkeys(names, only_taker)

        for table in await tables_of(taker):
            _, key, other = columns[table.name]
            # What no trigger sees.
            await taker.sql.execute(
                "select set_config('restante.applying', $1, false)", str(table.id)
            )
            await taker.sql.execute(f'update {table.name} set "{other}" = 99 where "{key}" = 2')
            await taker.sql.execute(f'delete from {table.name} where "{key}" = 12')
        await taker.sql.execute("reset restante.applying")
        damaged = [("[12]", "missing_here"), ("[2]", "different"), *only_taker]
        assert await differences(server, taker) == dict.fromkeys(names, damaged)
        await take(server, taker, is_repair=True)
        assert await differences(server, taker) == dict.fromkeys(names, only_taker)


async def write(server: Node, name: str, key: str, other: str) -> None:
    """Every way of capture: one record, many, a key that changes, and the Python functions."""
    await server.sql.execute(
        f'insert into {name} ("{key}", "{other}") select n, n from generate_series(13, 1, -1) n'
    )
    await server.sql.execute(f'update {name} set "{other}" = 20 where "{key}" = 6')
    await server.sql.execute(f'update {name} set "{other}" = 30 where "{key}" in (7, 8)')
    await server.sql.execute(f'update {name} set "{key}" = 14 where "{key}" = 13')
    await server.sql.execute(f'delete from {name} where "{key}" in (9, 14)')
    async with server.sql.transaction():
        assert await api.create(server.sql, name, [{key: 15, other: 1}, {key: 16, other: 1}]) == 2
        assert await api.update(server.sql, name, [{key: 15, other: 2}]) == 1
        assert await api.delete(server.sql, name, [{key: 16}]) == 1


async def test_a_key_may_have_any_name(cluster: str):
    """In pages of a few records, whose order shows if the name meant something else."""
    columns = {
        f"keyed_{n}": (f'"{name}" integer primary key, value integer', name, "value")
        for n, name in enumerate(NAMES)
    }
    definitions = {name: one[0] for name, one in columns.items()}
    async with (
        new_node(cluster, SERVER, TAKER, definitions) as server,
        new_node(cluster, TAKER, SERVER, definitions) as taker,
    ):
        for name, (_, key, other) in columns.items():
            await write(server, name, key, other)
        await pull(server, taker, list(columns))
        assert not await different(server, taker, list(columns))

        for table in await tables_of(taker):
            _, key, other = columns[table.name]
            await taker.sql.execute(f'insert into {table.name} ("{key}", "{other}") values (50, 5)')
            await check_pages(taker, server, table)


KEYS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 15]


async def check_pages(taker: Node, server: Node, table: tables.TrackedTable) -> None:
    """The pages of a snapshot, what only the taker has, and the ranges that are compared."""
    (key,) = table.key_columns
    remote, peer = Direct(server), await taker.peer()
    start = (await remote.begin_snapshot(peer, table.name)).start
    found, after = list[int](), ""
    while after is not None:
        asked = wire.SnapshotPageRequest(table.name, start, "records", after)
        page = await remote.snapshot_page(peer, asked)
        found += [json.loads(bytes(one.data))[key] for one in page.entries]
        after = page.next
    assert found == KEYS, key

    owned, after = list[str](), ""
    while more := await taking_page.own_keys(taker.db, table, after):
        owned += more
        after = more[-1]
    assert [json.loads(one)[key] for one in owned] == [*KEYS, 50], key
    for some in (owned[:5], owned[-5:]):
        keys = [Raw(one.encode()) for one in some]
        asked = wire.SnapshotKeysRequest(table.name, start, keys)
        page = await remote.snapshot_missing(peer, asked)
        missing = [json.loads(bytes(one.data))[key] for one in page.entries]
        assert missing == ([] if some == owned[:5] else [50]), key

    cuts: dict[KeyOrder, str] = {
        "index": "[2] [4] [6] [8] [11] [15]",
        "text": "[11] [15] [2] [4] [6] [8]",
    }
    for order, ends in cuts.items():
        cut = await digests.cut(server.db, table, order, None, rows=12, each=2)
        assert cut == ends.split(), (key, order)


async def test_columns_may_have_any_name(cluster: str):
    """All of them at once, beside a key; and those that were mistaken before, as keys."""
    columns = ", ".join(f'"{name}" integer' for name in NAMES)
    await through_everything(
        cluster,
        {
            "beside": (f'"the key" integer primary key, {columns}', "the key", "t"),
            **{
                f"keyed_by_{name}": (
                    f'{columns}, value integer, primary key ("{name}")',
                    name,
                    "value",
                )
                for name in ("t", "at", "key", "before", "size", "n", "is_end")
            },
        },
    )


def test_the_names_are_found():
    """Else nothing would be tested."""
    wanted = {"t", "r", "n", "o", "s", "k", "at", "key", "before", "size", "is_end", "asked"}
    assert wanted <= set(NAMES)
    assert {"edges", "after", "through", "newest", "era", "ulids", "sized"} <= set(NAMES)
