"""
Hot statements visit a few pages, whatever the statistics say, at first and in a generic plan.

A partition begins without statistics, and a table may grow a thousandfold before autovacuum looks
at it again.  Each statement is recorded as its store sends it, and then explained.
"""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, cast
from uuid import UUID, uuid4

import asyncpg
import pytest
from factories import (
    DAY,
    HOUR,
    NOW,
    ROOMY,
    ROWS_FROM,
    Content,
    make_batch,
    make_message,
    make_reservation,
    make_workspace,
)

from restante.database.pool import Connection, Database, Tx
from restante.database.sessions import SetUp, driver_options
from restante.delivery import buckets, quotas, store as uploads
from restante.delivery.blobs import postgres as blobs
from restante.delivery.buckets import StoredFile
from restante.delivery.rules import bucket_of
from restante.feed import store as feed
from restante.feed.horizon import Horizon, seen_seqs
from restante.feed.message_rules import id_slots
from restante.feed.pages import Reader
from restante.feed.rules import Filter, Query
from restante.ids import ActivityId, FileId, WorkspaceId
from restante.wire import NOTIFY
from restante.workspaces import store as workspaces

pytestmark = pytest.mark.anyio

ROWS = 20_000
# A wrong index or a scan visits at least a few hundred; the right ones a few in each partition.
MOST_PAGES = 150
PARTITIONS = 2
MICROSECOND = timedelta(microseconds=1)


@dataclass
class Recorder:
    """Runs statements on a connection, and keeps each with its arguments."""

    connection: Any
    calls: list[tuple[str, tuple[object, ...]]] = field(
        default_factory=list[tuple[str, tuple[object, ...]]]
    )

    def __getattr__(self, name: str) -> Any:
        async def call(query: str, *args: object) -> Any:
            self.calls.append((query, args))
            return await getattr(self.connection, name)(query, *args)

        return call


@dataclass(frozen=True)
class Crowded:
    """A database in which one workspace has most of the rows."""

    connection: Any
    workspace_id: WorkspaceId
    row_id: ActivityId
    made_at: datetime  # a row in the middle of the feed
    file_id: FileId

    async def statements(self) -> list[tuple[str, tuple[object, ...]]]:
        """Every hot statement with its arguments, as the stores send it."""
        recorder = Recorder(self.connection)
        connection = cast("Connection", recorder)
        for use in self._uses(connection):
            transaction = self.connection.transaction()
            await transaction.start()
            await use()
            await transaction.rollback()
        of_file = bucket_of(NOW), self.workspace_id, self.file_id
        return [*recorder.calls, (blobs.queries.read_chunks, (*of_file, 0, 4))]

    def _uses(self, connection: Connection) -> list[Callable[[], Awaitable[object]]]:
        workspace_id, file_id = self.workspace_id, self.file_id
        filtered = Filter("a2a_receive", from_agents=False, not_before=NOW - DAY)
        queries = [
            Query(since_id=self.row_id, limit=10),
            Query(wanted=filtered, limit=10),
            Query(since_seq=ROWS // 2, limit=10),
            # Paging back: from the time of a row, from any other time, and between two.
            Query(wanted=Filter(before=self.made_at, peer_id=workspace_id), limit=10),
            Query(wanted=Filter(before=self.made_at + MICROSECOND), limit=10),
            Query(since_seq=10, wanted=Filter(before=self.made_at), limit=10),
        ]
        reservation = make_reservation(workspace_id)
        message = replace(make_message(), digest=uuid4())
        moved = StoredFile(workspace_id, file_id, bucket_of(NOW), size=1)
        to = bucket_of(NOW) + HOUR
        return [
            *(
                lambda query=query: Reader(connection, workspace_id, query).look(None, at_most=10)
                for query in queries
            ),
            lambda: feed.append(connection, workspace_id, make_message(), now=NOW),
            lambda: feed.append(connection, workspace_id, message, now=NOW),
            lambda: feed.is_queued(connection, workspace_id, message, now=NOW),
            lambda: feed.has_only(connection, workspace_id, NOTIFY, up_to_seq=ROWS),
            lambda: feed.acknowledge(connection, workspace_id, ROWS - 3),
            lambda: feed.acknowledge(connection, workspace_id, ROWS - 10, self.row_id),
            lambda: feed.seq_of(connection, workspace_id, self.row_id),
            lambda: feed.newest(connection, workspace_id),
            lambda: feed.fill_of(connection, workspace_id),
            lambda: seen_seqs(connection, [workspace_id], Horizon(2**31 - 1, NOW)),
            lambda: feed.trim_oldest(
                cast("Tx", connection), workspace_id, stored_before=NOW + DAY, is_removed=True
            ),
            lambda: uploads.publish(connection, make_batch(workspace_id, Content())),
            lambda: uploads.get(connection, workspace_id, file_id, now=NOW),
            lambda: uploads.created_at(connection, workspace_id, file_id),
            lambda: uploads.mark_fetched(connection, workspace_id, file_id, now=NOW),
            lambda: uploads.acknowledge(connection, workspace_id, file_id, now=NOW),
            lambda: uploads.get_acked(connection, workspace_id, file_id),
            lambda: uploads.unacked(
                connection, workspace_id, after=(NOW, UUID(int=0)), limit=10, now=NOW
            ),
            lambda: buckets.delete_due(
                connection, acked_before=NOW - DAY, expired_before=NOW - DAY, limit=10
            ),
            lambda: buckets.begin_move(connection, moved, to=to, kept=HOUR),
            lambda: buckets.copied_chunks(connection, moved, to=moved.bucket),
            lambda: buckets.copy_chunks(connection, moved, range(4), kept=HOUR),
            lambda: quotas.reserve(connection, reservation, ROOMY),
            lambda: quotas.renew(connection, [reservation.id]),
            lambda: quotas.release(connection, reservation.id),
            lambda: quotas.usage_of(connection, workspace_id),
            lambda: workspaces.get(connection, workspace_id),
            lambda: workspaces.by_token(connection, bytes(32)),
            lambda: workspaces.heartbeat(connection, workspace_id, 1, "busy"),
        ]


async def fill(connection: Any, workspace_id: UUID, rows: int, *, after: int = 0) -> None:
    """Rows and files of one workspace, spread over the time of the partitions."""
    await connection.execute(
        "insert into feed (id, workspace_id, seq, activity_type, method, status, created_at)"
        " select (lpad(to_hex((extract(epoch from made_at) * 1000)::bigint), 12, '0')"
        "         || substr(md5(n::text), 1, 20))::uuid,"
        "        $1, $4 + n, 'a2a_receive', 'notify', 'ok', made_at"
        "   from generate_series(1, $2::int) as n,"
        "        lateral (select $3::timestamptz + n * interval '10 hours' / $2) as t (made_at)",
        workspace_id,
        rows,
        ROWS_FROM,
        after,
    )
    await connection.execute(
        "insert into uploads (workspace_id, file_id, bucket, name, mimetype, size, sha256,"
        "                     created_at, expires_at)"
        " select $1, gen_random_uuid(), $3, 'a', '', 1, decode(repeat('00', 32), 'hex'),"
        "        $4::timestamptz + n * interval '1 second', $4::timestamptz + interval '1 day'"
        "   from generate_series(1, $2::int) as n",
        workspace_id,
        rows,
        bucket_of(NOW),
        NOW,
    )
    await connection.execute(
        "insert into chunks (bucket, workspace_id, file_id, seq, bytes)"
        " select bucket, workspace_id, file_id, 0, 'x' from uploads where workspace_id = $1",
        workspace_id,
    )
    await connection.execute(
        "insert into message_ids (workspace_id, digest, slot, queued_at)"
        " select $1, md5(n::text)::uuid, $3, $4 from generate_series(1, $2::int) as n",
        workspace_id,
        rows,
        id_slots(NOW)[0],
        NOW,
    )
    await connection.execute(
        "update feeds set last_seq = last_seq + $2, acked_seq = last_seq + $2 - 5,"
        "                 waiting_files = $2, waiting_bytes = $2"
        " where workspace_id = $1",
        workspace_id,
        rows,
    )


async def no_statistics(_connection: Any) -> None:
    """As in a partition that autovacuum has not seen yet."""


async def of_empty_tables(connection: Any) -> None:
    await connection.execute("vacuum analyze")


async def of_small_workspaces(connection: Any) -> None:
    """Every workspace has a few rows, so that each index seems to be as good as the other."""
    for _ in range(30):
        await fill(connection, await make_workspace(connection), 3)
    await connection.execute("vacuum analyze")


STATISTICS = [no_statistics, of_empty_tables, of_small_workspaces]


@pytest.fixture(params=STATISTICS, ids=lambda statistics: statistics.__name__)
async def crowded(request: pytest.FixtureRequest, db_with_partitions: Database, dsn: str) -> Any:
    connection = await asyncpg.connect(dsn, **driver_options(30))
    await SetUp(30, is_pooled=False)(connection)
    for (table,) in await connection.fetch(
        "select oid::regclass::text from pg_class"
        " where relnamespace = 'restante'::regnamespace and relkind = 'r'"
    ):
        await connection.execute(f"alter table {table} set (autovacuum_enabled = off)")
    await request.param(connection)
    workspace_id = await make_workspace(connection)
    await fill(connection, workspace_id, ROWS)
    row_id = await connection.fetchval(
        "select id from feed where workspace_id = $1 and seq = $2", workspace_id, ROWS - 10
    )
    file_id = await connection.fetchval(
        "select file_id from uploads where workspace_id = $1 order by created_at limit 1",
        workspace_id,
    )
    made_at = await connection.fetchval(
        "select created_at from feed where workspace_id = $1 and seq = $2", workspace_id, ROWS // 2
    )
    moved = StoredFile(workspace_id, file_id, bucket_of(NOW), size=1)
    await buckets.begin_move(connection, moved, to=bucket_of(NOW) + HOUR, kept=HOUR)
    yield Crowded(connection, workspace_id, row_id, made_at, file_id)
    await connection.close()


def literal(value: object) -> str:
    """A value as SQL, of a type that follows from where it stands."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        items = [json.dumps(_text(item)) for item in cast("list[object]", value)]
        return _quoted("{" + ",".join(items) + "}")
    return _quoted(_text(value))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _text(value: object) -> str:
    return f"\\x{value.hex()}" if isinstance(value, bytes) else str(value)


async def pages_visited(connection: Any, query: str, args: tuple[object, ...]) -> int:
    """How many pages a statement visits, in a transaction that is rolled back."""
    name = f"p{uuid4().hex}"
    await connection.execute(f"prepare {name} as {query}")
    given = f" ({', '.join(map(literal, args))})" if args else ""
    transaction = connection.transaction()
    await transaction.start()
    explained = await connection.fetchval(
        f"explain (analyze, buffers, format json) execute {name}{given}"
    )
    await transaction.rollback()
    plan = json.loads(explained)[0]["Plan"]
    return plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_a_hot_statement_visits_a_few_pages_whatever_the_statistics(
    crowded: Crowded, mode: str
):
    statements = await crowded.statements()
    await crowded.connection.execute(f"set plan_cache_mode = {mode}")

    visited = [
        (await pages_visited(crowded.connection, query, args), query, args)
        for query, args in statements
    ]

    assert [one for one in visited if one[0] > MOST_PAGES] == []
