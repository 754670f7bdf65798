"""A workspace that acknowledged a file and lost it can reopen it while the file is kept."""

import random
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import ANY
from uuid import uuid4

import pytest
from callers import ADMIN, Answer, Caller, Part, ask, pattern, registered
from factories import HOUR, NOW, Counters, Parts, counters, make_upload, sweep_uploads
from sites import SiteFactory
from sweeps import grow_older, put_back_acks

from restante.database.pool import Connection
from restante.delivery import acknowledge
from restante.errors import UploadGone
from restante.ids import WorkspaceId, as_uuid

pytestmark = pytest.mark.anyio

CONTENT = pattern(700_001)
MOMENT = timedelta(seconds=1)


@pytest.fixture
async def acked(caller: Caller) -> str:
    """A file that was fetched and acknowledged."""
    (file_id,) = await caller.staged(Part(CONTENT, name="a.bin"))
    await caller.fetch(file_id)
    assert (await caller.ack(file_id)).status == 200
    return file_id


async def reopen(caller: Caller, file_id: str, **options: Any) -> Answer:
    return await caller.ask("POST", f"/pending-uploads/{file_id}/reopen", **options)


def id_of(caller: Caller) -> WorkspaceId:
    found = as_uuid(caller.id)
    assert found
    return WorkspaceId(found)


async def sweep(caller: Caller) -> Any:
    answer = await ask(caller.site, "POST", "/admin/retention/sweep", headers=ADMIN)
    assert answer.status == 200, answer.body
    return answer.json


@pytest.mark.parametrize("headers", [{}, ADMIN], ids=["by its workspace", "by the operator"])
async def test_a_reopened_file_is_listed_announced_and_counted_again(
    caller: Caller, acked: str, headers: dict[str, str], connection: Any
):
    assert (await caller.fetch(acked)).status == 404
    before = await counters(connection, id_of(caller))

    answer = await reopen(caller, acked, headers=headers)

    assert (answer.status, answer.json) == (200, {"status": "reopened"})
    assert (await caller.fetch(acked)).body == CONTENT
    assert [one["file_id"] for one in (await caller.waiting()).json["uploads"]] == [acked]
    newest, first = await caller.feed()
    assert newest["seq"] == first["seq"] + 1 == 2
    for name in ("activity_type", "method", "summary", "request_body", "status"):
        assert newest[name] == first[name]
    assert before == Counters(1, 0, 0)
    assert await counters(connection, id_of(caller)) == Counters(2, len(CONTENT), 1)


async def test_a_reopened_file_still_comes_from_the_workspace_that_sent_it(caller: Caller):
    """Else the workspace would fetch and acknowledge what it sent to its user."""
    sent = await caller.upload(Part(b"result"), X_Workspace_ID=caller.id)
    file_id = sent.json["files"][0]["uri"].rpartition("/")[2]
    await caller.ack(file_id)

    await reopen(caller, file_id)

    assert [row["source_id"] for row in await caller.feed()] == [caller.id] * 2
    assert [one["source_id"] for one in (await caller.waiting()).json["uploads"]] == [caller.id]


async def test_a_reopened_file_counts_as_never_fetched(caller: Caller, acked: str, connection: Any):
    await reopen(caller, acked)

    row = await connection.fetchrow("select fetched_at, acked_at, expires_at > now() from uploads")
    assert tuple(row) == (None, None, True)


async def test_a_reader_of_the_feed_sees_the_second_announcement(caller: Caller, acked: str):
    (row,) = await caller.feed()
    await reopen(caller, acked)

    (again,) = await caller.feed(since_id=row["id"], wait=5)

    assert again["request_body"]["file_id"] == acked


async def test_a_file_can_be_acknowledged_and_reopened_repeatedly(
    caller: Caller, acked: str, connection: Any
):
    for _ in range(3):
        assert (await reopen(caller, acked)).status == 200
        assert (await caller.ack(acked)).json == {"acked": True}

    assert await counters(connection, id_of(caller)) == Counters(4, 0, 0)


async def test_a_reopened_file_is_kept_for_the_retention_even_if_its_ttl_is_over(
    caller: Caller, acked: str, connection: Any
):
    """It was acknowledged shortly before it would have expired."""
    await connection.execute("update uploads set expires_at = now() - interval '1 second'")

    assert (await reopen(caller, acked)).status == 200

    assert (await caller.fetch(acked)).body == CONTENT
    assert await connection.fetchval("select expires_at > now() + interval '50 min' from uploads")


async def test_a_file_that_exceeds_the_quota_waits_for_one_retention_only(
    run_site: SiteFactory, connection: Any
):
    """Else a workspace could have several times its quota waiting, for as long as files live."""
    async with run_site(workspace_max_files=1) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged()
        await caller.ack(file_id)
        await caller.staged()

        assert (await reopen(caller, file_id)).status == 200

    left = await connection.fetchval(
        "select expires_at - now() from uploads where file_id = $1", file_id
    )
    assert timedelta(minutes=50) < left <= HOUR


async def test_a_file_within_the_quota_expires_when_it_would_have(
    caller: Caller, acked: str, connection: Any
):
    before = await connection.fetchval("select expires_at from uploads")

    await reopen(caller, acked)

    assert await connection.fetchval("select expires_at from uploads") == before


@pytest.mark.parametrize("seed", range(5))
async def test_a_file_is_gone_by_a_fixed_time_however_often_it_is_acknowledged_and_reopened(
    parts: Parts, connection: Any, workspace_id: WorkspaceId, seed: int
):
    """A workspace that does so in turns would keep many times its quota for ever."""
    chance, now, first_acked_at = random.Random(seed), NOW, None
    file_id = await make_upload(connection, workspace_id, expires_at=NOW + 2 * HOUR)

    while now < NOW + 8 * HOUR:
        now += chance.random() * HOUR / 4
        with suppress(UploadGone):
            if chance.random() < 0.5:
                await acknowledge.acknowledge(parts.db, workspace_id, file_id, now=now)
                first_acked_at = first_acked_at or now
            else:
                await acknowledge.reopen(
                    parts.receiver, workspace_id, file_id, ack_retention=HOUR, now=now
                )

    gone_by = max(NOW + 2 * HOUR, (first_acked_at or NOW) + 2 * HOUR)
    assert await sweep_uploads(connection, now=gone_by + MOMENT) != {}
    assert await counters(connection, workspace_id) == Counters(ANY, 0, 0)


async def assert_gone(caller: Caller, file_id: str, connection: Connection) -> None:
    before = await counters(connection, id_of(caller))
    for headers in ({}, ADMIN):
        answer = await reopen(caller, file_id, headers=headers)
        assert (answer.status, answer.json["code"]) == (404, "upload_gone")
    assert await counters(connection, id_of(caller)) == before


async def test_after_its_retention_a_file_cannot_be_reopened_swept_or_not(
    caller: Caller, acked: str, connection: Any
):
    await put_back_acks(connection)
    await assert_gone(caller, acked, connection)

    assert (await sweep(caller))["acked"] == 1

    await assert_gone(caller, acked, connection)


async def test_a_file_that_was_never_acknowledged_cannot_be_reopened(
    caller: Caller, connection: Any
):
    (waiting,) = await caller.staged()
    await assert_gone(caller, waiting, connection)
    await connection.execute("update uploads set expires_at = now()")
    await assert_gone(caller, waiting, connection)
    await assert_gone(caller, str(uuid4()), connection)


async def test_a_workspace_cannot_reopen_the_file_of_another(
    caller: Caller, acked: str, connection: Any
):
    other = await registered(caller.site)

    await assert_gone(other, acked, connection)
    theirs = await ask(
        caller.site,
        "POST",
        f"{caller.path}/pending-uploads/{acked}/reopen",
        headers={"Authorization": f"Bearer {other.token}"},
    )

    assert theirs.status == 401
    assert await connection.fetchval("select acked_at is not null from uploads")


async def test_without_a_retention_nothing_can_be_reopened(run_site: SiteFactory, connection: Any):
    async with run_site(ack_retention_seconds=0) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged()
        await caller.ack(file_id)

        await assert_gone(caller, file_id, connection)


async def test_a_reopened_file_is_not_swept_and_its_bytes_are_moved_out_of_an_old_bucket(
    caller: Caller, acked: str, connection: Any
):
    """The hour of its bucket is over, and everything else in it is due."""
    others = await caller.staged(*[Part(pattern(900_000))] * 8)
    for file_id in others:
        await caller.ack(file_id)
    await grow_older(connection)
    await connection.execute("update uploads set acked_at = now() where file_id = $1", acked)
    await reopen(caller, acked)

    report = await sweep(caller)

    assert (report["acked"], report["expired"]) == (8, 0)
    assert "move live files" in [step["action"] for step in report["done"]]
    assert (await caller.fetch(acked)).body == CONTENT
