"""What an applied change causes in other tracked tables is a change of this node."""

from datetime import UTC, datetime
from typing import Any

import pytest
from oplog.captured import OWN, log_of, track
from oplog.nodes import NOW, PEER, make_peer, op, pull_from, rows

from restante.database.pool import Database
from restante.oplog.applying.apply import apply_page

pytestmark = pytest.mark.anyio

PARENTS = "create table public.parents (id int primary key)"
CHILDREN = (
    "create table public.children"
    " (id int primary key, parent int references public.parents on delete cascade)"
)


async def test_a_cascade_of_an_applied_delete_is_logged(db: Database, connections: Any):
    """The peer may have a child that we lack, or lack one that we have."""
    connection = await connections()
    for definition, name in ((PARENTS, "parents"), (CHILDREN, "children")):
        await connection.execute(definition)
        await track(db, name)
    await connection.execute("insert into public.parents values (1)")
    await connection.execute("insert into public.children values (7, 1)")
    peer = await make_peer(db)
    now = datetime.now(UTC)
    soon = (now - NOW).total_seconds() + 3600 + 60
    deleted = op("delete", {"id": 1}, at=soon, table="parents")

    await apply_page(
        db,
        [deleted],
        pull_from(peer),
        expected_cursor="",
        end_cursor=deleted.position,
        now=now,
    )

    assert await rows(connection, "children") == []
    assert [(one.action, one.host) for one in await log_of(connection, "parents")] == [
        ("c", OWN),
        ("d", PEER),
    ]
    assert [(one.action, one.host) for one in await log_of(connection, "children")] == [
        ("c", OWN),
        ("d", OWN),
    ]
