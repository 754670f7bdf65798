"""Room is claimed with the bytes that arrive, kept while they do, and free soon after."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest
from callers import Part, form, pattern, registered, upload_head, wire_to
from factories import (
    DAY,
    HOUR,
    NOW,
    Counters,
    Parts,
    counters,
    make_parts,
    make_workspace,
)
from hypothesis import given, strategies as st
from sites import SiteFactory
from sweeps import CHUNKS, actions, make_partition, make_sweep, partition_names

from restante.database import shares
from restante.database.pool import Connection, Database
from restante.database.spans import floor
from restante.delivery import quotas, reservations, stage
from restante.delivery.quotas import RESERVED_FOR
from restante.delivery.receive import Incoming, Receiver
from restante.delivery.reservations import Room
from restante.delivery.rules import MAX_REQUEST_BYTES, MIB, Quota, claim_for
from restante.delivery.stage import NewFile
from restante.delivery.subject import DROP_BUCKET, Buckets, ExpiredReservations
from restante.errors import (
    BadRequest,
    DatabaseUnavailable,
    QuotaTooSmall,
    ServerFull,
    WorkspaceFull,
)
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

sizes = st.integers(1, MAX_REQUEST_BYTES)


@pytest.fixture
def receiver(parts: Parts) -> Receiver:
    return parts.receiver


async def write(incoming: Incoming, size: int) -> None:
    """More of a file that does not end."""
    if incoming.open_file is None:
        await incoming.begin_file("a.bin", "", now=NOW)
    await incoming.write(bytes(size), now=NOW)


async def publish(incoming: Incoming) -> None:
    await incoming.end_file(now=NOW)
    await incoming.publish(now=NOW)


async def expire(connection: Any) -> int:
    """Release every reservation, as a server does when they have expired."""
    released = await ExpiredReservations().delete_due(connection, now=NOW + DAY)
    return released["reservations"]


async def seconds_left(connection: Any) -> float:
    return await connection.fetchval(
        "select extract(epoch from expires_at - clock_timestamp())::float from reservations"
    )


# Claims ------------------------------------------------------------------------------------------


@given(sizes, st.none() | sizes, sizes)
def test_a_claim_is_at_most_twice_what_has_arrived(arrived: int, declared: int | None, most: int):
    """Who wants to take room from others must send as much."""
    claim = claim_for(arrived, declared, Quota(max(most, arrived), 1))

    assert arrived <= claim <= min(2 * arrived, arrived + 4 * MIB)
    assert claim <= max(arrived, declared or claim)
    assert claim <= max(most, arrived)


async def test_declared_sizes_take_no_room(run_site: SiteFactory):
    """Senders that declare much and send nothing do not make the server refuse others."""
    async with run_site(server_max_bytes=100 * MIB) as site, AsyncExitStack() as silent:
        attacker, other = await registered(site), await registered(site)
        for _ in range(6):
            wire = await silent.enter_async_context(wire_to(site))
            await wire.send(upload_head(attacker, 50 * MIB) + form(Part(b"x"), closed=False))

        answer = await other.upload(Part(pattern(3 * MIB)))

    assert answer.status == 200


async def test_a_workspace_claims_no_more_of_the_server_than_its_own_quota(
    db: Database, workspace_id: WorkspaceId
):
    """Even before anything of its uploads is reserved."""
    receiver = make_parts(db, quota=Quota(1000, 100), server=Quota(3000, 100)).receiver
    async with AsyncExitStack() as arriving:
        for _ in range(2):
            incoming = await arriving.enter_async_context(receiver.receive(workspace_id, 500))
            await write(incoming, 500)
        third = await arriving.enter_async_context(receiver.receive(workspace_id, 500))

        with pytest.raises(WorkspaceFull):
            await write(third, 500)


async def test_the_reservation_grows_with_the_bytes(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    reserved: list[int] = []
    async with receiver.receive(workspace_id, 20 * MIB) as incoming:
        for size in (MIB, MIB, 6 * MIB, 12 * MIB):
            await write(incoming, size)
            reserved.append((await counters(connection, workspace_id)).reserved_bytes)
        await publish(incoming)

    assert reserved == [2 * MIB, 2 * MIB, 12 * MIB, 20 * MIB]
    assert await counters(connection, workspace_id) == Counters(1, 20 * MIB, 1)


@pytest.mark.parametrize("declared", [9 * MIB, 8 * MIB + 10_000, 20 * MIB])
async def test_a_declared_size_above_the_quota_is_a_413_whatever_waits(
    db: Database, workspace_id: WorkspaceId, declared: int
):
    """An acknowledgement makes no room for it, so its sender must not retry."""
    parts = make_parts(db, quota=Quota(8 * MIB, 10))
    await parts.stage(workspace_id, bytes(100))

    with pytest.raises(QuotaTooSmall):
        async with parts.receiver.receive(workspace_id, declared) as incoming:
            await write(incoming, 2 * MIB)


async def test_a_declared_size_that_does_not_fit_now_is_refused_with_its_first_bytes(
    db: Database, workspace_id: WorkspaceId
):
    parts = make_parts(db, quota=Quota(8 * MIB, 10))
    await parts.stage(workspace_id, bytes(3 * MIB))

    with pytest.raises(WorkspaceFull):
        async with parts.receiver.receive(workspace_id, 6 * MIB) as incoming:
            await write(incoming, MIB)
    with pytest.raises(ServerFull):
        async with make_parts(db, server=Quota(8 * MIB, 10)).receiver.receive(
            workspace_id, 6 * MIB
        ):
            pass


async def test_a_body_that_stands_still_is_cut_off(run_site: SiteFactory, connection: Any):
    """Long before the time that its size would give it, and its room is free at once."""
    async with run_site(upload_idle_seconds=0.3) as site:
        caller = await registered(site)
        async with wire_to(site) as wire:
            await wire.send(upload_head(caller, 50 * MIB))
            await wire.send(form(Part(pattern(2 * MIB)), closed=False))

            answer = await wire.answer()

        assert (answer.status, answer.json["code"]) == (408, "upload_too_slow")
        assert "No more of the body arrived" in answer.json["error"]
        assert await connection.fetchval("select reserved_bytes from feeds") == 0


# Lasting -----------------------------------------------------------------------------------------


class UncertainDatabase(Database):
    """Cannot be reached while `is_away`."""

    def __init__(self, db: Database) -> None:
        super().__init__(db._pool, acquire_timeout_seconds=5)
        self.is_away = False

    @asynccontextmanager
    async def connection(self, *, wait_seconds: float | None = None) -> AsyncIterator[Connection]:
        if self.is_away:
            raise DatabaseUnavailable("The database is away.")
        async with super().connection(wait_seconds=wait_seconds) as connection:
            yield connection


async def test_a_reservation_lasts_half_a_minute_whatever_was_declared(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    async with receiver.receive(workspace_id, 50 * MIB) as incoming:
        await write(incoming, 2 * MIB)

        assert 0 < await seconds_left(connection) <= RESERVED_FOR.total_seconds() == 30


async def test_a_reservation_is_renewed_while_no_byte_arrives(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    async with receiver.receive(workspace_id, 50 * MIB) as incoming:
        await write(incoming, 2 * MIB)
        await connection.execute("update reservations set expires_at = now() + interval '1 s'")

        await receiver.reservations.renew()

        assert await seconds_left(connection) > 20
        assert await expire(connection) == 1  # it is not locked


async def test_renewing_uses_no_share_of_the_caller_whose_upload_began_it(
    receiver: Receiver, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    """A caller that uses up its share would let the reservations of all others expire."""
    used: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def renew() -> None:
        used.set_result(shares.caller.get())
        await asyncio.Event().wait()

    monkeypatch.setattr(reservations, "_RENEWED_EVERY_SECONDS", 0)
    monkeypatch.setattr(receiver.reservations, "renew", renew)
    before = shares.caller.set(workspace_id)
    try:
        async with receiver.receive(workspace_id, 50 * MIB) as incoming:
            await write(incoming, 2 * MIB)

            assert await used is None
    finally:
        shares.caller.reset(before)  # all tests of a process run in one context


async def test_an_upload_that_is_being_published_does_not_stop_the_renewal_of_others(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    application, receiver = await connections(), parts.receiver
    async with (
        receiver.receive(workspace_id, 50 * MIB) as one,
        receiver.receive(workspace_id, 50 * MIB) as other,
    ):
        await write(one, 2 * MIB)
        await one.end_file(now=NOW)
        await write(other, 2 * MIB)
        await connection.execute("update reservations set expires_at = now()")
        async with application.transaction():
            await one.publish_in(application, now=NOW)

            await receiver.reservations.renew()

        assert await seconds_left(connection) > 20


async def test_an_upload_that_goes_on_after_its_reservation_expired_gets_another(
    receiver: Receiver, connection: Any, workspace_id: WorkspaceId
):
    """The database was away for longer than a reservation lasts, and another server swept."""
    async with receiver.receive(workspace_id, 5 * MIB) as incoming:
        await write(incoming, 2 * MIB)
        await stale(incoming, connection)
        await write(incoming, 3 * MIB)
        again = await counters(connection, workspace_id)
        await stale(incoming, connection)
        await publish(incoming)

    assert again.reserved_bytes == 5 * MIB
    assert await counters(connection, workspace_id) == Counters(1, 5 * MIB, 1)
    assert await connection.fetchval("select sum(octet_length(bytes)) from chunks") == 5 * MIB
    assert await connection.fetchval("select count(*) from reservations") == 0


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_a_reservation_that_was_locked_during_its_renewal_is_reserved_again(
    receiver: Receiver,
    connection: Any,
    workspace_id: WorkspaceId,
    connections: Any,
    is_deleted: bool,
):
    """The sweep of another server may be deleting it, and then nothing protects its room."""
    sweeper = await connections()
    async with receiver.receive(workspace_id, 2 * MIB) as incoming:
        await write(incoming, 2 * MIB)
        transaction = sweeper.transaction()
        await transaction.start()
        assert await expire(sweeper) == 1

        await receiver.reservations.renew()
        await (transaction.commit() if is_deleted else transaction.rollback())
        await publish(incoming)

    assert await counters(connection, workspace_id) == Counters(1, 2 * MIB, 1)
    assert await connection.fetchval("select count(*) from reservations") == 0


async def stale(incoming: Incoming, connection: Any) -> None:
    """Its reservation was not renewed for too long, and is released."""
    if incoming._writing:
        await incoming._writing
    incoming.room.renewed_at -= RESERVED_FOR.total_seconds()
    assert await expire(connection) == 1


async def test_an_upload_is_refused_if_its_room_was_taken_meanwhile(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    parts = make_parts(db, quota=Quota(6 * MIB, 10))
    async with parts.receiver.receive(workspace_id, 5 * MIB) as incoming:
        await write(incoming, 2 * MIB)
        await stale(incoming, connection)
        await make_parts(db).stage(workspace_id, bytes(3 * MIB))

        with pytest.raises(WorkspaceFull):
            await write(incoming, 3 * MIB)

    assert await counters(connection, workspace_id) == Counters(1, 3 * MIB, 1)


async def test_a_release_that_failed_is_tried_again(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Ten seconds without a database must not leave room reserved for an hour."""
    uncertain = UncertainDatabase(db)
    receiver = make_parts(uncertain).receiver
    async with receiver.receive(workspace_id, 50 * MIB) as incoming:
        await write(incoming, 2 * MIB)
        uncertain.is_away = True
    left = (await counters(connection, workspace_id)).reserved_bytes
    with pytest.raises(DatabaseUnavailable):
        await receiver.reservations.renew()
    uncertain.is_away = False

    await receiver.reservations.renew()

    assert left > 0
    assert await counters(connection, workspace_id) == Counters()


async def test_a_transaction_that_outlives_its_block_frees_its_room_within_a_minute(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """Its rollback brings the reservation back, which nobody renews."""
    application = await connections()
    transaction = application.transaction()
    await transaction.start()

    async def stage() -> None:
        async with parts.receiver.receive(workspace_id, 2 * MIB) as incoming:
            await write(incoming, 2 * MIB)
            await incoming.end_file(now=NOW)
            await incoming.publish_in(application, now=NOW)

    with pytest.raises(BadRequest, match="End the transaction"):
        await stage()
    await transaction.rollback()

    await parts.receiver.reservations.renew()

    assert await seconds_left(connection) <= 30
    await expire(connection)
    assert await counters(connection, workspace_id) == Counters()


async def test_a_changed_reservation_counts_once(connection: Any, workspace_id: WorkspaceId):
    """Growing, renewing and taking it again leave the counters exact."""
    other = await make_workspace(connection)
    quota, room = Quota(1000, 10), Room(workspace_id, expected_bytes=0)
    for size in (100, 300, 300, 200):
        wanted = quotas.Reservation(room.id, workspace_id, quotas.Usage(size, 1))
        assert await quotas.reserve(connection, wanted, quota)
    too_much = quotas.Reservation(room.id, workspace_id, quotas.Usage(1001, 1))

    assert await quotas.reserve(connection, too_much, quota) is None
    assert await counters(connection, workspace_id) == Counters(
        reserved_bytes=200, reserved_files=1
    )
    await quotas.release(connection, room.id)
    assert await counters(connection, workspace_id) == Counters()
    assert await counters(connection, other) == Counters()


# Clocks ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behind", [timedelta(seconds=5), timedelta(minutes=1)])
@pytest.mark.parametrize("size", [10, 2 * MIB])
async def test_a_server_whose_clock_is_behind_stores_into_a_bucket_that_is_open(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, size: int, behind: timedelta
):
    """Another server has swept the buckets that are over by the database's clock."""
    before = await connection.fetchval(
        "select date_trunc('second', clock_timestamp()) - interval '1 s'"
    )
    async with parts.receiver.receive(workspace_id, size) as incoming:
        await incoming.begin_file("a.bin", "", now=before - behind)
        await incoming.write(bytes(size), now=before - behind)
        await incoming.end_file(now=before - behind)
        await incoming.publish(now=before - behind)

    buckets = await connection.fetch("select distinct bucket from chunks")
    assert all(row["bucket"] > before for row in buckets)
    assert await connection.fetchval("select count(*) from uploads where bucket > $1", before) == 1


@pytest.mark.parametrize("behind", [timedelta(seconds=5), timedelta(minutes=1)])
async def test_servers_whose_clocks_differ_do_not_seal_each_others_buckets(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, behind: timedelta
):
    """One sweeps what is over by the database's clock, while the other writes."""
    (only,) = await partition_names(connection, CHUNKS)
    await connection.execute(f"drop table {only}")
    sweep = make_sweep(parts.db)
    border = floor(await sweep.now(), timedelta(seconds=1)) - Buckets.settling
    await make_partition(connection, CHUNKS, border - HOUR, HOUR)
    await make_partition(connection, CHUNKS, border, HOUR)

    report = await sweep.run(now=await sweep.now())
    await stage.stage(
        parts.receiver, workspace_id, NewFile("a", "", b"x"), now=await sweep.now() - behind
    )

    assert actions(report) == [DROP_BUCKET]
    assert await connection.fetchval("select bucket >= $1 from uploads", border)
