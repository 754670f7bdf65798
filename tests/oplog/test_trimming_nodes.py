"""Whole nodes whose logs are bounded: what goes, who is evicted, and how it comes back."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from oplog.meshes import Member, converge, join, mesh
from sweeps import make_subjects, make_sweep
from waiting import until

from restante.oplog import positions
from restante.oplog.pulling.following import Follower
from restante.oplog.trimming.limits import Limits, Policy
from restante.retention import upkeep
from restante.wire import SweepReport

pytestmark = pytest.mark.anyio

DAY = timedelta(days=1)
RETENTION = Limits(Policy(retention=DAY), margin=timedelta(0))
CAP = Limits(Policy(cap_age=DAY), margin=timedelta(0))


async def sweep(node: Member, limits: Limits) -> SweepReport:
    """
    A pass in the future, when the partition in use is over.

    Nobody has noted a time before it, and after it there is a partition in use again.
    """
    await node.sql.execute("update restante.op_node set alive_at = null")
    # A request confirms what an earlier one has not some seconds before.
    await node.sql.execute(
        "update restante.op_peers set confirmed_at = confirmed_at - interval '6 seconds'"
    )
    at = datetime.now(UTC) + 40 * DAY
    report = await make_sweep(node.db, log_limits=limits).run(now=at)
    await upkeep.create_partitions(node.db, make_subjects(), now=datetime.now(UTC))
    return report


@pytest.fixture(autouse=True)
def _short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a peer has read it says with its next request."""

    def at_once(_follower: Follower, _state: object) -> int:
        return 0

    monkeypatch.setattr(Follower, "_wait_seconds", at_once)


async def logged(node: Member) -> int:
    return await node.sql.fetchval("select count(*) from restante.ops")


async def put(node: Member, **bodies: str | None) -> None:
    """Write these records, or delete them."""
    for key, body in bodies.items():
        if body is None:
            await node.sql.execute("delete from notes where id = $1", key)
        else:
            await node.sql.execute(
                "insert into notes values ($1, $2, 1)"
                " on conflict (id) do update set body = excluded.body",
                key,
                body,
            )


def bodies(rows: list[tuple[Any, ...]]) -> dict[str, str]:
    return {row[0]: row[1] for row in rows}


async def test_ops_go_when_all_have_read_them_and_a_slow_peer_is_named(
    cluster: str, tmp_path: Path
):
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await join(a, b, c)
        await put(a, one="1")
        await converge(a, b, c)
        await c.stop()
        await put(b, two="2")
        await converge(a, b)

        async def only_c_is_behind() -> bool:
            postponed = (await sweep(a, RETENTION)).postponed
            assert not postponed
            at = datetime.now(UTC) + 40 * DAY
            (held,) = (await make_sweep(a.db, log_limits=RETENTION).plan(now=at)).held
            return held.why.startswith(f"{c.url} has ") and b.url not in held.why

        await until(only_c_is_behind, seconds=90)
        assert await logged(a) > 0

        await c.start()
        await converge(a, b, c)

        async def is_trimmed() -> bool:
            await sweep(a, RETENTION)
            return await logged(a) == 0

        await until(is_trimmed, seconds=90)
        assert (await a.peer(c))["evictions"] == 0
        await put(c, three="3")
        assert bodies(await converge(a, b, c)) == {"one": "1", "two": "2", "three": "3"}


@pytest.mark.parametrize("why", ["cap", "absence"])
async def test_an_evicted_peer_returns_and_nothing_is_resurrected_or_lost_in_silence(
    cluster: str, tmp_path: Path, why: str
):
    """It had changed, created and deleted records meanwhile, and so had the others."""
    async with mesh(cluster, tmp_path, 3) as (a, b, c):
        await join(a, b, c)
        await put(a, kept="0", deleted_there="0", deleted_by_it="0", changed_by_it="0")
        await put(a, changed_by_both="0", deleted_and_changed="0")
        await converge(a, b, c)
        await until(lambda: _have_read(c, a, b))
        if why == "absence":
            for node in (a, b):
                await node.sql.execute(
                    "update restante.op_peers set evict_after_days = 1 where host = $1", c.url
                )
        await c.stop()
        await put(c, deleted_by_it=None, changed_by_it="c", created_by_it="c")
        await put(c, changed_by_both="c", deleted_and_changed="c")
        await put(a, deleted_there=None, changed_by_both="a", deleted_and_changed=None, new="a")
        await converge(a, b)

        limits = CAP if why == "cap" else RETENTION

        async def is_evicted() -> bool:
            for node in (a, b):
                await sweep(node, limits)
            return [await logged(node) for node in (a, b)] == [0, 0]

        await until(is_evicted, seconds=90)
        for node in (a, b):
            assert (await node.peer(c))["evictions"] == 1

        await c.start()
        await until(lambda: _is_back(c, a, b))
        rows = bodies(await converge(a, b, c))
        assert "deleted_there" not in rows
        assert "deleted_by_it" not in rows
        assert rows["kept"] == "0"
        assert rows["new"] == "a"
        assert rows["changed_by_it"] == "c"
        assert rows["created_by_it"] == "c"
        # Both were changed here and there: one of them has won, and the other one is reported.
        assert rows["changed_by_both"] == "a"
        assert "deleted_and_changed" not in rows
        found = {row["key"] for node in (a, b, c) for row in await _conflicts(node)}
        # A record that comes through another node may have been deleted, and is reported too.
        assert found - {'["created_by_it"]'} == {'["changed_by_both"]', '["deleted_and_changed"]'}


async def _conflicts(node: Member) -> list[Any]:
    return await node.sql.fetch("select key from restante.op_conflicts")


async def _have_read(node: Member, *others: Member) -> bool:
    """Whether others know that it has what they wrote; otherwise it would pass for its own."""
    last = await node.sql.fetchval("select max(ulid::text) from restante.ops")
    cursors = [positions.parsed((await other.peer(node))["cursor"]) for other in others]
    return all(one is not None and str(one.ulid) == last for one in cursors)


async def _is_back(c: Member, *others: Member) -> bool:
    if await c.sql.fetchval("select count(*) from restante.op_snapshots"):
        return False
    rows = [await other.peer(c) for other in others]
    return all(row["evicted_at"] is None for row in rows)
