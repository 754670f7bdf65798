"""A message that its sender repeats is queued once within a day."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from aiohttp import ClientSession
from callers import ADMIN, Caller, ask, bearer, everything, registered
from factories import DAY, HOUR, NOW, make_feed, make_message, make_workspace, until_blocked
from hypothesis import given, strategies as st
from processes import Server
from sites import ADMIN_TOKEN, Site, SiteFactory
from sweeps import make_partition, make_sweep, state_of, utc_now

from restante.database.listener import Listener
from restante.database.pool import Database
from restante.database.spans import floor
from restante.errors import FeedFull
from restante.feed import store
from restante.feed.message_rules import ID_SLOT, REMEMBERED, id_slots
from restante.feed.rules import CLOCK_SKEW, NewActivity, WriteLimits
from restante.feed.store import REPETITION, Appended
from restante.feed.subject import FORGET, MESSAGE_IDS
from restante.feed.wakeups import Wakeups
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

QUEUED = {"status": "queued", "delivery_mode": "poll", "method": "message/send"}


def said(text: str = "hi", message_id: Any = "m", **other: Any) -> dict[str, Any]:
    return {**other, "params": {"message": {"messageId": message_id, "content": text}}}


async def texts(caller: Caller) -> list[str]:
    """Oldest first."""
    rows = await caller.feed()
    bodies = [row["request_body"]["params"]["message"] for row in reversed(rows)]
    return [body["parts"][0]["text"] if "parts" in body else body["content"] for body in bodies]


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


# Over HTTP


async def test_a_repetition_gets_the_same_answer_and_adds_nothing(
    caller: Caller, connections: Callable[[], Any]
):
    sender, connection = await registered(caller.site), await connections()
    first = await sender.message(said(), to=caller)
    before = await everything(connection, caller.id)

    again = await sender.message(said(), to=caller)
    changed = await sender.message(said("something else"), to=caller)

    assert [one.status for one in (first, again, changed)] == [200, 200, 200]
    assert first.json == again.json == changed.json == QUEUED
    assert await everything(connection, caller.id) == before
    assert await texts(caller) == ["hi"]


async def test_senders_recipients_methods_and_ids_are_told_apart(caller: Caller):
    site = caller.site
    one, other, recipient = [await registered(site) for _ in range(3)]
    for _ in range(2):
        for sender in (one, other):
            await sender.message(said(), to=caller)
        await one.message(said(message_id="M"), to=caller)
        await one.message(said(method="message/stream"), to=caller)
        await one.message(said(), to=recipient)
        await ask(site, "POST", f"{caller.path}/a2a", json=said(), headers=ADMIN)

    assert len(await caller.feed()) == 5
    assert len(await recipient.feed()) == 1


@pytest.mark.parametrize("said", [{"parts": []}, {"content": "hi"}], ids=["parts", "content"])
async def test_a_repetition_is_found_wherever_the_message_is(caller: Caller, said: dict[str, Any]):
    envelope = {"jsonrpc": "2.0", "id": 1, "method": "message/send"}
    for number, place in enumerate((("params", "message"), ("params",), ())):
        body: dict[str, Any] = {"messageId": f"m{number}", **said}
        for name in reversed(place):
            body = {name: body}

        for _ in range(2):
            assert (await caller.message({**envelope, **body}, to=caller)).json == QUEUED

    assert len(await caller.feed()) == 3


@pytest.mark.parametrize("message_id", [None, "", "  "])
async def test_a_message_without_an_id_is_never_a_repetition(caller: Caller, message_id: Any):
    for _ in range(2):
        assert (await caller.message(said(message_id=message_id), to=caller)).status == 200

    assert len(await caller.feed()) == 2


@pytest.mark.parametrize("message_id", ["x" * 1_000_000, "\0\x1b\U0001f600\n", 7, 2**70, 1.5])
async def test_long_and_odd_ids_are_remembered_in_a_few_bytes(
    caller: Caller, connections: Callable[[], Any], message_id: Any
):
    for _ in range(2):
        assert (await caller.message(said(message_id=message_id), to=caller)).status == 200

    rows = await (await connections()).fetch("select * from message_ids")
    assert len({row["slot"] for row in rows}) == len(rows)  # near the end of a slot there are two
    assert {len(row["digest"].bytes) for row in rows} == {16}
    assert len(await caller.feed()) == 1


async def test_a_number_and_its_text_are_one_id(caller: Caller):
    for message_id in (7, "7"):
        await caller.message(said(message_id=message_id), to=caller)

    assert [
        row["request_body"]["params"]["message"]["messageId"] for row in await caller.feed()
    ] == ["7"]


async def test_a_repetition_is_answered_even_if_there_is_no_room(run_site: SiteFactory):
    """Its sender would otherwise try for hours to send what was queued long ago."""
    async with run_site(server_max_feed_bytes=40_000) as site:
        caller = await registered(site)
        assert (await caller.message(said(), to=caller)).status == 200
        site.state.feed.total.fresh_seconds = 0
        full = [await caller.message(said("x" * 9000, str(n)), to=caller) for n in range(5)]

        again = await caller.message(said(), to=caller)

    assert full[-1].status == 507
    assert (again.status, again.json) == (200, QUEUED)


async def test_a_message_that_was_refused_can_be_sent_again(run_site: SiteFactory):
    async with run_site(workspace_max_feed_bytes=20_000) as site:
        caller = await registered(site)
        assert (await caller.message(said("x" * 4000, "first"), to=caller)).status == 200
        refused = await caller.message(said("x" * 4000), to=caller)
        await caller.ask("POST", "/activity/ack", json={"acked_seq": 1})

        again = await caller.message(said("x" * 4000), to=caller)

    assert (refused.status, refused.json["code"]) == (429, "feed_full")
    assert again.status == 200


# At the same time


@pytest.fixture
async def connection(db_with_partitions: Database, connections: Callable[[], Any]) -> Any:
    return await connections()


@pytest.fixture
async def workspace_id(connection: Any) -> WorkspaceId:
    return await make_workspace(connection)


async def with_default_partitions(connection: Any) -> None:
    """For rows of any time."""
    for table in ("feed", "message_ids"):
        await connection.execute(f"create table {table}_rest partition of {table} default")


def message(digest: UUID | None = None) -> NewActivity:
    return replace(make_message(), digest=digest or UUID(int=1))


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("minutes", [0, 20, -20])
async def test_a_repetition_waits_for_the_first_and_depends_on_its_commit(
    workspace_id: WorkspaceId,
    connections: Callable[[], Any],
    minutes: int,
    *,
    is_committed: bool,
):
    """Also if one of the two is at the other side of the end of a slot."""
    first, second, watcher = [await connections() for _ in range(3)]
    await with_default_partitions(watcher)
    slot_ends = floor(NOW, ID_SLOT) + ID_SLOT
    at, other = (slot_ends - timedelta(minutes=sign * minutes / 2) for sign in (1, -1))
    transaction_of_first = first.transaction()
    await transaction_of_first.start()
    assert await store.append(first, workspace_id, message(), now=at) == Appended(1)

    repeating = asyncio.create_task(store.append(second, workspace_id, message(), now=other))
    await until_blocked(watcher, second)
    await (transaction_of_first.commit() if is_committed else transaction_of_first.rollback())

    assert await repeating == (REPETITION if is_committed else Appended(1))
    assert await watcher.fetchval("select count(*) from feed") == 1


async def test_only_one_of_many_repetitions_at_two_servers_is_queued(
    cluster_pair: "list[ClientSession]", dsn: str, connections: Callable[[], Any]
):
    """Two processes that share nothing but a database, 50 requests at each of them at once."""
    one, _ = cluster_pair
    workspace_id = str(uuid4())
    given = {"id": workspace_id, "delivery_mode": "poll", "agent_card": {"name": "w"}}
    async with one.post("/registry/register", json=given, headers=ADMIN) as answer:
        token = (await answer.json())["auth_token"]

    async def send(at: ClientSession) -> Any:
        path = f"/workspaces/{workspace_id}/a2a"
        async with at.post(path, json=said(), headers=bearer(token)) as answer:
            return answer.status, await answer.json()

    answers = await asyncio.gather(*(send(at) for at in cluster_pair for _ in range(50)))

    assert answers == [(200, QUEUED)] * 100
    connection = await connections()
    assert await connection.fetchval("select count(*) from feed") == 1
    assert await connection.fetchval("select last_seq from feeds") == 1


@pytest.fixture
async def cluster_pair(dsn: str, tmp_path: Path) -> "AsyncIterator[list[ClientSession]]":
    flags = ("--database-url", dsn, "--admin-token", ADMIN_TOKEN, "--log-level", "warning")
    async with AsyncExitStack() as stack:
        pair = [Server(tmp_path / name, *flags) for name in ("one", "other")]
        for server in pair:
            stack.enter_context(server).begin()
        yield [
            await stack.enter_async_context(ClientSession(server.until_ready().address))
            for server in pair
        ]


async def test_a_repetition_wakes_nobody(db_with_partitions: Database, workspace_id: WorkspaceId):
    wakeups = Wakeups(db_with_partitions, Listener(""))
    feed = make_feed(db_with_partitions, wakeups)
    assert await feed.append(workspace_id, message(), now=NOW) == Appended(1)
    async with wakeups.waiting(workspace_id) as waiter:
        assert await feed.append(workspace_id, message(), now=NOW) == REPETITION
        is_awake = waiter.changed.is_set()
        await feed.append(workspace_id, make_message(), now=NOW)

        assert (is_awake, waiter.changed.is_set()) == (False, True)


async def test_what_did_not_fit_is_not_remembered(
    db_with_partitions: Database, connection: Any, workspace_id: WorkspaceId
):
    limits = WriteLimits(max_written_bytes=2**60, max_feed_bytes=10)
    with pytest.raises(FeedFull):
        await make_feed(db_with_partitions, limits=limits).append(workspace_id, message(), now=NOW)

    feed = make_feed(db_with_partitions)
    assert await feed.append(workspace_id, message(), now=NOW) == Appended(1)


@given(
    st.timedeltas(timedelta(0), timedelta(days=2)),
    st.timedeltas(-CLOCK_SKEW, CLOCK_SKEW),
)
def test_two_messages_at_the_same_time_share_a_slot(after: timedelta, skew: timedelta):
    assert set(id_slots(NOW + after)) & set(id_slots(NOW + after + skew))


# For a day


async def test_an_id_is_remembered_for_a_day(
    db_with_partitions: Database, connection: Any, workspace_id: WorkspaceId
):
    feed, later = make_feed(db_with_partitions), NOW + DAY
    await with_default_partitions(connection)

    seqs = [
        await feed.append(workspace_id, message(), now=now)
        for now in (NOW, later - timedelta(seconds=1), later, later + HOUR)
    ]

    assert seqs == [Appended(1), REPETITION, Appended(2), REPETITION]


async def test_the_sweep_forgets_ids_by_dropping_partitions(
    db_with_partitions: Database, connection: Any
):
    """Their space goes back to the filesystem; the ids of the last day stay."""
    width = timedelta(hours=6)
    now = utc_now()
    old = await make_partition(connection, MESSAGE_IDS, now - REMEMBERED - 2 * HOUR - width, width)
    recent = await make_partition(connection, MESSAGE_IDS, now - REMEMBERED - 2 * HOUR, 1.5 * HOUR)
    sweep = make_sweep(db_with_partitions)

    plan = await sweep.plan(now=now)
    await sweep.run(now=now)

    assert [step.partition for step in plan.steps if step.action == FORGET] == [old]
    assert await state_of(connection, old) == "gone"
    assert await state_of(connection, recent) == "attached"


async def test_the_ids_count_among_what_all_feeds_hold(
    db_with_partitions: Database, connection: Any, workspace_id: WorkspaceId
):
    """Rows may be trimmed early, and their ids stay; without ids nothing counts."""
    assert await store.total_bytes(connection) == 0

    await connection.execute(
        "insert into message_ids"
        " select $1, gen_random_uuid(), $2, $2 from generate_series(1, 1000)",
        workspace_id,
        NOW,
    )

    assert 100_000 < await store.total_bytes(connection) < 300_000
