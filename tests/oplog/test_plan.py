"""`restante oplog plan` and the limits of a table, as an operator gives and sees them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from oplog.nodes import PEER
from oplog.trimmed import DAY, WEEK, age, make_pages, make_reader, now, write
from processes import Outcome, restante

from restante.database.pool import Database
from restante.oplog.trimming import plan
from restante.oplog.trimming.limits import Limits

pytestmark = pytest.mark.anyio


def run(dsn: str, *words: str) -> Outcome:
    return restante("oplog", *words, "--database-url", dsn, seconds=60, COLUMNS="100")


async def test_the_limits_of_a_table_are_given_changed_and_shown(
    dsn: str, db: Database, connections: Callable[[], Any]
):
    connection = await connections()
    await connection.execute("create table public.pages (id integer primary key)")

    tracked = run(dsn, "track", "pages", "--retention-days", "7")
    changed = run(dsn, "track", "pages", "--retention-days", "default", "--cap-bytes", "1048576")
    view = json.loads(run(dsn, "track", "pages", "--cap-days", "30", "--json").stdout)
    refused = run(dsn, "track", "pages", "--cap-days", "-1")

    assert "Its ops are kept: 7 days.\n" in tracked.stdout
    assert "Its ops are kept: at most 1.0 MiB.\n" in changed.stdout
    assert (view["retention_days"], view["cap_days"], view["cap_bytes"]) == (None, 30, 1048576)
    assert (refused.code, refused.stdout) == (1, "")
    assert "must not be negative" in refused.stderr


async def test_the_plan_names_what_goes_what_stays_and_because_of_whom(
    dsn: str, db: Database, connections: Callable[[], Any]
):
    connection = await connections()
    pages = await make_pages(db)
    await write(connection, 1)
    await age(connection, pages, 20 * DAY)
    await make_reader(db, "")

    found = run(dsn, "plan")
    other = json.loads(run(dsn, "plan", "--ops-cap-days", "10", "--json").stdout)

    assert (found.code, found.stderr) == (0, "")
    assert f"stay because {PEER} has not read the log yet" in " ".join(found.stdout.split())
    assert "0 B would be freed." in found.stdout
    assert all(len(line) <= 100 for line in found.stdout.splitlines())
    (removal,) = other["tables"][0]["removals"]
    assert (removal["cause"], removal["evicts"]) == ("cap_age", [PEER])
    assert other["bytes_to_come_back"] == removal["bytes"] > 0


async def test_a_plan_writes_nothing(db: Database, connections: Callable[[], Any]):
    connection = await connections()
    pages = await make_pages(db)
    await write(connection, 1)
    await age(connection, pages, 20 * DAY)

    async with db.transaction(readonly=True) as tx:
        found = await plan.look(tx, WEEK, now=now())
        nothing = await plan.look(tx, Limits(), now=now())

    assert [one.cause for one in found.tables[0].removals] == ["retention"]
    assert found.tables[0].cut_off is not None
    assert nothing.tables[0].removals == []
    assert nothing.tables[0].cut_off is None
