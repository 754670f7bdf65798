"""Uploads over HTTP: an Idempotency-Key makes a request repeatable."""

import asyncio
from typing import Any

import pytest
from callers import Caller, Part, everything, pattern, registered, waits_for_a_lock
from sites import SiteFactory
from waiting import until

from restante.delivery.rules import MIB

pytestmark = pytest.mark.anyio


async def test_a_repeated_key_gets_the_first_answer_and_stores_nothing_again(
    caller: Caller, connection: Any
):
    parts = [Part(b"one"), Part(pattern(2 * MIB), name="two.bin")]

    first = await caller.upload(*parts, Idempotency_Key="k-1")
    before = await everything(connection)
    second = await caller.upload(*parts, Idempotency_Key="k-1")

    assert first.status == second.status == 200
    assert second.json == first.json
    assert await everything(connection) == before
    assert len(before["uploads"]) == 2


async def test_two_requests_with_one_key_at_once_store_once(caller: Caller, connection: Any):
    answers = await asyncio.gather(
        *(caller.upload(Part(b"x" * 100_000), Idempotency_Key="twin") for _ in range(6))
    )

    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len((await everything(connection))["uploads"]) == 1
    assert len(await caller.feed()) == 1


async def test_two_requests_with_one_key_that_both_wait_for_the_commit_are_stored_once(
    caller: Caller, connection: Any
):
    """Neither has found the key when it began; the statement that inserts it decides."""
    lock = connection.transaction()
    await lock.start()
    await connection.execute("select from feeds where workspace_id = $1 for update", caller.id)
    pair = [asyncio.create_task(caller.upload(Part(), Idempotency_Key="twin")) for _ in range(2)]
    await until(lambda: waits_for_a_lock(connection, 2))
    await lock.rollback()

    one, other = await asyncio.gather(*pair)

    assert one.status == other.status == 200
    assert one.body == other.body
    assert len(await caller.feed()) == 1


async def test_a_key_with_other_files_is_a_422(caller: Caller, connection: Any):
    await caller.upload(Part(b"one", name="a"), Idempotency_Key="k")
    before = await everything(connection)

    for parts in (
        [Part(b"two", name="a")],
        [Part(b"one", name="b")],
        [Part(b"one", name="a", mimetype="image/png")],
        [Part(b"one", name="a"), Part(b"more")],
    ):
        answer = await caller.upload(*parts, Idempotency_Key="k")
        assert (answer.status, answer.json["code"]) == (422, "key_reused")
    assert await everything(connection) == before


async def test_the_same_key_is_another_one_for_another_workspace(caller: Caller):
    other = await registered(caller.site)

    mine = await caller.upload(Part(b"mine"), Idempotency_Key="k")
    theirs = await other.upload(Part(b"theirs"), Idempotency_Key="k")

    assert (mine.status, theirs.status) == (200, 200)
    assert len(await other.feed()) == 1


async def test_a_refused_request_does_not_use_up_its_key(run_site: SiteFactory, connection: Any):
    async with run_site(workspace_max_files=1) as site:
        caller = await registered(site)
        (waiting,) = await caller.staged()
        refused = await caller.upload(Part(b"later"), Idempotency_Key="k")
        await caller.upload(Part(b""), Idempotency_Key="e")
        assert (await everything(connection))["answers"] == []
        await caller.ack(waiting)

        accepted = await caller.upload(Part(b"later"), Idempotency_Key="k")

    assert (refused.status, accepted.status) == (429, 200)


async def test_a_key_can_be_used_again_when_its_answer_has_expired(caller: Caller, connection: Any):
    first = await caller.upload(Part(), Idempotency_Key="k")
    await connection.execute("update answers set expires_at = now()")

    second = await caller.upload(Part(b"other"), Idempotency_Key="k")

    assert first.status == second.status == 200
    assert len(await caller.feed()) == 2


async def test_a_key_must_be_short_and_printable(caller: Caller, connection: Any):
    for key in ("", "k" * 256, "caf\u00e9"):
        answer = await caller.upload(Part(), Idempotency_Key=key)
        assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert (await everything(connection))["answers"] == []
    assert (await caller.upload(Part(), Idempotency_Key="k" * 255)).status == 200
