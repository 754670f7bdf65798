"""Feeds that were trimmed or reset, servers that lie, and networks that fail."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import ADMIN, Caller, Part, ask, registered
from impostors import Answering, Asked, Impostor, Said, http, impostor
from sites import Site
from sweeps import make_old_feed

from restante.client import AsyncClient, Cursor, Gaps, Inbox
from restante.errors import AnswerInvalid, NotAuthenticated
from restante.ids import ActivityId

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]


async def all_of(inbox: Inbox) -> list[int]:
    return [item.seq async for item in inbox]


# A trimmed feed on a real server


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def client(caller: Caller) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(
        caller.site.url, token=caller.token, workspace_id=UUID(caller.id)
    ) as client:
        yield client


@pytest.fixture
async def ids(caller: Caller, connections: Any) -> list[ActivityId]:
    """The ids of five rows; a sweep has deleted the first three."""
    await caller.staged(*[Part()] * 5)
    connection = await connections()
    await make_old_feed(connection, UUID(caller.id), days=120, up_to=3)
    rows = [ActivityId(UUID(row["id"])) for row in reversed(await caller.feed())]
    await sweep_until_trimmed(caller)
    assert [row["seq"] for row in await caller.feed()] == [5, 4]
    return rows


async def sweep_until_trimmed(caller: Caller) -> None:
    """One pass may skip a partition: the sweep leaves locked ones to the next pass."""
    while len(await caller.feed()) == 5:
        swept = await ask(caller.site, "POST", "/admin/retention/sweep", headers=ADMIN)
        assert swept.status == 200


async def test_a_reader_continues_after_a_gap_and_counts_the_missed_rows(
    client: AsyncClient, ids: list[ActivityId]
):
    """The row of its cursor is deleted; the remaining rows come, and no gap is silent."""
    read: dict[Cursor, tuple[list[int], int]] = {}
    for cursor in (Cursor(1), *(Cursor(at, ids[at - 1]) for at in (1, 2, 3, 4))):
        inbox = client.inbox(cursor, once=True)
        read[cursor] = await all_of(inbox), inbox.missed

    assert read == {
        Cursor(1): ([4, 5], 2),
        Cursor(1, ids[0]): ([4, 5], 2),
        Cursor(2, ids[1]): ([4, 5], 1),
        Cursor(3, ids[2]): ([4, 5], 0),
        Cursor(4, ids[3]): ([5], 0),
    }


@pytest.mark.parametrize(("acked", "missed"), [(0, 3), (2, 1)])
async def test_a_reader_without_a_cursor_counts_the_missed_rows(
    client: AsyncClient, ids: list[ActivityId], acked: int, missed: int
):
    """Rows between the acknowledged one and the oldest one were never handled."""
    await client.acknowledge_feed(acked)
    inbox = client.inbox(once=True)

    assert await all_of(inbox) == [4, 5]
    assert inbox.missed == missed


async def test_a_feed_that_was_restored_is_read_from_the_start(
    client: AsyncClient, caller: Caller, connections: Any
):
    """After a restore from a backup, new rows get the numbers of lost ones."""
    await caller.staged(*[Part()] * 5)
    newest = (await caller.feed())[0]
    connection = await connections()
    await connection.execute("delete from feed where seq > 2")
    await connection.execute("update feeds set last_seq = 2")
    inbox = client.inbox(Cursor(5, ActivityId(UUID(newest["id"]))), once=True)

    assert await all_of(inbox) == [1, 2]
    assert inbox.missed == 0
    assert inbox.cursor is not None
    assert inbox.cursor.seq == 2


async def rewind(connection: Any, to: int) -> None:
    """Rewind the feed, as the restore of a backup does."""
    await connection.execute("delete from feed where seq > $1", to)
    await connection.execute("update feeds set last_seq = $1, acked_seq = least(acked_seq, $1)", to)


async def test_a_restored_feed_continues_after_the_acknowledged_row(
    client: AsyncClient, caller: Caller, connections: Any
):
    """Rows that were handled before the backup do not come again, and new ones are not skipped."""
    await caller.staged(*[Part()] * 3)
    await client.acknowledge_feed(2)
    await caller.staged(*[Part()] * 2)
    newest = (await caller.feed())[0]
    await rewind(await connections(), 3)
    await caller.staged()
    inbox = client.inbox(Cursor(5, ActivityId(UUID(newest["id"]))), once=True)

    assert await all_of(inbox) == [3, 4]
    assert inbox.gaps == Gaps(restores=1, repeated=2)


async def test_a_restored_feed_that_grew_past_the_cursor_is_noticed(
    client: AsyncClient, caller: Caller, connections: Any
):
    """Other rows have the seqs that the reader knows; its unsent mark must not count for them."""
    await caller.staged(*[Part()] * 2)
    before = client.inbox(once=True)
    for item in await before.page():
        before.consumed(item)
    await rewind(await connections(), 1)
    await caller.staged(*[Part()] * 3)
    await before.mark()

    inbox = client.inbox(before.cursor, once=True)

    assert await all_of(inbox) == [1, 2, 3, 4]
    assert inbox.gaps == Gaps(restores=1, repeated=2)


@pytest.mark.parametrize(
    ("skip_acked", "read", "gaps"),
    [(True, [5], Gaps(skipped=3)), (False, [2, 3, 4, 5], Gaps(repeated=3))],
)
async def test_a_cursor_from_a_backup_is_counted(
    client: AsyncClient, caller: Caller, skip_acked: bool, read: list[int], gaps: Gaps
):
    """A reader's own state was restored: it has acknowledged more rows than it remembers."""
    await caller.staged(*[Part()] * 5)
    await client.acknowledge_feed(4)
    inbox = client.inbox(Cursor(1), once=True, skip_acked=skip_acked)

    assert await all_of(inbox) == read
    assert inbox.gaps == gaps


async def test_rows_that_were_acknowledged_and_then_deleted_are_not_missed(
    client: AsyncClient, ids: list[ActivityId]
):
    await client.acknowledge_feed(4)
    inbox = client.inbox(Cursor(1, ids[0]), once=True, skip_acked=True)

    assert await all_of(inbox) == [5]
    assert inbox.gaps == Gaps(skipped=1)


async def test_an_unknown_row_id_restarts_the_feed(client: AsyncClient, caller: Caller):
    """After a restore, other rows have the numbers that the reader knows."""
    await caller.staged(*[Part()] * 3)
    inbox = client.inbox(Cursor(2, ActivityId(uuid4())), once=True)

    assert await all_of(inbox) == [1, 2, 3]


# Servers that lie


def row(seq: int) -> dict[str, Any]:
    return {
        "id": str(UUID(int=seq)),
        "workspace_id": str(uuid4()),
        "activity_type": "a2a_receive",
        "source_id": None,
        "target_id": None,
        "method": "message/send",
        "summary": None,
        "request_body": {},
        "response_body": None,
        "duration_ms": None,
        "status": "ok",
        "error_detail": None,
        "created_at": "2026-01-02T03:04:05Z",
        "seq": seq,
    }


@asynccontextmanager
async def following(answering: Answering) -> AsyncIterator[tuple[Impostor, AsyncClient]]:
    async with (
        impostor(answering) as other,
        AsyncClient(other.url, token="t", workspace_id=uuid4()) as client,
    ):
        yield other, client


def serving(*rows: int, acked: int = 0) -> Callable[[Asked], bytes]:
    """A feed with these rows, served as the real server does."""

    def answer(asked: Asked) -> bytes:
        if asked.method == "POST":
            return http(200, {"acked_seq": 0})
        after = asked.query.get("since_seq", "0") if "since_id" not in asked.query else None
        seq = UUID(asked.query["since_id"]).int if after is None else int(after)
        found = [row(number) for number in rows if number > seq]
        marks = {"Latest": max(rows, default=0), "Lowest": 1, "Acked": acked}
        headers = {f"X-Restante-{name}-Seq": str(mark) for name, mark in marks.items()}
        return http(200, found, **headers)

    return answer


async def test_a_server_that_repeats_old_rows_is_refused():
    """Otherwise the reader would loop for ever."""
    async with following(lambda _: http(200, [row(1), row(2)])) as (_, client):
        with pytest.raises(AnswerInvalid, match="advance"):
            await all_of(client.inbox(Cursor(2)))


async def test_old_rows_among_new_ones_are_ignored():
    async with following(serving(1, 2, 3, 4)) as (_, client):
        inbox = client.inbox(Cursor(2), once=True)
        assert await all_of(inbox) == [3, 4]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"lowest_seq": 1, "latest_seq": 9},
        {"lowest_seq": "1", "latest_seq": None},
        {"lowest_seq": -5, "latest_seq": 9},
        {"lowest_seq": 10**30, "latest_seq": 10**40},
    ],
    ids=str,
)
async def test_a_server_that_rejects_every_cursor_is_refused(facts: dict[str, Any]):
    """Otherwise the reader would restart for ever."""
    gone = http(410, {"error": "since_id.", "code": "cursor_gone"} | facts)

    def answer(asked: Asked) -> bytes:
        return gone if "since_id" in asked.query or "since_seq" in asked.query else http(200, [])

    async with following(answer) as (other, client):
        with pytest.raises(AnswerInvalid, match="every position"):
            await all_of(client.inbox(Cursor(2)))

    assert len(other.asked) < 10


async def test_missing_rows_are_counted_once():
    """Even if the page is read again."""
    async with following(serving(1, 5, 6, 9)) as (_, client):
        inbox = client.inbox(Cursor(1), once=True)
        await inbox.page()
        await inbox.page()

        assert await all_of(inbox) == [5, 6, 9]
        assert inbox.missed == 3 + 2


async def test_once_ends_when_a_server_announces_rows_that_it_does_not_have():
    said = http(200, [], **{"X-Restante-Latest-Seq": "99"})

    async with following(lambda _: said) as (other, client):
        assert await all_of(client.inbox(Cursor(2), once=True)) == []

    assert len(other.asked) < 5


async def test_a_server_that_does_not_wait_is_not_polled_in_a_tight_loop():
    """A server that is shutting down answers a long poll at once."""
    finished: list[str] = []

    async def page(client: AsyncClient, wait_seconds: float, name: str) -> None:
        assert await client.inbox(Cursor(2)).page(wait_seconds) == []
        finished.append(name)

    async with following(lambda _: http(200, [])) as (_, client):
        await asyncio.gather(page(client, 30, "long poll"), page(client, 0, "look"))

    assert finished == ["look", "long poll"]


# Networks


async def test_an_inbox_retries_after_every_kind_of_failure():
    """While it looks for its start, reads, and acknowledges."""
    failures = {"GET": 8, "POST": 8}
    feed = serving(1, 2)

    def flaky(asked: Asked) -> Said:
        failures[asked.method] -= 1
        if failures[asked.method] >= 0:
            return http(503, {"error": "Not yet.", "code": "not_ready"})
        return feed(asked)

    async with following(flaky) as (other, client):
        inbox = client.inbox(once=True)
        assert await all_of(inbox) == [1, 2]

    assert json.loads(other.asked[-1].body) == {"acked_seq": 2, "acked_id": str(UUID(int=2))}
    assert failures == {"GET": -2, "POST": -1}


async def test_a_lost_connection_does_not_repeat_items():
    feed = serving(1, 2)
    broken: list[Asked] = []

    def breaking(asked: Asked) -> Said:
        if asked.query.get("since_id") and not broken:
            broken.append(asked)
            return None
        return feed(asked)

    async with following(breaking) as (_, client):
        inbox = client.inbox(Cursor(0))
        got: list[int] = []
        async for item in inbox:
            got.append(item.seq)
            if item.seq == 2:
                break

    assert got == [1, 2]


async def test_a_revoked_token_ends_an_inbox():
    """A retry would not help."""
    said = http(401, {"error": "No.", "code": "not_authenticated"})

    async with following(lambda _: said) as (other, client):
        with pytest.raises(NotAuthenticated):
            await all_of(client.inbox())

    assert len(other.asked) == 1
