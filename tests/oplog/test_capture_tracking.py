"""Which tables are tracked, paused, resumed and untracked, and what becomes of their log."""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from factories import until, until_blocked
from oplog.captured import OWN, changes_of, log_of, records_of, track

from restante.database.pool import Database
from restante.errors import BadRequest, RestanteError, TableBusy, TableNotTracked, TableUntrackable
from restante.oplog import tables, ulids
from restante.oplog.tracking import capture, relations, schema_changes, trackable

pytestmark = pytest.mark.anyio

PAGES = "create table public.pages (id text primary key, n integer)"
WAITS_FOR_A_LOCK = "select count(*) > 0 from pg_stat_activity where wait_event_type = 'Lock'"


@pytest.fixture
async def writer(db: Database, connections: Any) -> Any:
    """A connection of the application."""
    connection = await connections()
    await connection.execute("set search_path = public")
    return connection


def now() -> datetime:
    return datetime.now(UTC)


# Refused -----------------------------------------------------------------------------------------

REFUSED = {
    "no key": ("create table t (id text)", "no primary key.*ADD PRIMARY KEY"),
    "a serial key": ("create table t (id serial primary key)", r"sequence \(id\).*--force"),
    "an identity key": (
        "create table t (id bigint generated always as identity primary key)",
        "sequence .*UUID",
    ),
    "a sequence's default": (
        """create sequence s;
        create table t (a int, b bigint default nextval('s'), primary key (a, b))""",
        r"sequence \(b\)",
    ),
    "a view": ("create view t as select 1 as id", "is a view: track the tables"),
    "a materialized view": ("create materialized view t as select 1 as id", "materialized view"),
    "a sequence": ("create sequence t", "is a sequence"),
    "unlogged": ("create unlogged table t (id text primary key)", "SET LOGGED"),
    "a partition": (
        """create table p (id int primary key) partition by range (id);
        create table t partition of p default""",
        r"is a partition: track public.p",
    ),
    "an heir": (
        "create table p (id int primary key); create table t (primary key (id)) inherits (p)",
        "inherits",
    ),
    "a deferrable key": (
        "create table t (id int primary key deferrable)",
        "deferrable.*NOT DEFERRABLE",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_what_cannot_be_kept_in_step_is_refused(db: Database, writer: Any, what: str):
    definition, reason = REFUSED[what]
    await writer.execute(definition)

    with pytest.raises(TableUntrackable, match=reason):
        await track(db, "t")

    assert await tables.all_tables(writer_in_our_schema := await _ours(writer)) == []
    assert not await writer_in_our_schema.fetchval(
        "select exists (select from pg_trigger where tgname like 'restante%')"
    )


async def _ours(connection: Any) -> Any:
    await connection.execute("set search_path = restante")
    return connection


@pytest.mark.parametrize(
    ("name", "error", "reason"),
    [
        ("restante.op_peers", TableUntrackable, "Restante itself"),
        ("pg_catalog.pg_class", TableUntrackable, "belongs to Postgres"),
        ("information_schema.sql_features", TableUntrackable, "belongs to Postgres"),
        ("nothing", TableNotTracked, r"no table public\.nothing"),
        ("a.b.c", BadRequest, "is not the name of a table"),
        ("drop table x;", BadRequest, "is not the name of a table"),
        ("", BadRequest, "is not the name of a table"),
        ("\x00", RestanteError, "is not"),
    ],
)
async def test_a_name_that_is_no_table_of_the_application(
    db: Database, name: str, error: type[Exception], reason: str
):
    with pytest.raises(error, match=reason):
        await track(db, name)


async def test_a_table_of_another_role_is_refused_with_the_grant(
    db: Database, writer: Any, connections: Any, dsn: str
):
    """Our role would not be allowed to create the triggers."""
    await writer.execute(PAGES)
    await writer.execute("create role visitor")
    visitor = await connections()
    try:
        await visitor.execute("grant usage on schema restante to visitor")
        await visitor.execute("grant all on all tables in schema restante to visitor")
        await visitor.execute("set role visitor")
        facts = await relations.facts_named(visitor, "public", "pages")
    finally:
        await visitor.execute("reset role; drop owned by visitor; drop role visitor")

    assert not facts.is_ours
    assert "TO visitor" in (trackable.refusal(facts, forced=True) or "")


@pytest.mark.parametrize("theirs", ["pages", "pages_1"])
async def test_the_table_of_an_owner_who_is_not_us_is_tracked_only_if_forced(
    db: Database, writer: Any, theirs: str
):
    """A trigger or a type of the owner would run with our rights."""
    await writer.execute(
        "create table pages (id int primary key) partition by range (id);"
        f"create table pages_1 partition of pages default; create role painter;"
        f"alter table {theirs} owner to painter"
    )
    try:
        with pytest.raises(
            TableUntrackable, match=r"painter\..*tokens of peers.*OWNER TO.*--force"
        ):
            await track(db)
        started = await track(db, forced=True)
        await capture.untrack(db, "pages")
    finally:
        await writer.execute("drop owned by painter cascade; drop role painter")

    assert "belongs to painter" in started.warnings[0]


async def test_rows_that_are_hidden_from_us_are_refused(db: Database, writer: Any):
    await writer.execute(PAGES)
    await writer.execute("alter table pages enable row level security")
    await writer.execute("alter table pages force row level security")
    await writer.execute("create role seer login; alter table pages owner to seer")
    try:
        await writer.execute("grant all on schema public to seer; set role seer")
        hides = await writer.fetchval("select row_security_active('pages')")
    finally:
        await writer.execute("reset role; drop owned by seer cascade; drop role seer")
    facts = trackable.Facts(
        oid=1, schema_name="public", table_name="pages", role="seer", hides_rows=hides
    )

    assert "BYPASSRLS" in (trackable.refusal(facts, forced=True) or "")


async def test_a_key_from_a_sequence_is_tracked_if_forced(db: Database, writer: Any):
    await writer.execute("create table t (id serial primary key)")

    started = await track(db, "t", forced=True)
    await writer.execute("insert into t default values")

    assert "numbers of its own" in " ".join(started.warnings)
    assert await changes_of(writer, "t") == [("c", {"id": 1})]


async def test_a_table_is_tracked_once(db: Database, writer: Any):
    await writer.execute(PAGES)
    await track(db)

    with pytest.raises(TableUntrackable, match="tracked already"):
        await track(db, "public.pages", name="other")


async def test_two_tables_have_two_names(db: Database, writer: Any):
    await writer.execute(PAGES)
    await writer.execute("create schema app; create table app.pages (id int primary key)")

    first, second = await track(db), await track(db, "app.pages")
    await writer.execute("create table more (id int primary key)")

    assert (first.table.name, second.table.name) == ("pages", "app.pages")
    with pytest.raises(TableUntrackable, match="choose another name"):
        await track(db, "more", name="app.pages")
    assert (await track(db, "more", name="Files")).table.name == "Files"


# Warned of ---------------------------------------------------------------------------------------


async def test_what_an_operator_should_know_is_said(db: Database, writer: Any):
    await writer.execute("create table authors (id int primary key)")
    await writer.execute(
        "create table t (id numeric primary key, slug text unique, author int references authors,"
        " parent numeric references t, upper text generated always as (upper(slug)) stored)"
    )

    warnings = (await track(db, "t")).warnings

    said = " ".join(warnings)
    assert len(warnings) == 4
    assert "t_slug_key" in said
    assert "authors" in said
    assert "generated columns (upper)" in said
    assert "1.0 and 1.00" in said


async def test_nothing_is_said_about_a_plain_table(db: Database, writer: Any):
    await writer.execute("create table authors (id int primary key)")
    await track(db, "authors")
    await writer.execute("create table t (id uuid primary key, author int references authors)")

    assert (await track(db, "t")).warnings == []


# Names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "table", "key", "column"),
    [
        ("public", 'a"; drop table pages; --', "i'd", "$capture$"),
        ("s'\\", "%s %I", "%1$s", "n"),
        ("public", "select", "from", "new_rows"),
        ("public", "Ünïcode ☃", "k", "total"),
        ("public", "vars", "era", "xid"),
        ("public", "letters", "i", "o"),
    ],
)
async def test_names_are_only_names(
    db: Database, writer: Any, *, schema: str, table: str, key: str, column: str
):
    quoted = ['"' + name.replace('"', '""') + '"' for name in (schema, table, key, column)]
    relation = f"{quoted[0]}.{quoted[1]}"
    await writer.execute(f"create schema if not exists {quoted[0]}")
    await writer.execute(f"create table {relation} ({quoted[2]} text primary key, {quoted[3]} int)")
    name = (await track(db, relation)).table.name

    await writer.execute(f"insert into {relation} values ('a', 1), ('b', 2)")
    await writer.execute(f"update {relation} set {quoted[3]} = 3")
    await writer.execute(f"update {relation} set {quoted[2]} = 'c' where {quoted[2]} = 'b'")
    await writer.execute(f"alter table {relation} add more json")
    await writer.execute(f"update {relation} set {quoted[3]} = 4 where {quoted[2]} = 'c'")
    await writer.execute(f"delete from {relation}")

    actions = [one.action for one in await log_of(writer, name)]
    assert actions == ["c", "c", "u", "u", "d", "c", "u", "d", "d"]
    assert (await log_of(writer, name))[-1].data in ({key: "a"}, {key: "c"})
    await capture.untrack(db, name)


async def test_a_key_map_names_columns(db: Database, writer: Any):
    await writer.execute(PAGES)

    with pytest.raises(BadRequest, match="no column title"):
        await track(db, key_map={"Title": "title"})
    with pytest.raises(BadRequest, match="same column"):
        await track(db, key_map={"N": "n", "M": "n"})
    started = await track(db, key_map={"ID": "id", "N": "n"})

    assert started.table.key_map == {"ID": "id", "N": "n"}


# Marks -------------------------------------------------------------------------------------------


async def test_an_empty_table_has_its_whole_history_in_the_log(db: Database, writer: Any):
    await writer.execute(PAGES)

    table = (await track(db)).table

    assert (table.floor, table.trimmed) == (ulids.LOWEST, None)
    assert table.unlogged is not None


async def test_records_from_before_are_below_the_marks_and_later_ops_above(
    db: Database, writer: Any
):
    await writer.execute(PAGES)
    await writer.execute("insert into pages values ('old', 1)")

    table = (await track(db)).table
    await writer.execute("insert into pages values ('new', 1)")

    (op,) = await log_of(writer)
    position = await writer.fetchrow("select era, xid, ulid, n from restante.ops")
    assert table.floor < op.ulid
    assert table.trimmed is not None
    assert table.trimmed == table.unlogged
    assert table.floor_origin == OWN
    assert (table.trimmed.era, table.trimmed.xid) < (position["era"], position["xid"])


async def test_no_write_falls_between_the_look_and_the_triggers(
    db: Database, writer: Any, connections: Any
):
    """A writer that came first is waited for: what it wrote is below the marks."""
    await writer.execute(PAGES)
    watcher = await connections()
    async with writer.transaction():
        await writer.execute("insert into pages values ('a', 1)")
        tracking = asyncio.create_task(track(db))
        blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        while not await watcher.fetchval(blocked):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)

    assert (await tracking).table.trimmed is not None
    assert await log_of(writer) == []


async def test_a_table_that_is_in_use_for_long_is_said_to_be_busy(
    db: Database, writer: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(relations, "_LOCK_TIMEOUT", "50ms")
    await writer.execute(PAGES)
    async with writer.transaction():
        await writer.execute("insert into pages values ('a', 1)")
        with pytest.raises(TableBusy, match="try again"):
            await track(db)

    assert (await track(db)).table.name == "pages"


# Pause and resume --------------------------------------------------------------------------------


async def test_a_paused_table_is_not_captured(db: Database, writer: Any):
    await writer.execute(PAGES)
    await track(db)
    await writer.execute("insert into pages values ('a', 1)")

    await capture.pause(db, "pages", now=now())
    await capture.pause(db, "pages", now=now())
    await writer.execute("insert into pages values ('b', 1); truncate pages")

    (table,) = await tables.all_tables(await _ours(writer))
    assert (table.state, len(await log_of(writer))) == ("paused", 1)


async def test_resume_drops_the_log_and_puts_the_marks_to_now(
    db: Database, writer: Any, connections: Any
):
    """Records may have changed under the versions of before."""
    await writer.execute(PAGES)
    await track(db)
    await writer.execute("insert into pages select n, n from generate_series(1, 5000) as n")
    last = await writer.fetchrow("select * from restante.ops order by era desc, xid desc limit 1")
    ours = await _ours(await connections())
    before = await tables.log_sizes(ours)

    await capture.pause(db, "pages", now=now())
    await writer.execute("update pages set n = 0")
    table = await capture.resume(db, "pages", host=OWN, now=now())
    await writer.execute("update pages set n = 1 where id = '7'")

    after = await tables.log_sizes(ours)
    found = await tables.find(ours, "pages")
    assert found is not None
    assert found.trimmed is not None
    assert found.floor > last["ulid"]
    assert (found.trimmed.era, found.trimmed.xid) > (last["era"], last["xid"])
    assert after[table.id] < before[table.id] / 5
    assert [one.key for one in await log_of(writer)] == [["7"]]
    assert (await log_of(writer))[0].ulid > found.floor


async def test_resume_reports_what_waited_and_may_be_older_than_the_record(
    db: Database, writer: Any, connections: Any
):
    """Applied later, it would overwrite in silence what was changed during the pause."""
    await writer.execute(PAGES)
    await track(db)
    ours = await _ours(await connections())
    old, ahead = (ulids.lowest_at(now() + timedelta(minutes=by)) for by in (-1, 10))
    await ours.execute(
        "insert into op_parked (peer_id, table_name, ulid, origin, action, data, data_hash, reason,"
        " sentence, parked_at, tried_at) select 1, name, ulid, 'a', 'c', '{\"id\": 1}', 1, '', '',"
        " now(), now() from unnest('{pages,other}'::text[]) as name, unnest($1::uuid[]) as ulid",
        [old, ahead],
    )

    await capture.pause(db, "pages", now=now())
    await capture.resume(db, "pages", host=OWN, now=now())

    parked = await ours.fetch("select table_name, ulid from op_parked order by 1, 2")
    assert [tuple(row) for row in parked] == [("other", old), ("other", ahead), ("pages", ahead)]
    conflict = await ours.fetchrow("select * from op_conflicts")
    assert (conflict["lost_ulid"], conflict["lost"]) == (old, '{"id": 1}')


async def test_a_table_that_is_not_paused_is_not_resumed(db: Database, writer: Any):
    """It would lose its log."""
    await writer.execute(PAGES)
    await track(db)
    await writer.execute("insert into pages values ('a', 1)")

    with pytest.raises(BadRequest, match="not paused"):
        await capture.resume(db, "pages", host=None, now=now())
    assert len(await log_of(writer)) == 1


async def test_the_floor_is_never_lowered(db: Database, writer: Any):
    await writer.execute(PAGES)
    await track(db)
    high = ulids.lowest_at(datetime(2050, 1, 1, tzinfo=UTC))
    await writer.execute("update restante.op_tables set floor = $1", high)

    await capture.pause(db, "pages", now=now())
    await capture.resume(db, "pages", host=None, now=now())

    assert (await tables.all_tables(await _ours(writer)))[0].floor == high


async def test_a_writer_that_is_under_way_is_before_the_pause(
    db: Database, writer: Any, connections: Any
):
    await writer.execute(PAGES)
    await track(db)
    watcher = await connections()
    async with writer.transaction():
        await writer.execute("insert into pages values ('a', 1)")
        pausing = asyncio.create_task(capture.pause(db, "pages", now=now()))
        blocked = "select count(*) from pg_stat_activity where wait_event_type = 'Lock'"
        while not await watcher.fetchval(blocked):  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.01)
        await writer.execute("insert into pages values ('b', 1)")
    await pausing
    await writer.execute("insert into pages values ('c', 1)")

    assert [one.key for one in await log_of(writer)] == [["a"], ["b"]]


# Untrack -----------------------------------------------------------------------------------------


async def test_nothing_is_left_of_an_untracked_table_but_the_table(db: Database, writer: Any):
    await writer.execute(PAGES)
    before = await _everything(writer)
    await track(db)
    await writer.execute("insert into pages values ('a', 1)")

    await capture.untrack(db, "pages")
    await writer.execute("insert into pages values ('b', 1); truncate pages")

    assert await _everything(writer) == before
    assert await tables.all_tables(await _ours(writer)) == []


async def _everything(connection: Any) -> set[tuple[str, str]]:
    rows = await connection.fetch(
        "select 'table', oid::regclass::text from pg_class where relkind in ('r', 'p', 'S')"
        " union select 'function', oid::regprocedure::text from pg_proc"
        " union select 'trigger', tgname from pg_trigger"
    )
    return {tuple(row) for row in rows}


async def test_untrack_takes_nothing_from_a_transaction_that_is_under_way(
    db: Database, writer: Any, connections: Any
):
    """It has read the table, and writes to it when we wait already: no deadlock, or not its one."""
    await writer.execute(PAGES)
    await track(db)
    watcher = await connections()
    async with writer.transaction():
        await writer.fetch("select from pages")
        ending = asyncio.create_task(capture.untrack(db, "pages"))
        await until(lambda: watcher.fetchval(WAITS_FOR_A_LOCK), seconds=10)
        await writer.execute("insert into pages values ('a', 1)")
    await ending

    assert await tables.all_tables(await _ours(writer)) == []


async def test_untrack_and_resume_do_not_disturb_writers_of_other_tables(
    db: Database, writer: Any, connections: Any
):
    """All logs are partitions of one table, and every transaction that writes uses it."""
    await writer.execute(f"{PAGES}; create table parts (id text primary key)")
    await writer.execute("create table drafts (id text primary key)")
    for name in ("pages", "parts", "drafts"):
        await track(db, name)
    other, watcher = await connections(), await connections()
    await other.execute("set lock_timeout = 100")
    logs = "select count(*) from pg_class where relname ~ '^ops_[0-9]+$'"

    async with writer.transaction():
        await writer.execute("insert into parts values ('a')")
        await writer.fetch("select from restante.ops")
        await capture.pause(db, "drafts", now=now())
        ending = asyncio.create_task(capture.untrack(db, "pages"))
        await until(lambda: watcher.fetchval(WAITS_FOR_A_LOCK), seconds=10)
        await other.execute("insert into public.parts values ('b')")
        await other.fetch("select from restante.ops")
        await ending
        assert await watcher.fetchval(logs) == 3
        await track(db, "public.pages")
    await capture.resume(db, "drafts", host=OWN, now=now())
    await schema_changes.refresh(db)

    assert await watcher.fetchval(logs) == 3
    assert await relations.leftover_logs(await _ours(watcher)) == []
    assert len(await log_of(writer, "parts")) == 2


async def test_resume_waits_for_no_writer_of_another_table(
    db: Database, writer: Any, connections: Any
):
    await writer.execute(f"{PAGES}; create table parts (id text primary key)")
    await track(db)
    await track(db, "parts")
    await capture.pause(db, "pages", now=now())

    async with writer.transaction():
        await writer.execute("insert into parts values ('a')")
        await capture.resume(db, "pages", host=OWN, now=now())

    assert len(await log_of(writer, "parts")) == 1


async def test_resume_waits_for_nobody_who_looks_again_at_deletes(
    db: Database, writer: Any, connections: Any
):
    """That one holds its note of the delete, and waits for the table or its log."""
    await writer.execute(PAGES)
    table = (await track(db)).table
    await capture.pause(db, "pages", now=now())
    ours = await _ours(await connections())
    await ours.execute("insert into op_unsettled values ($1, 1, '[1]', 1, '{}')", table.id)

    async with ours.transaction():
        await ours.execute("delete from op_unsettled")
        await capture.resume(db, "pages", host=OWN, now=now())

    assert await ours.fetchval("select state from op_tables") == "tracked"


async def test_a_table_that_was_dropped_can_be_untracked(db: Database, writer: Any):
    await writer.execute(PAGES)
    await track(db)
    await writer.execute("drop table pages")

    await capture.untrack(db, "pages")

    assert await tables.all_tables(await _ours(writer)) == []


async def test_a_table_that_is_not_tracked_is_named(db: Database):
    for action in (
        capture.untrack(db, "nothing"),
        capture.pause(db, "nothing", now=now()),
        capture.resume(db, "nothing", host=None, now=now()),
    ):
        with pytest.raises(TableNotTracked, match="nothing is not tracked"):
            await action


async def test_peers_that_we_follow_are_asked_for_a_snapshot(
    db: Database, writer: Any, connections: Any
):
    """Their ops of the table were refused until now, and our cursors are past them."""
    await writer.execute(PAGES)
    ours = await _ours(await connections())
    await ours.execute(
        "insert into op_peers (host, protocol, cursor, tables, added_at) values"
        " ('read', 'restante', 'x', null, now()), ('unread', 'restante', '', null, now()),"
        " ('old', 'ulid', 'x', null, now()), ('elsewhere', 'restante', 'x', '{other}', now())"
    )

    await track(db)

    wanted = await ours.fetch(
        "select op_peers.host, phase from op_snapshots join op_peers on op_peers.id = peer_id"
    )
    assert wanted == [("read", "new")]


async def test_another_session_waits_for_the_change_of_triggers_only(
    db: Database, writer: Any, connections: Any
):
    """Readers are not blocked while a table is tracked."""
    await writer.execute(PAGES)
    reader, watcher, tracker = await connections(), await connections(), await connections()
    async with tracker.transaction():
        await tracker.execute("lock table public.pages in share row exclusive mode")
        assert await records_of(reader) == []
        writing = asyncio.create_task(writer.execute("insert into pages values ('a', 1)"))
        await until_blocked(watcher, writer)
    await writing

    assert len(await records_of(reader)) == 1
