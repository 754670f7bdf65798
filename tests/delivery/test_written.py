"""What is written for a workspace is counted and bounded, whatever becomes of it."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from callers import ADMIN, Caller, Part, ask, pattern, registered
from factories import (
    HOUR,
    NOW,
    Content,
    Counters,
    Parts,
    counters,
    make_batch,
    make_feed,
    make_message,
    make_parts,
    make_upload,
)
from sites import SiteFactory
from sweeps import is_waited_for, make_old_feed, make_sweep
from waiting import until

from restante.database.pool import Database
from restante.delivery import acknowledge, store
from restante.delivery.receive import Receiver
from restante.delivery.rules import MIB
from restante.delivery.store import FILE_BYTES
from restante.errors import FeedFull, TableBusy, TooMuchWritten
from restante.feed import store as feed
from restante.feed.rules import WriteLimits
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

KIB = 1024


async def written(connection: Any, workspace_id: WorkspaceId) -> int:
    return await connection.fetchval(
        "select written_bytes from feeds where workspace_id = $1", workspace_id
    )


async def abort(receiver: Receiver, workspace_id: WorkspaceId, size: int) -> None:
    """An upload that ends in its middle."""
    async with receiver.receive(workspace_id, 2 * size) as incoming:
        await incoming.begin_file("a.bin", "", now=NOW)
        await incoming.write(bytes(size), now=NOW)


async def repeat(act: Callable[[], Awaitable[object]]) -> None:
    """Ten times, unless it is refused."""
    for _ in range(10):
        await act()


# Files -------------------------------------------------------------------------------------------


async def test_aborted_uploads_use_up_the_hour(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    limits = WriteLimits(max_written_bytes=10 * MIB, max_feed_bytes=MIB)
    receiver = make_parts(db, limits=limits).receiver
    await abort(receiver, workspace_id, 3 * MIB)
    after_one = await written(connection, workspace_id)

    with pytest.raises(TooMuchWritten) as refused:
        await repeat(lambda: abort(receiver, workspace_id, 3 * MIB))

    assert 3 * MIB <= after_one <= 6 * MIB
    facts = refused.value.facts
    assert 1 <= int(facts["retry_after_seconds"] or 0) <= 3600
    assert facts["max_bytes"] == 10 * MIB
    assert await written(connection, workspace_id) <= 10 * MIB
    assert await counters(connection, workspace_id) == Counters()
    stored = await connection.fetchval("select sum(octet_length(bytes)) from chunks")
    assert stored <= 10 * MIB


async def test_acknowledged_files_use_up_the_hour(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    limits = WriteLimits(max_written_bytes=50 * KIB, max_feed_bytes=MIB)
    parts = make_parts(db, limits=limits)

    async def stage_and_acknowledge() -> None:
        (file_id,) = await parts.stage(workspace_id, bytes(10 * KIB))
        await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)

    with pytest.raises(TooMuchWritten):
        await repeat(stage_and_acknowledge)

    assert await connection.fetchval("select count(*) from uploads") == 4
    assert 4 * 10 * KIB < await written(connection, workspace_id) <= 50 * KIB


async def test_the_next_hour_begins_at_zero(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    parts = make_parts(db, limits=WriteLimits(max_written_bytes=15 * KIB, max_feed_bytes=MIB))
    await parts.stage(workspace_id, bytes(10 * KIB))
    with pytest.raises(TooMuchWritten):
        await parts.stage(workspace_id, bytes(10 * KIB))

    await connection.execute("update feeds set written_hour = written_hour - interval '1 h'")
    await parts.stage(workspace_id, bytes(10 * KIB))

    row = await connection.fetchrow("select written_bytes, written_total from feeds")
    assert 10 * KIB < row["written_bytes"] < 15 * KIB
    assert row["written_total"] == 2 * row["written_bytes"]


@pytest.mark.parametrize("size", [10, MIB + 1, 5 * MIB])
async def test_a_published_upload_counts_what_it_has_stored(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, size: int
):
    """Whatever was claimed ahead of it."""
    async with parts.receiver.receive(workspace_id, None) as incoming:
        await incoming.begin_file("a.bin", "", now=NOW)
        for start in range(0, size, 64 * KIB):
            await incoming.write(bytes(min(64 * KIB, size - start)), now=NOW)
        await incoming.end_file(now=NOW)
        await incoming.publish(now=NOW)

    announced = await connection.fetchval("select bytes from feed")
    assert await written(connection, workspace_id) == size + FILE_BYTES + announced


async def test_many_small_files_count_more_than_their_bytes(
    parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    """Each has rows in three tables."""
    await parts.stage(workspace_id, *[b"x"] * 64)

    assert await written(connection, workspace_id) > 64 * 1300


async def test_a_refused_request_stores_and_counts_nothing(
    connection: Any, workspace_id: WorkspaceId
):
    limits = WriteLimits(max_written_bytes=MIB, max_feed_bytes=1000)
    await store.publish(connection, make_batch(workspace_id, limits=limits))
    before = await connection.fetchrow("select * from feeds")

    refused = await store.publish(connection, make_batch(workspace_id, limits=limits))

    assert refused is None
    assert await connection.fetchrow("select * from feeds") == before
    assert await connection.fetchval("select count(*) from chunks") == 1


async def test_concurrent_uploads_are_all_counted(
    parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    async def upload(number: int) -> None:
        if number % 3 == 0:
            await abort(parts.receiver, workspace_id, 2 * MIB)
        else:
            await parts.stage(workspace_id, bytes(number % 2 * 2 * MIB + 1000))

    await asyncio.gather(*(upload(number) for number in range(12)))

    stored = await connection.fetchval("select sum(size) from uploads")
    announced = await connection.fetchval("select sum(bytes) from feed")
    assert (
        await written(connection, workspace_id)
        == stored + 8 * FILE_BYTES + announced + 4 * 2 * 2 * MIB
    )


async def test_the_hour_is_refused_over_http_with_the_time_to_wait(run_site: SiteFactory):
    async with run_site(workspace_max_written_bytes=20_000) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged(Part(bytes(10_000)))
        await caller.ack(file_id)

        answer = await caller.upload(Part(bytes(10_000)))

    assert (answer.status, answer.json["code"]) == (429, "too_much_written")
    assert 1 <= int(answer.headers["Retry-After"]) <= 3600


@pytest.mark.parametrize("key", [None, "a key"])
async def test_a_small_file_just_above_the_limit_is_told_the_reason(
    db: Database, connection: Any, workspace_id: WorkspaceId, key: str | None
):
    """Its rows and its remembered answer count, so they are in the refusal too."""
    await publish_small(make_parts(db).receiver, workspace_id, key)
    needed = await written(connection, workspace_id)
    limits = WriteLimits(max_written_bytes=2 * needed - 1, max_feed_bytes=MIB)
    receiver = make_parts(db, limits=limits).receiver

    with pytest.raises(TooMuchWritten):
        await publish_small(receiver, workspace_id, key and "other")

    assert await written(connection, workspace_id) == needed


async def publish_small(receiver: Receiver, workspace_id: WorkspaceId, key: str | None) -> None:
    async with receiver.receive(workspace_id, 10) as incoming:
        await incoming.begin_file("a.bin", "", now=NOW)
        await incoming.write(bytes(10), now=NOW)
        await incoming.end_file(now=NOW)
        await incoming.publish(now=NOW, key=key)


async def test_a_long_type_is_not_stored(caller: Caller):
    """It would be stored three times, and count as a byte."""
    answer = await caller.upload(Part(b"x", mimetype="text/" + "x" * 4000))

    assert answer.json["files"][0]["mimeType"] == "application/octet-stream"


async def test_the_status_names_who_writes_most(run_site: SiteFactory):
    async with run_site() as site:
        little, much = await registered(site), await registered(site)
        await little.staged(Part(b"x"))
        (file_id,) = await much.staged(Part(pattern(2 * MIB)))
        await much.ack(file_id)

        status = (await ask(site, "GET", "/admin/status", headers=ADMIN)).json

    first, second = status["writers"]
    assert (first["workspace_id"], second["workspace_id"]) == (much.id, little.id)
    assert first["this_hour_bytes"] == first["total_bytes"] > 2 * MIB
    assert first["feed_bytes"] > 300


async def test_a_full_server_says_nothing_about_other_workspaces(run_site: SiteFactory):
    async with run_site(server_max_bytes=1000) as site:
        one, other = await registered(site), await registered(site)
        await one.staged(Part(bytes(700)))

        answer = await other.upload(Part(bytes(600)))

    assert answer.status == 507
    assert set(answer.json) == {"error", "code", "retry_after_seconds"}
    assert not any(character.isdigit() for character in answer.json["error"])


# The feed ----------------------------------------------------------------------------------------


async def feed_bytes(connection: Any, workspace_id: WorkspaceId) -> tuple[int, int]:
    """As counted, and as they are."""
    row = await connection.fetchrow(
        "select feed_bytes, (select coalesce(sum(bytes), 0) from feed"
        " where feed.workspace_id = feeds.workspace_id and seq > trimmed_seq) as kept"
        " from feeds where workspace_id = $1",
        workspace_id,
    )
    return row["feed_bytes"], row["kept"]


async def unacked_bytes(connection: Any, workspace_id: WorkspaceId) -> tuple[int, int]:
    """As counted, and as they are after the last row that was settled."""
    row = await connection.fetchrow(
        "select unacked_bytes, (select coalesce(sum(bytes), 0) from feed"
        " where feed.workspace_id = feeds.workspace_id"
        " and seq > greatest(settled_seq, trimmed_seq)) as kept"
        " from feeds where workspace_id = $1",
        workspace_id,
    )
    return row["unacked_bytes"], row["kept"]


async def make_room(db: Database, workspace_id: WorkspaceId, chance: random.Random) -> None:
    """Trim some acknowledged rows, of any age."""
    size = chance.randrange(3000)
    async with db.transaction() as tx:
        await feed.lock(tx, workspace_id)
        await feed.trim_oldest(tx, workspace_id, stored_before=NOW + HOUR, at_least=size)


@pytest.mark.parametrize("seed", range(3))
async def test_the_counted_bytes_of_a_feed_are_those_of_its_rows(
    parts: Parts,
    connection: Any,
    workspace_id: WorkspaceId,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """After any mixture of what changes a feed, acknowledgements and repeated trims included."""
    chance, now = random.Random(seed), NOW
    sweep = make_sweep(parts.db, feed_retention=timedelta(days=30))

    async def message() -> None:
        text = "x" * chance.randrange(2000)
        await feed.append(connection, workspace_id, make_message(text), now=now)

    async def files() -> None:
        contents = [Content(b"x") for _ in range(chance.randrange(1, 5))]
        await store.publish(connection, make_batch(workspace_id, *contents))

    async def reopened() -> None:
        file_id = await make_upload(connection, workspace_id)
        await acknowledge.acknowledge(parts.db, workspace_id, file_id, now=now)
        await parts.reopen(workspace_id, file_id)

    async def trimmed() -> None:
        last = await connection.fetchval("select last_seq from feeds")
        up_to = chance.randrange(last + 1)
        partition = await make_old_feed(connection, workspace_id, up_to=up_to)
        if chance.random() < 0.5:  # a pass that is interrupted after its first step
            await feed.trim(connection, partition)
        await sweep.run(now=now)

    async def acknowledged() -> None:
        last = await connection.fetchval("select last_seq from feeds")
        await feed.acknowledge(connection, workspace_id, chance.randrange(last + 2))

    made_room = partial(make_room, parts.db, workspace_id, chance)
    monkeypatch.setattr(feed, "_ROWS_PER_ACK", 2)
    for _ in range(20):
        await chance.choice([message, files, reopened, trimmed, acknowledged, made_room])()
        counted, kept = await feed_bytes(connection, workspace_id)
        assert counted == kept
        counted, kept = await unacked_bytes(connection, workspace_id)
        assert counted == kept


async def test_rows_of_an_older_release_count_nothing(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """And their trim takes nothing from the others."""
    for _ in range(3):
        await feed.append(connection, workspace_id, make_message(), now=NOW)
    await connection.execute("update feed set bytes = null where seq <= 2")
    await connection.execute("update feeds set feed_bytes = 300")
    await make_old_feed(connection, workspace_id, up_to=2)

    await make_sweep(db, feed_retention=timedelta(days=30)).run(now=NOW)
    after = await feed_bytes(connection, workspace_id)
    await make_old_feed(connection, workspace_id, days=50, up_to=3)
    await make_sweep(db, feed_retention=timedelta(days=30)).run(now=NOW)

    assert after[0] == 300
    assert await feed_bytes(connection, workspace_id) == (0, 0)


async def test_a_full_feed_refuses_messages_and_files(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    limits = WriteLimits(max_written_bytes=MIB, max_feed_bytes=2000)
    parts = make_parts(db, limits=limits)
    queue = make_feed(db, parts.wakeups, limits=limits)

    with pytest.raises(FeedFull, match="oldest rows are trimmed after") as refused:
        await repeat(lambda: queue.append(workspace_id, make_message(), now=NOW))
    with pytest.raises(FeedFull):
        await repeat(lambda: parts.stage(workspace_id, b"x"))

    counted, kept = await feed_bytes(connection, workspace_id)
    assert counted == kept <= 2000
    assert refused.value.facts["max_bytes"] == 2000


MESSAGE = {
    "jsonrpc": "2.0",
    "method": "message/send",
    "params": {"message": {"content": "x" * 850}},
}


async def test_other_workspaces_fill_half_of_a_feed_and_learn_nothing_about_it(
    run_site: SiteFactory,
):
    """The files and the operator's messages of the receiver still get through."""
    async with run_site(workspace_max_feed_bytes=20_000) as site:
        receiver, *senders = [await registered(site) for _ in range(4)]
        answers = [
            await sender.message(MESSAGE, to=receiver) for sender in senders for _ in range(4)
        ]
        path = f"/workspaces/{receiver.id}/a2a"
        from_operator = await ask(site, "POST", path, json=MESSAGE, headers=ADMIN)
        file = await receiver.upload(Part())

    # A quarter for each of them, and half for all.
    assert [answer.status for answer in answers] == [
        *(200, 200, 200, 429),
        *(200, 200, 200, 429),
        *(200, 429, 429, 429),
    ]
    for refused in (answers[3], answers[-1]):
        assert refused.json["code"] == "feed_full"
        assert set(refused.json) == {"error", "code"}
    assert (from_operator.status, file.status) == (200, 200)


async def test_acknowledged_rows_make_room_for_messages_and_files(run_site: SiteFactory):
    """A reader that keeps up is not cut off from its senders until the rows are trimmed by age."""
    async with run_site(workspace_max_feed_bytes=20_000) as site:
        receiver, sender = await registered(site), await registered(site)
        before = [await sender.message(MESSAGE, to=receiver) for _ in range(4)]
        await receiver.ask("POST", "/activity/ack", json={"acked_seq": 3})
        after = [await sender.message(MESSAGE, to=receiver) for _ in range(4)]

    assert [answer.status for answer in before + after] == [200, 200, 200, 429] * 2


async def test_a_feed_keeps_four_times_as_much_as_may_be_unacknowledged(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Acknowledging must not let somebody fill the disk."""
    limits = WriteLimits(max_written_bytes=MIB, max_feed_bytes=1000)
    queue = make_feed(db, limits=limits)

    async def append_and_acknowledge() -> None:
        appended = await queue.append(workspace_id, make_message("x" * 300), now=NOW)
        await queue.acknowledge(workspace_id, appended.seq or 0)

    with pytest.raises(FeedFull, match="acknowledged rows included") as refused:
        await repeat(append_and_acknowledge)

    counted, kept = await feed_bytes(connection, workspace_id)
    assert 3000 < counted == kept <= 4000
    assert refused.value.facts["max_bytes"] == 4000
    assert await connection.fetchval("select unacked_bytes from feeds") == 0


async def test_an_acknowledgement_of_many_rows_is_settled_in_steps_before_a_refusal(
    db: Database, connection: Any, workspace_id: WorkspaceId, monkeypatch: pytest.MonkeyPatch
):
    """One statement that sums up all of them could time out, and would lock the feed meanwhile."""
    monkeypatch.setattr(feed, "_ROWS_PER_ACK", 1)
    monkeypatch.setattr(feed, "_ROWS_PER_SETTLEMENT", 2)
    limits = WriteLimits(max_written_bytes=MIB, max_feed_bytes=2000)
    queue = make_feed(db, limits=limits)
    with pytest.raises(FeedFull):
        await repeat(lambda: queue.append(workspace_id, make_message(), now=NOW))
    full = await connection.fetchval("select unacked_bytes from feeds")

    await queue.acknowledge(workspace_id, 99)
    after_ack = await connection.fetchval("select unacked_bytes from feeds")
    await queue.append(workspace_id, make_message(), now=NOW)
    await queue.append(workspace_id, make_message("x" * (full - after_ack)), now=NOW)

    assert 0 < after_ack < full
    counted, kept = await unacked_bytes(connection, workspace_id)
    assert counted == kept


async def test_a_feed_that_the_previous_release_has_trimmed_is_recounted_before_a_refusal(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """It raises the mark and subtracts nothing."""
    limits = WriteLimits(max_written_bytes=MIB, max_feed_bytes=2000)
    queue = make_feed(db, limits=limits)
    with pytest.raises(FeedFull):
        await repeat(lambda: queue.append(workspace_id, make_message(), now=NOW))
    await connection.execute("delete from feed where seq <= 2")
    await connection.execute("update feeds set trimmed_seq = 2")

    await queue.append(workspace_id, make_message(), now=NOW)

    counted, kept = await feed_bytes(connection, workspace_id)
    assert counted == kept
    assert await connection.fetchval("select unacked_bytes from feeds") == kept


async def test_a_file_finds_room_after_the_previous_release_has_trimmed(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    """The refusal says that it is worth trying again."""
    limits = WriteLimits(max_written_bytes=MIB, max_feed_bytes=2000)
    parts = make_parts(db, limits=limits)
    with pytest.raises(FeedFull):
        await repeat(lambda: parts.stage(workspace_id, b"x"))
    await connection.execute("delete from feed where seq <= 2")
    await connection.execute("update feeds set trimmed_seq = 2")

    with pytest.raises(TableBusy):
        await parts.stage(workspace_id, b"x")
    await parts.stage(workspace_id, b"x")


async def test_a_file_cannot_be_reopened_into_a_full_feed(
    db: Database, parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    """Acknowledging and reopening in turns would fill it without end."""
    limits = WriteLimits(max_written_bytes=MIB, max_feed_bytes=2000)
    file_id = await make_upload(connection, workspace_id)

    async def reopen(parts: Parts) -> None:
        await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)
        await parts.reopen(workspace_id, file_id)

    with pytest.raises(FeedFull):
        await repeat(lambda: reopen(make_parts(db, limits=limits)))
    await reopen(parts)

    counted, kept = await feed_bytes(connection, workspace_id)
    assert counted == kept


async def test_acknowledging_and_reopening_in_turns_uses_up_the_hour(
    db: Database, connection: Any, workspace_id: WorkspaceId
):
    parts = make_parts(db, limits=WriteLimits(max_written_bytes=8 * KIB, max_feed_bytes=MIB))
    file_id = await make_upload(connection, workspace_id)

    async def reopen() -> None:
        await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)
        await parts.reopen(workspace_id, file_id)

    with pytest.raises(TooMuchWritten):
        await repeat(reopen)

    assert await written(connection, workspace_id) <= 8 * KIB


async def test_the_limits_of_a_reopening_are_checked_with_the_counters_locked(
    db: Database, connection: Any, workspace_id: WorkspaceId, connections: Any
):
    """Another row is committed while it waits, and takes the last room."""
    file_id = await make_upload(connection, workspace_id)
    await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)
    room = 2 * (await feed_bytes(connection, workspace_id))[0]
    parts = make_parts(db, limits=WriteLimits(max_written_bytes=MIB, max_feed_bytes=room))
    writer = await connections()
    writing = writer.transaction()
    await writing.start()
    await feed.append(writer, workspace_id, make_message(), now=NOW)
    reopening = asyncio.create_task(parts.reopen(workspace_id, file_id))
    await until(lambda: is_waited_for(writer))

    await writing.commit()

    with pytest.raises(FeedFull):
        await reopening
    assert (await feed_bytes(connection, workspace_id))[0] <= room
    assert await counters(connection, workspace_id) == Counters(2, 0, 0)


async def test_a_reopened_file_counts_as_written_in_the_hour_and_in_total(
    db: Database, parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    """Its announcement is a row like any other, and its own row is written anew."""
    file_id = await make_upload(connection, workspace_id)
    await acknowledge.acknowledge(db, workspace_id, file_id, now=NOW)
    written = "select written_bytes, written_total, feed_bytes from feeds"
    before = await connection.fetchrow(written)

    await parts.reopen(workspace_id, file_id)

    after = await connection.fetchrow(written)
    grown = [after[column] - before[column] for column in range(3)]
    assert grown[0] == grown[1] == FILE_BYTES + grown[2]
    assert grown[2] > 300
