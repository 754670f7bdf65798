"""What an operator finds among all uploads, reopens, and lets expire."""

import asyncio
import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import structlog
from factories import HOUR, Parts, make_parts, make_workspace
from msgspec import UNSET
from sweeps import expire as pass_the_time
from sweeps import put_back_acks

from restante import wire
from restante.database.pool import Database
from restante.delivery.admin import Inventory
from restante.delivery.fetch import NewFile
from restante.delivery.rules import Swept
from restante.errors import RestanteError, UploadGone, WorkspaceUnknown
from restante.ids import FileId, WorkspaceId, new_file_id

pytestmark = pytest.mark.anyio


@pytest.fixture
def parts(db_with_partitions: Database) -> Parts:
    return make_parts(db_with_partitions)


@pytest.fixture
def inventory(db: Database, parts: Parts) -> Inventory:
    return Inventory(db, parts.delivery)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)


async def staged(parts: Parts, workspace_id: WorkspaceId, content: bytes = b"some bytes") -> FileId:
    return await parts.delivery.stage(workspace_id, NewFile("letter.txt", "text/plain", content))


async def acked(parts: Parts, workspace_id: WorkspaceId) -> FileId:
    file_id = await staged(parts, workspace_id)
    await parts.delivery.acknowledge(workspace_id, file_id)
    return file_id


# Looking


async def test_a_page_says_where_the_next_one_begins_and_the_last_does_not(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId
):
    """Also when the last one is full."""
    ids = [await staged(parts, workspace_id) for _ in range(4)]

    first = await inventory.page(limit=2)
    assert first.next_after == ids[1]
    second = await inventory.page(limit=2, after=FileId(ids[1]))

    assert [one.file_id for one in first.uploads + second.uploads] == ids
    assert second.next_after is UNSET


async def test_a_page_goes_on_after_an_upload_that_has_changed_its_state(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId
):
    """An operator works on the files of a page before asking for the next."""
    ids = [await staged(parts, workspace_id) for _ in range(3)]
    await inventory.expire(ids[0])

    page = await inventory.page(state="never_fetched", after=ids[0], limit=10)

    assert [one.file_id for one in page.uploads] == ids[1:]


async def test_the_files_of_a_removed_workspace_are_found(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    """They wait until they expire, and take space."""
    file_id = await staged(parts, workspace_id)
    await connection.execute("update workspaces set status = 'removed'")

    (found,) = (await inventory.page(workspace_id, limit=10)).uploads

    assert found.file_id == file_id
    assert (await inventory.expire(file_id)).first_time


async def test_all_facts_of_an_upload_are_shown(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    file_id = await acked(parts, workspace_id)

    shown = await inventory.show(file_id)

    row = await connection.fetchrow("select * from uploads")
    leaf = await connection.fetchval("select tableoid::regclass::text from chunks")
    assert shown == wire.UploadView(
        file_id=file_id,
        workspace_id=workspace_id,
        name="letter.txt",
        mime_type="text/plain",
        size=10,
        sha256=row["sha256"].hex(),
        state="acked",
        created_at=row["created_at"],
        fetched_at=None,
        acked_at=row["acked_at"],
        expires_at=row["expires_at"],
        reopenable_until=row["acked_at"] + HOUR,
        bucket=row["bucket"],
        leaf=leaf,
    )


async def test_wrong_ids_are_named(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    """An empty list because of a mistyped id would look like good news."""
    other, nobody = await make_workspace(connection), WorkspaceId(uuid4())
    file_id, unknown = await staged(parts, workspace_id), new_file_id()

    refused: list[tuple[type[RestanteError], object, Any]] = [
        (WorkspaceUnknown, nobody, inventory.page(nobody, limit=1)),
        (UploadGone, unknown, inventory.page(after=unknown, limit=1)),
    ]
    for ask in (inventory.show, inventory.reopen, inventory.expire):
        refused += [
            (UploadGone, unknown, ask(unknown)),
            (UploadGone, other, ask(file_id, other)),
            (WorkspaceUnknown, nobody, ask(file_id, nobody)),
        ]

    for error, named, asked in refused:
        with pytest.raises(error, match=str(named)):
            await asked


# Reopening


async def test_a_reopened_file_waits_again_and_its_followers_are_woken(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId
):
    file_id = await acked(parts, workspace_id)

    async with parts.wakeups.waiting(workspace_id) as waiter:
        reopened = await inventory.reopen(file_id)
        woken = waiter.changed.is_set()

    assert reopened.state == "never_fetched"
    assert (reopened.acked_at, reopened.reopenable_until) == (None, None)
    assert woken
    assert (await parts.delivery.get(workspace_id, file_id)).size == 10


async def test_what_cannot_be_reopened_is_refused_with_the_reason(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    too_late = await acked(parts, workspace_id)
    await put_back_acks(connection)
    waiting, expired = [await staged(parts, workspace_id) for _ in range(2)]
    await pass_the_time(connection, expired)

    for file_id, reason in (
        (too_late, "could be reopened until"),
        (waiting, "never acknowledged.* it is never_fetched"),
        (expired, "never acknowledged.* it is expired"),
    ):
        with pytest.raises(UploadGone, match=reason):
            await inventory.reopen(file_id)


# Expiring


async def test_an_expired_file_is_gone_for_its_workspace_and_with_the_next_sweep(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId
):
    file_id = await staged(parts, workspace_id)

    with structlog.testing.capture_logs() as logged:
        expiry = await inventory.expire(file_id)

    assert (expiry.first_time, expiry.upload.state) == (True, "expired")
    assert expiry.upload.expires_at <= datetime.now(UTC)
    assert [(line["event"], line["file"]) for line in logged] == [("upload_expired", str(file_id))]
    with pytest.raises(UploadGone):
        await parts.delivery.get(workspace_id, file_id)
    assert await parts.delivery.sweep(now=datetime.now(UTC)) == Swept(expired=1)


async def test_a_second_time_changes_nothing_and_is_not_logged(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId
):
    file_id = await staged(parts, workspace_id)
    first = await inventory.expire(file_id)

    with structlog.testing.capture_logs() as logged:
        second = await inventory.expire(file_id)

    assert second.upload == first.upload
    assert not second.first_time
    assert logged == []


async def test_what_was_acknowledged_does_not_expire(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId
):
    """It could be reopened, and must then wait as long as it was promised."""
    file_id = await acked(parts, workspace_id)
    before = await inventory.show(file_id)
    assert before.acked_at

    said = re.escape(f"{before.acked_at:%Y-%m-%d %H:%M:%S} UTC")
    with pytest.raises(UploadGone, match=f"acknowledged the file at {said}"):
        await inventory.expire(file_id)

    assert await inventory.show(file_id) == before


async def test_expiries_and_acknowledgements_at_once_end_in_one_or_the_other(
    inventory: Inventory, parts: Parts, workspace_id: WorkspaceId, connection: Any
):
    """Whoever comes first is right, and all of the room is free in the end."""
    ids = [await staged(parts, workspace_id) for _ in range(40)]

    outcomes = await asyncio.gather(
        *(inventory.expire(file_id) for file_id in ids),
        *(parts.delivery.acknowledge(workspace_id, file_id) for file_id in ids),
        return_exceptions=True,
    )

    unforeseen = [one for one in outcomes if isinstance(one, Exception)]
    assert all(isinstance(one, UploadGone) for one in unforeseen), unforeseen
    swept = await parts.delivery.sweep(now=datetime.now(UTC) + timedelta(hours=2))
    assert swept.total == 40
    waiting = await connection.fetchrow("select waiting_bytes, waiting_files from feeds")
    assert tuple(waiting) == (0, 0)
