"""Pages end by bytes too: the memory for them is bounded, and a reader goes on without a hole."""

import asyncio
from contextlib import ExitStack
from typing import Any
from urllib.request import Request, urlopen
from uuid import UUID

import asyncpg
import pytest
from attacks import MIB
from callers import Caller, registered
from processes import Server, peak_kib, registered_at
from sites import Site
from waiting import until
from watchers import WAYS, append, id_of, watch

from restante.database.pool import SCHEMA
from restante.errors import TooManyAtOnce
from restante.feed.readers import Places
from restante.feed.rules import MAX_PAGE_BYTES
from restante.feed.service import _LARGE_ANSWERS
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


async def make_rows(connection: Any, workspace_id: str, *sizes: int) -> None:
    """Rows whose bodies are strings of these sizes, which compress to almost nothing."""
    await connection.execute(
        "with counter as ("
        "    update feeds set last_seq = last_seq + cardinality($2::int[])"
        "     where workspace_id = $1 returning last_seq - cardinality($2::int[]) as last"
        ") insert into feed"
        " (id, workspace_id, seq, activity_type, status, request_body, created_at)"
        # An id of this millisecond, as `new_activity_id` makes them.
        " select (lpad(to_hex((extract(epoch from now()) * 1000)::bigint), 12, '0')"
        "         || lpad(to_hex(size.number), 20, '0'))::uuid,"
        "        $1, last + size.number, 'a2a_receive', 'ok',"
        "        to_json(repeat('x', size.bytes - 2)::text), now()"
        "   from counter, unnest($2::int[]) with ordinality as size (bytes, number)",
        UUID(workspace_id),
        sizes,
    )


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


async def test_a_workspace_has_a_few_places_for_large_answers_and_others_have_theirs(
    caller: Caller, connection: Any
):
    """Readers that do not drain their answers hold memory; here only the places are held."""
    other = await registered(caller.site)
    for one in (caller, other):
        await make_rows(connection, one.id, MIB)
    places: Places = caller.site.state.feed.large_answers

    with ExitStack() as held:
        for _ in range(_LARGE_ANSWERS):
            held.enter_context(places.place(id_of(caller), MIB))
        refused = await caller.read_feed()
        empty = await caller.read_feed(since_seq=1)
        others = await other.read_feed()
    afterwards = await caller.read_feed()

    assert (refused.status, refused.json["code"]) == (429, "too_many_at_once")
    assert [empty.status, others.status, afterwards.status] == [200, 200, 200]
    await until(lambda: asyncio.sleep(0, not places.taken))


def test_several_large_answers_of_a_workspace_share_a_rate_and_one_alone_has_none():
    places, workspace_id = Places(3), WorkspaceId(UUID(int=1))

    with places.place(workspace_id, MIB):
        alone = places.pause_after(workspace_id, MIB)
        with places.place(workspace_id, MIB):
            together = places.pause_after(workspace_id, MIB)

    assert alone == 0
    assert together == pytest.approx(2 / 64)


@pytest.mark.parametrize("way", WAYS)
async def test_a_watcher_waits_for_a_place_and_then_gets_every_row(caller: Caller, way: str):
    feed = caller.site.state.feed
    with ExitStack() as held:
        for _ in range(_LARGE_ANSWERS):
            held.enter_context(feed.large_events.place(id_of(caller), MIB))
        async with watch(caller, way) as watcher:
            await append(caller, "large", b'"%b"' % (b"x" * (MIB // 4)))
            await append(caller, "small")
            held.close()

            assert await watcher.summaries(2) == ["large", "small"]

    await until(lambda: asyncio.sleep(0, not feed.large_events.taken))


def test_the_bytes_of_large_answers_are_bounded():
    """A row may have 16 MiB; a workspace may always read one of them, unless all are too many."""
    places, workspaces = Places(8), [WorkspaceId(UUID(int=number)) for number in range(9)]
    first, *others = workspaces

    with ExitStack() as held:
        held.enter_context(places.place(first, 16 * MIB))
        held.enter_context(places.place(first, 16 * MIB))
        with pytest.raises(TooManyAtOnce):
            held.enter_context(places.place(first, MIB))
        for one in others[:7]:
            held.enter_context(places.place(one, 32 * MIB))
        with pytest.raises(TooManyAtOnce):
            held.enter_context(places.place(others[7], MIB))

    with places.place(others[7], 40 * MIB):
        pass


def test_a_place_is_given_back_however_its_answer_ends():
    places, workspace_id = Places(1), WorkspaceId(UUID(int=1))
    with pytest.raises(ZeroDivisionError), places.place(workspace_id, MIB):
        raise ZeroDivisionError

    with (
        places.place(workspace_id, MIB),
        pytest.raises(TooManyAtOnce),
        places.place(workspace_id, MIB),
    ):
        pass

    with places.place(workspace_id, MIB):
        pass


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
