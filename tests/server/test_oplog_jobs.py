"""What the loops of a server find out about the op log, and whom they tell."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import pytest
from callers import ADMIN
from oplog.nodes import PEER
from oplog.trimmed import DAY, age, last_position, make_pages, make_reader, now, sweep_of, write
from sites import Site, SiteFactory
from watchers import watch_any

from restante.oplog.trimming.limits import Limits, Policy
from restante.server import jobs, parts
from restante.server.loops import Loop
from restante.wire import EvictedPeer

if TYPE_CHECKING:
    from restante.server.app import Services

pytestmark = pytest.mark.anyio


def loops_of(site: Site) -> Mapping[str, Loop]:
    """Loops of another server on the same state, so that a test decides when they run."""
    services, subjects = cast("Services", site.state), parts.subjects_of(site.settings)
    return {one.name: one for one in jobs.loops(site.settings, services, subjects)}


async def make_behind(site: Site) -> None:
    """Ops of 20 and of 15 days ago; a peer has read the former."""
    db = site.state.db
    table_id = await make_pages(db)
    async with db.connection() as connection:
        await write(connection, 1)
        await age(connection, table_id, 20 * DAY)
        passed = await last_position(connection, table_id)
        await write(connection, 2)
        await age(connection, table_id, 15 * DAY)
    await make_reader(db, str(passed))


async def test_the_peer_that_keeps_the_log_is_on_the_page_of_the_metrics(run_site: SiteFactory):
    async with run_site(ops_retention_days=7) as site:
        await make_behind(site)

        await loops_of(site)["oplog_plan"].one_pass()

        registry = site.state.metrics.operator_registry
        peer = {"peer": PEER}
        pinned = registry.get_sample_value("molecule_oplog_pinned_bytes", peer)
        lag = registry.get_sample_value("molecule_oplog_floor_lag_seconds", peer)
    assert pinned is not None
    assert pinned > 0
    assert lag is not None
    assert 14 * 86400 < lag < 16 * 86400


async def test_an_eviction_is_told_to_watchers_and_to_the_application(run_site: SiteFactory):
    """Also one by a command, or by another server, which this one only sees in the tables."""
    async with run_site() as site:
        await make_behind(site)
        look, heard = loops_of(site)["oplog"].one_pass, list[EvictedPeer]()
        site.state.oplog.callbacks.on_eviction(heard.append)
        await look()
        async with watch_any(site, "events", headers=ADMIN) as watcher:
            sweep = sweep_of(site.state.db, Limits(Policy(cap_age=10 * DAY)))
            await sweep.run(now=now())
            await look()

            told = await watcher.event()
        await site.state.oplog.callbacks.call_waiting()

    assert told["event"] == "OPLOG_PEER_EVICTED"
    assert (told["payload"]["peer"], told["payload"]["table"]) == (PEER, "pages")
    assert told["payload"]["cause"] == "cap_age"
    assert told["payload"]["bytes"] > 0
    assert heard[0].peer == PEER
