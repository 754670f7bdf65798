"""Pages end by bytes too: the memory for them is bounded, and a reader goes on without a hole."""

import asyncio
from typing import Any
from urllib.request import Request, urlopen
from uuid import UUID

import asyncpg
import pytest
from attacks import MIB
from callers import Caller, registered
from large_rows import LARGE_BYTES, make_rows, taken
from processes import Server, peak_kib, registered_at
from sites import Site
from waiting import until
from watchers import WAYS, append, watch

from restante.database.pool import SCHEMA
from restante.feed.readers import SharedRate
from restante.feed.rules import MAX_PAGE_BYTES
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    return [row["seq"] for row in rows]


async def test_a_reader_by_seq_gets_every_row_once_in_pages_of_bounded_size(
    caller: Caller, connection: Any
):
    await make_rows(connection, caller.id, *[MIB] * 12)
    seen, read_seq, sizes = list[int](), 0, list[int]()

    while read_seq < 12:
        page = await caller.read_feed(since_seq=read_seq, limit=500)
        seen += seqs(page.json)
        sizes.append(len(page.body))
        assert page.headers["X-Restante-Latest-Seq"] == "12"
        read_seq = int(page.headers["X-Restante-Read-Seq"])

    assert seen == list(range(1, 13))
    assert max(sizes) <= MAX_PAGE_BYTES + 10_000


async def test_a_reader_that_knows_only_ids_gets_every_row_once(caller: Caller, connection: Any):
    await make_rows(connection, caller.id, 10, *[MIB] * 9)
    seen = [(await caller.feed(limit=500, since_seq=0))[0]]

    while page := await caller.feed(since_id=seen[-1]["id"], limit=500):
        seen += page

    assert seqs(seen) == list(range(1, 11))


async def test_the_newest_rows_end_by_bytes_too(caller: Caller, connection: Any):
    await make_rows(connection, caller.id, *[MIB] * 8)

    page = await caller.read_feed(limit=500)

    assert seqs(page.json) == [8, 7, 6, 5, 4, 3, 2, 1][: len(page.json)]
    assert 1 <= len(page.json) < 8
    assert page.headers["X-Restante-Read-Seq"] == "8"


@pytest.mark.parametrize("query", [{}, {"since_seq": 0}])
async def test_a_row_that_is_larger_than_a_page_is_sent_alone(
    caller: Caller, connection: Any, query: dict[str, int]
):
    """A reader would never get past it otherwise."""
    await make_rows(connection, caller.id, 10 * MIB, 10 * MIB)

    (row,) = await caller.feed(**query)

    assert len(row["request_body"]) == 10 * MIB - 2


async def test_small_rows_fill_a_page_up_to_its_limit(caller: Caller, connection: Any):
    await make_rows(connection, caller.id, *[100] * 600)

    page = await caller.read_feed(since_seq=0, limit=500)

    assert seqs(page.json) == list(range(1, 501))
    assert page.headers["X-Restante-Read-Seq"] == "500"


async def test_a_large_page_after_a_trimmed_row_is_a_410_and_not_a_stream(
    caller: Caller, connection: Any
):
    await make_rows(connection, caller.id, *[MIB] * 3)
    await connection.execute("update feeds set trimmed_seq = 2")

    answer = await caller.read_feed(since_seq=1)

    assert (answer.status, answer.json["code"]) == (410, "cursor_gone")


async def test_the_head_of_a_large_page_has_no_body(caller: Caller, connection: Any):
    await make_rows(connection, caller.id, *[MIB] * 2)

    answer = await caller.ask("HEAD", "/activity")

    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["X-Restante-Latest-Seq"] == "2"


def test_several_large_answers_of_a_workspace_share_a_rate_and_one_alone_has_none():
    rate, workspace_id = SharedRate(), WorkspaceId(UUID(int=1))

    with rate.sending(workspace_id):
        alone = rate.pause_after(workspace_id, MIB)
        with rate.sending(workspace_id):
            together = rate.pause_after(workspace_id, MIB)

    assert alone == 0
    assert together == pytest.approx(2 / 64)


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_waits_for_a_place_and_then_gets_every_row(caller: Caller, way: str):
    room = caller.site.state.feed.large_events
    async with watch(caller, way) as watcher:
        async with taken(room):
            await append(caller, "large", b'"%b"' % (b"x" * (MIB // 4)))
            await append(caller, "small")
            await until(lambda: room.waiting == 1)

        assert await watcher.summaries(2) == ["large", "small"]

    await until(lambda: room.free_bytes == LARGE_BYTES)


@pytest.mark.slow
async def test_readers_of_large_pages_do_not_raise_the_memory_of_the_server(server: Server):
    """200 MiB of messages that take 3 MB on disk, read by eight at once."""
    server.start()
    workspace_id, token = registered_at(server)
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": SCHEMA})
    await make_rows(connection, workspace_id, *[MIB] * 200)
    await connection.close()
    url = f"{server.address}/workspaces/{workspace_id}/activity?limit=500&since_seq=0"
    asked = Request(url, headers={"Authorization": f"Bearer {token}"})

    def read() -> int:
        with urlopen(asked, timeout=60) as answer:
            return len(answer.read())

    await asyncio.to_thread(read)
    before = peak_kib(server.pid)
    sizes = await asyncio.gather(*(asyncio.to_thread(read) for _ in range(8)))

    assert max(sizes) <= MAX_PAGE_BYTES + 10_000
    assert peak_kib(server.pid) - before < 100 * 1024
