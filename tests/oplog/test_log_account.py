"""The status of the space names the peers that keep ops which are due."""

import pytest
from oplog.nodes import PEER
from oplog.trimmed import DAY, WEEK, age, last_position, make_pages, make_reader, now, write
from sweeps import make_subjects

from restante.database.pool import Database
from restante.retention.space import SpaceAccount

pytestmark = pytest.mark.anyio


async def test_a_peer_that_has_not_read_what_is_due_is_named_with_its_bytes(db: Database):
    table_id = await make_pages(db)
    async with db.connection() as connection:
        await write(connection, 1)
        await age(connection, table_id, 20 * DAY)
        passed = await last_position(connection, table_id)
        await write(connection, 2)
        await age(connection, table_id, 15 * DAY)
    await make_reader(db, str(passed))
    account = SpaceAccount(db, make_subjects(log_limits=WEEK))

    (pin,) = [one for one in (await account.look(now=now())).pins if "peer" in one.who]

    assert pin.who == f"peer {PEER}"
    assert pin.what == "ops that are due, and it has not read it"
    assert "--evict-after-days" in pin.way_out
    assert pin.bytes > 0
    assert 14 * 86400 < pin.seconds < 16 * 86400


async def test_nobody_is_named_while_no_retention_is_set(db: Database):
    await make_pages(db)
    async with db.connection() as connection:
        await write(connection, 1)
    await make_reader(db, "")

    found = await SpaceAccount(db, make_subjects()).look(now=now())

    assert not [one for one in found.pins if "peer" in one.who]
