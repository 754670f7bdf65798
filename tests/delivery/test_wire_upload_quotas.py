"""Uploads over HTTP: how much may be unacknowledged, for a workspace and for the server."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import (
    Caller,
    Part,
    everything,
    form,
    pattern,
    registered,
    upload_head,
    waits_for_a_lock,
    wire_to,
)
from factories import Counters, counters, sweep_uploads
from sites import SiteFactory
from sweeps import Tally
from waiting import until

from restante.delivery import quotas
from restante.delivery.rules import MIB

pytestmark = pytest.mark.anyio


async def test_the_unacknowledged_bytes_of_a_workspace_are_bounded_to_the_byte(
    run_site: SiteFactory,
):
    async with run_site(workspace_max_bytes=1000) as site:
        caller = await registered(site)
        await caller.staged(Part(bytes(999)))

        too_much = await caller.upload(Part(b"xx"))
        just_right = await caller.upload(Part(b"x"))

    assert (too_much.status, just_right.status) == (429, 200)
    refusal = too_much.json
    assert refusal["code"] == "workspace_full"
    assert (refusal["waiting_bytes"], refusal["max_bytes"]) == (999, 1000)
    frees_at = datetime.fromisoformat(refusal["frees_at"])
    assert timedelta(hours=23) < frees_at - datetime.now(UTC) <= timedelta(days=1)


async def test_the_number_of_unacknowledged_files_of_a_workspace_is_bounded(
    run_site: SiteFactory, connection: Any
):
    async with run_site(workspace_max_files=3) as site:
        caller = await registered(site)
        await caller.staged(Part(), Part())
        before = await everything(connection)

        too_many = await caller.upload(Part(), Part())
        after = await everything(connection)
        just_right = await caller.upload(Part())

    assert (too_many.status, just_right.status) == (429, 200)
    assert (too_many.json["waiting_files"], too_many.json["max_files"]) == (2, 3)
    assert after == before


async def test_a_full_workspace_does_not_affect_another(run_site: SiteFactory):
    async with run_site(workspace_max_files=1) as site:
        full, other = await registered(site), await registered(site)
        await full.staged()

        assert (await full.upload(Part())).status == 429
        assert (await other.upload(Part())).status == 200


async def test_a_request_that_can_never_fit_is_a_413(run_site: SiteFactory, connection: Any):
    async with run_site(workspace_max_bytes=1000, workspace_max_files=2) as site:
        caller = await registered(site)
        for parts in ([Part(bytes(1001))], [Part(bytes(600))] * 2, [Part()] * 3):
            answer = await caller.upload(*parts)
            assert (answer.status, answer.json["code"]) == (413, "quota_too_small")
            assert answer.json["max"] == 1000
        assert await counters(connection, UUID(caller.id)) == Counters()


@pytest.mark.parametrize("way", ["ack", "expiry"])
async def test_there_is_room_again_after_an_acknowledgement_or_an_expiry(
    run_site: SiteFactory, connection: Any, way: str
):
    async with run_site(workspace_max_files=1) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged()
        assert (await caller.upload(Part())).status == 429

        if way == "ack":
            await caller.ack(file_id)
            await caller.ack(file_id)
        else:
            later = datetime.now(UTC) + timedelta(days=2)
            assert await sweep_uploads(connection, now=later) == {"expired": 1}

        waiting = "select waiting_bytes, waiting_files from feeds"
        assert tuple(await connection.fetchrow(waiting)) == (0, 0)
        assert (await caller.upload(Part())).status == 200


async def test_the_sweep_of_an_acknowledged_file_does_not_free_its_room_again(
    caller: Caller, connection: Any
):
    (acked, _) = await caller.staged(Part(b"12345"), Part(b"123"))
    await caller.ack(acked)
    later = datetime.now(UTC) + timedelta(hours=2)

    swept = await sweep_uploads(connection, now=later)

    assert swept == {"acked": 1}
    usage = await connection.fetchrow("select waiting_bytes, waiting_files from feeds")
    assert tuple(usage) == (3, 1)


async def test_room_is_reserved_before_bytes_are_stored(run_site: SiteFactory, connection: Any):
    """The same room cannot be promised to two senders that are both half-way."""
    async with run_site(workspace_max_bytes=10 * MIB) as site:
        caller = await registered(site)
        async with wire_to(site) as wire:
            await wire.send(upload_head(caller, 6 * MIB))
            await wire.send(form(Part(pattern(2 * MIB)), closed=False))
            await until(lambda: connection.fetchval("select count(*) from reservations"))
            usage = await connection.fetchrow("select reserved_bytes, waiting_bytes from feeds")

            second = await caller.upload(Part(pattern(9 * MIB)))
            small = await caller.upload(Part(b"small"))
            wire.close()

        assert MIB < usage["reserved_bytes"] <= 4 * MIB
        assert usage["waiting_bytes"] == 0
        assert (second.status, second.json["code"]) == (429, "workspace_full")
        assert second.json["waiting_bytes"] > MIB
        assert small.status == 200
        await until(lambda: connection.fetchval("select reserved_bytes = 0 from feeds"))
        assert (await caller.upload(Part(pattern(9 * MIB)))).status == 200


async def test_a_refused_request_releases_its_reservation(caller: Caller, connection: Any):
    answer = await caller.upload(Part(pattern(3 * MIB)), Part(b""))

    assert (answer.status, answer.json["code"]) == (400, "upload_malformed")
    assert await counters(connection, UUID(caller.id)) == Counters()
    assert await connection.fetchval("select count(*) from reservations") == 0


async def test_the_commit_replaces_the_reservation_with_the_files(caller: Caller, connection: Any):
    await caller.staged(Part(pattern(5 * MIB)))

    usage = await connection.fetchrow(
        "select reserved_bytes, reserved_files, waiting_bytes, waiting_files from feeds"
    )
    assert tuple(usage) == (0, 0, 5 * MIB, 1)
    assert await connection.fetchval("select count(*) from reservations") == 0


async def test_what_a_killed_server_had_reserved_is_free_when_it_has_expired(
    caller: Caller, connection: Any
):
    await connection.execute("update feeds set reserved_bytes = 70, reserved_files = 1")
    await connection.execute(
        "insert into reservations values ($1, $2, now(), 70, 1, now() - interval '1 s')",
        uuid4(),
        UUID(caller.id),
    )

    # By this pass, or by one that the server makes in the same moment.
    await caller.site.state.sweep.run_prompt(Tally(), now=datetime.now(UTC))

    assert await counters(connection, UUID(caller.id)) == Counters()


async def test_a_reservation_that_expires_during_the_commit_is_freed_once(
    caller: Caller, connection: Any, connections: Any
):
    """The sweep has released it and not committed yet; the publishing statement waits."""
    body = form(Part(pattern(3 * MIB)))
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller, len(body)) + body[:-10])
        await until(lambda: connection.fetchval("select reserved_bytes > $1 from feeds", 3 * MIB))
        sweep = connection.transaction()
        await sweep.start()
        reservation = await connection.fetchval("select id from reservations")
        await quotas.release(connection, reservation)
        await wire.send(body[-10:])
        watcher = await connections()
        await until(lambda: waits_for_a_lock(watcher))
        await sweep.commit()

        answer = await wire.answer()

    assert answer.status == 408
    usage = await connection.fetchrow("select reserved_bytes, waiting_bytes from feeds")
    assert tuple(usage) == (0, 0)


async def test_the_unacknowledged_bytes_of_the_server_are_bounded(
    run_site: SiteFactory, connection: Any
):
    async with run_site(server_max_bytes=10_000) as site:
        one, other = await registered(site), await registered(site)
        await one.staged(Part(bytes(9_000)))
        before = await everything(connection)

        refused = await other.upload(Part(bytes(2_000)))

        assert (refused.status, refused.json["code"]) == (507, "server_full")
        assert await everything(connection) == before


async def test_the_number_of_unacknowledged_files_of_the_server_is_bounded(
    run_site: SiteFactory, connection: Any
):
    async with run_site(server_max_files=5) as site:
        one, other = await registered(site), await registered(site)
        await one.staged(Part(), Part(), Part())
        before = await everything(connection)

        refused = await other.upload(*[Part()] * 3)
        after = await everything(connection)
        just_right = await other.upload(*[Part()] * 2)

    assert (refused.status, refused.json["code"]) == (507, "server_full")
    assert after == before
    assert just_right.status == 200


async def test_a_full_server_has_room_again_after_an_acknowledgement(run_site: SiteFactory):
    async with run_site(server_max_files=1) as site:
        one, other = await registered(site), await registered(site)
        (file_id,) = await one.staged()
        assert (await other.upload(Part())).status == 507

        await one.ack(file_id)

        async def has_room() -> bool:
            return (await other.upload(Part())).status == 200

        await until(has_room)


async def test_many_requests_at_once_do_not_fill_a_server_beyond_its_quota(
    run_site: SiteFactory, connection: Any
):
    """The first requests after a start arrive together, before the sum was read."""
    async with run_site(server_max_files=4) as site:
        callers = [await registered(site) for _ in range(10)]

        answers = await asyncio.gather(*(one.upload(Part()) for one in callers))

    assert sorted(answer.status for answer in answers) == [200] * 4 + [507] * 6
    assert await connection.fetchval("select count(*) from uploads") == 4
