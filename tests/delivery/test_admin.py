"""The operator finds uploads in any state, reopens them, and lets them expire."""

import asyncio
import re
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
import structlog
from factories import (
    DAY,
    HOUR,
    NOW,
    Content,
    Parts,
    make_parts,
    make_upload,
    make_workspace,
    sweep_uploads,
)
from msgspec import UNSET

from restante import wire
from restante.database.pool import Database
from restante.delivery import acknowledge, fetch, store
from restante.delivery.admin import UploadAdmin
from restante.errors import FeedFull, RestanteError, UploadGone, WorkspaceUnknown
from restante.feed.rules import WriteLimits
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

MOMENT = timedelta(microseconds=1)


@pytest.fixture
def admin(parts: Parts) -> UploadAdmin:
    return UploadAdmin(parts.receiver, ack_retention=HOUR)


async def make_acked(connection: Any, workspace_id: WorkspaceId) -> FileId:
    file_id = await make_upload(connection, workspace_id)
    await store.acknowledge(connection, workspace_id, file_id, now=NOW)
    return file_id


async def make_several(connection: Any, workspace_id: WorkspaceId, count: int) -> list[FileId]:
    """Uploads, the oldest first."""
    return [
        await make_upload(connection, workspace_id, now=NOW + number * MOMENT)
        for number in range(count)
    ]


# Looking


async def test_a_page_says_where_the_next_begins_and_the_last_one_does_not(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    """Even when the last page is full."""
    ids = await make_several(connection, workspace_id, 4)

    first = await admin.page(limit=2, now=NOW)
    second = await admin.page(limit=2, after=ids[1], now=NOW)

    assert first.next_after == ids[1]
    assert [one.file_id for one in first.uploads + second.uploads] == ids
    assert second.next_after is UNSET


async def test_a_page_continues_after_an_upload_that_has_changed_its_state(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    """An operator works on the files of a page before asking for the next."""
    ids = await make_several(connection, workspace_id, 3)
    await admin.expire(ids[0], now=NOW)

    page = await admin.page(state="never_fetched", after=ids[0], limit=10, now=NOW)

    assert [one.file_id for one in page.uploads] == ids[1:]


async def test_a_page_of_one_state_and_one_workspace_has_no_other_uploads(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    other = await make_workspace(connection)
    await make_upload(connection, other)
    unfetched, fetched = await make_several(connection, workspace_id, 2)
    await store.mark_fetched(connection, workspace_id, fetched, now=NOW)

    pages = [
        await admin.page(workspace_id, state=state, limit=10, now=NOW)
        for state in ("never_fetched", "fetched", "acked", "expired")
    ]

    found = [[one.file_id for one in page.uploads] for page in pages]
    assert found == [[unfetched], [fetched], [], []]


async def test_the_files_of_a_removed_workspace_are_found(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    """They are kept until they expire, and take space."""
    file_id = await make_upload(connection, workspace_id)
    await connection.execute("update workspaces set status = 'removed'")

    (found,) = (await admin.page(workspace_id, limit=10, now=NOW)).uploads

    assert found.file_id == file_id
    assert (await admin.expire(file_id, now=NOW)).is_first


async def test_everything_about_an_upload_is_shown(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    content = Content(bytes(10), "letter.txt")
    await make_upload(connection, workspace_id, content)
    await store.acknowledge(connection, workspace_id, content.id, now=NOW)

    shown = await admin.show(content.id, now=NOW)

    assert shown == wire.UploadView(
        file_id=content.id,
        workspace_id=workspace_id,
        name="letter.txt",
        display_name="letter.txt",
        mime_type="text/plain",
        size=10,
        sha256=content.file.sha256.hex(),
        state="acked",
        created_at=NOW,
        fetched_at=None,
        acked_at=NOW,
        expires_at=NOW + DAY,
        reopenable_until=NOW + HOUR,
        bucket=await connection.fetchval("select bucket from uploads"),
        partition=await connection.fetchval("select tableoid::regclass::text from chunks"),
    )


async def test_a_wrong_id_is_named_in_the_refusal(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    """An empty list because of a mistyped id would look like good news."""
    other, nobody = await make_workspace(connection), WorkspaceId(uuid4())
    file_id, unknown = await make_upload(connection, workspace_id), FileId(uuid4())

    refused: list[tuple[type[RestanteError], object, Any]] = [
        (WorkspaceUnknown, nobody, admin.page(nobody, limit=1, now=NOW)),
        (UploadGone, unknown, admin.page(after=unknown, limit=1, now=NOW)),
    ]
    for ask in (admin.show, admin.reopen, admin.expire):
        refused += [
            (UploadGone, unknown, ask(unknown, now=NOW)),
            (UploadGone, other, ask(file_id, other, now=NOW)),
            (WorkspaceUnknown, nobody, ask(file_id, nobody, now=NOW)),
        ]

    for error, named, asked in refused:
        with pytest.raises(error, match=str(named)):
            await asked


# Reopening


async def test_a_reopened_file_can_be_fetched_again_and_waiting_readers_are_woken(
    admin: UploadAdmin, parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    file_id = await make_acked(connection, workspace_id)

    async with parts.wakeups.waiting(workspace_id) as waiter:
        reopened = await admin.reopen(file_id, now=NOW)
        is_woken = waiter.changed.is_set()

    assert reopened.state == "never_fetched"
    assert (reopened.acked_at, reopened.reopenable_until) == (None, None)
    assert is_woken
    assert (await fetch.get(parts.db, workspace_id, file_id, now=NOW)).size == 10


async def test_the_operator_cannot_reopen_a_file_into_a_full_feed(
    parts: Parts, connection: Any, workspace_id: WorkspaceId
):
    limits = WriteLimits(max_written_bytes=10**6, max_feed_bytes=600)
    admin = UploadAdmin(make_parts(parts.db, limits=limits).receiver, ack_retention=HOUR)
    file_id = await make_acked(connection, workspace_id)

    with pytest.raises(FeedFull):
        await admin.reopen(file_id, now=NOW)

    assert (await admin.show(file_id, now=NOW)).state == "acked"


@pytest.mark.parametrize(
    ("is_acked", "later", "reason"),
    [
        (True, HOUR + MOMENT, "could be reopened until"),
        (False, 0 * HOUR, "never acknowledged.* state is never_fetched"),
        (False, DAY, "never acknowledged.* state is expired"),
    ],
    ids=["too late", "unacknowledged", "expired"],
)
async def test_an_upload_that_cannot_be_reopened_is_refused_with_the_reason(
    *,
    admin: UploadAdmin,
    connection: Any,
    workspace_id: WorkspaceId,
    is_acked: bool,
    later: timedelta,
    reason: str,
):
    make = make_acked if is_acked else make_upload
    file_id = await make(connection, workspace_id)

    with pytest.raises(UploadGone, match=reason):
        await admin.reopen(file_id, now=NOW + later)


# Expiring


async def test_an_upload_that_was_let_expire_is_gone_for_its_workspace_and_swept_next(
    admin: UploadAdmin, db: Database, connection: Any, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id)

    with structlog.testing.capture_logs() as logged:
        expiry = await admin.expire(file_id, now=NOW)

    assert (expiry.is_first, expiry.upload.state) == (True, "expired")
    assert expiry.upload.expires_at == NOW
    assert [(line["event"], line["file"]) for line in logged] == [("upload_expired", str(file_id))]
    with pytest.raises(UploadGone):
        await fetch.get(db, workspace_id, file_id, now=NOW)
    assert await sweep_uploads(connection, now=NOW + MOMENT) == {"expired": 1}


async def test_a_second_expiry_changes_nothing_and_is_not_logged(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    file_id = await make_upload(connection, workspace_id)
    first = await admin.expire(file_id, now=NOW)

    with structlog.testing.capture_logs() as logged:
        second = await admin.expire(file_id, now=NOW + HOUR)

    assert second.upload == first.upload
    assert not second.is_first
    assert logged == []


async def test_an_acknowledged_upload_does_not_expire(
    admin: UploadAdmin, connection: Any, workspace_id: WorkspaceId
):
    """It can be reopened, and must then be kept as long as its sender was promised."""
    file_id = await make_acked(connection, workspace_id)
    before = await admin.show(file_id, now=NOW)

    said = re.escape(f"{NOW:%Y-%m-%d %H:%M:%S} UTC")
    with pytest.raises(UploadGone, match=f"was acknowledged at {said}"):
        await admin.expire(file_id, now=NOW)

    assert await admin.show(file_id, now=NOW) == before


async def test_each_of_many_concurrent_expiries_and_acknowledgements_has_one_outcome(
    admin: UploadAdmin, db: Database, connection: Any, workspace_id: WorkspaceId
):
    """Whichever comes first counts, and all of the room is free in the end."""
    ids = await make_several(connection, workspace_id, 40)

    outcomes = await asyncio.gather(
        *(admin.expire(file_id, now=NOW) for file_id in ids),
        *(acknowledge.acknowledge(db, workspace_id, file_id, now=NOW) for file_id in ids),
        return_exceptions=True,
    )

    errors = [one for one in outcomes if isinstance(one, Exception)]
    assert all(isinstance(one, UploadGone) for one in errors), errors
    swept = await sweep_uploads(connection, now=NOW + 2 * HOUR)
    assert swept.total() == 40
    waiting = await connection.fetchrow("select waiting_bytes, waiting_files from feeds")
    assert tuple(waiting) == (0, 0)
