"""Waiting for rows over HTTP: answered when one arrives, or when the time is over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from callers import (
    ADMIN,
    Answer,
    Caller,
    Part,
    ask,
    registered,
    request_head,
    waits_for_a_lock,
    wire_to,
)
from sites import Site, SiteFactory
from waiting import until

from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

HELLO = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": {"parts": []}}}


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


@asynccontextmanager
async def waiting(caller: Caller, **query: Any) -> AsyncIterator["asyncio.Task[Answer]"]:
    """A reader that waits for the feed; it has begun to wait when this yields."""
    before = waiters(caller)
    reading = asyncio.create_task(caller.read_feed(**({"wait": 60} | query)))
    await until(lambda: waiters(caller) > before)
    try:
        yield reading
    finally:
        reading.cancel()


def waiters(caller: Caller) -> int:
    wakeups = caller.site.state.wakeups
    return len(wakeups._waiters.get(WorkspaceId(UUID(caller.id)), ()))


async def test_a_wait_is_answered_when_a_file_arrives(caller: Caller):
    async with waiting(caller) as reading:
        await caller.staged(Part(), Part())
        answer = await reading

    assert [row["seq"] for row in answer.json] == [2, 1]
    assert waiters(caller) == 0


async def test_a_wait_is_answered_when_a_message_arrives(caller: Caller):
    sender = await registered(caller.site)
    await caller.staged()
    (row,) = await caller.feed()

    async with waiting(caller, since_id=row["id"]) as reading:
        await sender.message(HELLO, to=caller)
        answer = await reading

    assert [row["method"] for row in answer.json] == ["message/send"]


async def test_a_wait_after_a_seq_is_answered_when_a_row_follows_it(caller: Caller):
    """Also after seq 0, where no row has an id to send."""
    for seq in (0, 1):
        async with waiting(caller, since_seq=seq) as reading:
            await caller.staged()
            answer = await reading

        assert [row["seq"] for row in answer.json] == [seq + 1]


async def test_a_wait_after_a_seq_that_is_trimmed_meanwhile_is_a_410(
    caller: Caller, connection: Any
):
    await caller.staged()

    async with waiting(caller, since_seq=1) as reading:
        await connection.execute("update feeds set last_seq = 3, trimmed_seq = 2")
        await caller.staged()
        answer = await reading

    assert (answer.status, answer.json["lowest_seq"]) == (410, 3)


async def test_a_wait_is_answered_at_once_when_rows_are_there(caller: Caller):
    await caller.staged()

    async with asyncio.timeout(30):
        assert len(await caller.feed(wait=60)) == 1


async def test_a_filtered_wait_goes_on_until_a_row_matches(caller: Caller):
    sender = await registered(caller.site)

    async with waiting(caller, source="agent") as reading:
        await caller.staged()
        assert await caller.feed(source="agent") == []
        assert not reading.done()
        await sender.message(HELLO, to=caller)
        answer = await reading

    assert [row["source_id"] for row in answer.json] == [sender.id]


async def test_rows_of_another_workspace_do_not_end_a_wait(caller: Caller):
    other = await registered(caller.site)

    async with waiting(caller, wait=1) as reading:
        await other.staged()
        answer = await reading

    assert (answer.status, answer.json) == (200, [])


async def test_a_wait_without_a_row_is_answered_empty_when_its_time_is_over(caller: Caller):
    await caller.staged()
    (row,) = await caller.feed()

    async with waiting(caller, wait=1, since_id=row["id"]) as reading:
        answer = await reading

    assert (answer.status, answer.json) == (200, [])
    assert answer.headers["X-Restante-Latest-Seq"] == "1"


async def test_a_wait_is_between_0_and_60_seconds(caller: Caller):
    assert await caller.feed(wait=0) == []
    assert await caller.feed(wait="0.01") == []
    for wrong in (-1, 61, "60.001", "nan", "inf", "-inf", "x", "1e400"):
        answer = await caller.read_feed(wait=wrong)
        assert answer.status == 400, wrong
        assert "wait" in answer.json["error"]


async def test_the_wait_of_a_reader_that_disconnects_ends(caller: Caller):
    async with wire_to(caller.site) as wire:
        await wire.send(request_head("GET", f"{caller.path}/activity?wait=60", token=caller.token))
        await until(lambda: waiters(caller) == 1)
        wire.close()

        await until(lambda: waiters(caller) == 0)


async def test_a_wait_is_answered_when_a_file_arrives_at_another_process(run_site: SiteFactory):
    async with run_site() as one, run_site() as two:
        caller = await registered(one)
        elsewhere = Caller(two, caller.id, caller.token)

        async with waiting(caller) as reading:
            await elsewhere.staged()
            answer = await reading

    assert len(answer.json) == 1


async def test_nothing_is_announced_before_the_commit(caller: Caller, connection: Any):
    """An upload that waits for its commit is not visible anywhere; after the commit it is."""
    lock = connection.transaction()
    await lock.start()
    await connection.execute("select from feeds for update")

    async with waiting(caller) as reading:
        uploading = asyncio.create_task(caller.upload(Part()))
        await until(lambda: waits_for_a_lock(connection))
        assert await caller.feed() == []
        assert (await caller.waiting()).json["uploads"] == []
        assert not reading.done()
        await lock.rollback()

        assert (await uploading).status == 200
        assert len((await reading).json) == 1


async def test_a_wait_ends_at_once_when_its_token_is_revoked(caller: Caller):
    path = f"/admin/workspaces/{caller.id}/token"
    async with waiting(caller) as reading:
        assert (await ask(caller.site, "DELETE", path, headers=ADMIN)).status == 200

        answer = await reading

    assert (answer.status, answer.json["code"]) == (401, "not_authenticated")


async def test_a_wait_ends_at_once_when_its_token_is_replaced_at_another_process(
    run_site: SiteFactory,
):
    async with run_site(with_jobs=False) as one, run_site(with_jobs=False) as two:
        caller = await registered(one)
        path = f"/admin/workspaces/{caller.id}/token"

        async with waiting(caller) as reading:
            issued = await ask(two, "POST", path, headers=ADMIN)
            answer = await reading

        renewed = Caller(one, caller.id, issued.json["auth_token"])
        assert (answer.status, (await renewed.read_feed()).status) == (401, 200)


async def test_a_workspace_may_wait_a_hundred_times_at_once(caller: Caller):
    wakeups = caller.site.state.wakeups
    async with AsyncExitStack() as stack:
        for _ in range(100):
            await stack.enter_async_context(wakeups.waiting(WorkspaceId(UUID(caller.id))))

        refused = await caller.read_feed(wait=15)

        assert (refused.status, refused.json["code"]) == (429, "too_many_at_once")
        assert (await caller.read_feed()).status == 200
        assert (await (await registered(caller.site)).read_feed(wait="0.01")).status == 200
