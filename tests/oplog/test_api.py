"""Changes of tracked tables from Python, on the application's own transaction."""

from typing import Any

import asyncpg
import pytest
from msgspec import Raw
from oplog.captured import OWN, changes_of, log_of, records_of, track

from restante.database.pool import Database
from restante.errors import BadRequest, TableNotTracked
from restante.oplog import api
from restante.wire.oplog import Op

pytestmark = pytest.mark.anyio


@pytest.fixture
async def app(db: Database, dsn: str) -> Any:
    """The application's own connection, with the settings that it has by default."""
    connection = await asyncpg.connect(dsn)
    await connection.execute(
        'create table public.pages (id text primary key, n numeric default 7, "a ""b""" text,'
        " twice numeric generated always as (n * 2) stored)"
    )
    await track(db)
    yield connection
    await connection.close()


async def test_records_are_created_updated_and_deleted(app: Any):
    async with app.transaction():
        created = await api.create(app, "pages", [{"id": "a", 'a "b"': "x"}, {"id": "b", "n": 1.5}])
        updated = await api.update(app, "pages", [{"id": "a", "n": 2}, {"id": "nobody", "n": 2}])
        deleted = await api.delete(app, "pages", [{"id": "b"}, {"id": "nobody"}])

    assert (created, updated, deleted) == (2, 1, 1)
    assert await records_of(app) == [{"id": "a", "n": 2, 'a "b"': "x", "twice": 4}]
    assert [(action, data["id"]) for action, data in await changes_of(app)] == [
        ("c", "a"),
        ("c", "b"),
        ("u", "a"),
        ("d", "b"),
    ]


async def test_a_transaction_that_is_rolled_back_leaves_nothing(app: Any):
    transaction = app.transaction()
    await transaction.start()
    await api.create(app, "pages", [{"id": "a"}])
    await transaction.rollback()

    assert (await records_of(app), await log_of(app)) == ([], [])


@pytest.mark.parametrize(
    ("change", "record", "reason"),
    [
        (api.create, {"id": "a", "nothing": 1}, "no column nothing"),
        (api.create, {"id": "a", "twice": 1}, "no column twice"),
        (api.create, {}, "without any column"),
        (api.update, {"n": 1}, "needs its key id"),
        (api.update, {"id": "a"}, "beside the key"),
        (api.delete, {"n": 1}, "needs its key id"),
    ],
)
async def test_a_record_that_does_not_fit_is_refused(
    app: Any, change: Any, record: dict[str, Any], reason: str
):
    with pytest.raises(BadRequest, match=reason):
        await change(app, "pages", [record])


async def test_a_table_that_is_not_tracked_is_refused(app: Any):
    with pytest.raises(TableNotTracked):
        await api.create(app, "pg_class", [{"relname": "x"}])


async def test_what_the_database_refuses_is_raised_as_the_driver_does(app: Any):
    await api.create(app, "pages", [{"id": "a"}])

    with pytest.raises(asyncpg.UniqueViolationError):
        await api.create(app, "pages", [{"id": "a"}])


async def test_a_transient_op_is_handed_over_and_changes_nothing(app: Any):
    sent: list[Op] = []

    async def send(op: Op) -> int:
        sent.append(op)
        return 3

    queued = await api.transient(app, "pages", [{"id": "a", "typing": True}], send=send)

    (op,) = sent
    assert queued == 3
    assert (op.host, op.action, op.table, op.transient) == (OWN, "update", "pages", True)
    assert op.data == [Raw(b'{"id":"a","typing":true}')]
    assert (await records_of(app), await log_of(app)) == ([], [])
