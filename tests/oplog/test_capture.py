"""Every change of a tracked table is in the log, in the transaction that makes it."""

import random
from collections import Counter
from typing import Any

import asyncpg
import pytest
from oplog.captured import OWN, changes_of, log_of, records_of, replayed, track

from restante.database.pool import Database
from restante.oplog import positions, ulids

pytestmark = pytest.mark.anyio


@pytest.fixture
async def writer(db: Database, connections: Any) -> Any:
    """A connection of the application; `pages` is tracked."""
    connection = await connections()
    await connection.execute("set search_path = public")
    await connection.execute("create table pages (id text primary key, n integer, body text)")
    await track(db)
    return connection


# Statements --------------------------------------------------------------------------------------


async def test_each_action_is_logged_with_the_whole_record(writer: Any):
    await writer.execute("insert into pages values ('a', 1, 'x'), ('b', 2, null)")
    await writer.execute("update pages set n = 7 where id = 'a'")
    await writer.execute("delete from pages where id = 'b'")

    log = await log_of(writer)

    assert [(one.action, one.key, one.data) for one in log] == [
        ("c", ["a"], {"id": "a", "n": 1, "body": "x"}),
        ("c", ["b"], {"id": "b", "n": 2, "body": None}),
        ("u", ["a"], {"id": "a", "n": 7, "body": "x"}),
        ("d", ["b"], {"id": "b"}),
    ]
    assert {one.host for one in log} == {OWN}


async def test_the_records_of_a_statement_are_one_op_in_their_order(writer: Any):
    await writer.execute("insert into pages values ('a', 1), ('b', 2), ('c', 3)")

    log = await log_of(writer)

    assert len({one.ulid for one in log}) == 1
    assert [(one.n, one.key) for one in log] == [(0, ["a"]), (1, ["b"]), (2, ["c"])]


async def test_an_op_has_at_most_500_records(writer: Any):
    await writer.execute("insert into pages select n, n from generate_series(1, 1201) as n")
    await writer.execute("update pages set n = -n")

    sizes = Counter((one.action, one.ulid) for one in await log_of(writer))

    assert sorted(sizes.values()) == [201, 201, 500, 500, 500, 500]
    assert {one.n for one in await log_of(writer)} == set(range(500))


async def test_a_statement_that_changes_nothing_logs_nothing(writer: Any):
    await writer.execute("insert into pages select 'a' where false")
    await writer.execute("update pages set n = 1; delete from pages")

    assert await log_of(writer) == []


async def test_an_upsert_is_a_create_or_an_update(writer: Any):
    upsert = (
        "insert into pages values ($1, 1), ($2, 1) on conflict (id) do update set n = pages.n + 1"
    )
    await writer.execute(upsert, "a", "b")
    await writer.execute(upsert, "b", "c")

    changes = [(action, data["id"], data["n"]) for action, data in await changes_of(writer)]
    assert sorted(changes) == [("c", "a", 1), ("c", "b", 1), ("c", "c", 1), ("u", "b", 2)]


async def test_a_merge_is_logged(writer: Any):
    await writer.execute("insert into pages values ('a', 1), ('b', 2)")

    await writer.execute(
        "merge into pages using (values ('a', 0), ('b', 5), ('c', 6)) as s (id, n)"
        "   on pages.id = s.id"
        " when matched and s.n = 0 then delete"
        " when matched then update set n = s.n"
        " when not matched then insert values (s.id, s.n)"
    )

    assert await replayed(writer) == await records_of(writer)


async def test_copy_is_logged(writer: Any):
    await writer.copy_records_to_table("pages", records=[("a", 1, "x"), ("b", 2, "y")])

    assert await replayed(writer) == await records_of(writer) != []


async def test_a_statement_that_deletes_and_inserts_one_key_leaves_it(writer: Any):
    """The trigger for DELETE may fire last, although the record was inserted after it."""
    await writer.execute("insert into pages values ('a', 1), ('b', 2)")

    await writer.execute(
        "with gone as (delete from pages returning id, n)"
        " insert into pages select id, n + 10 from gone limit 1"
    )

    assert await replayed(writer) == await records_of(writer)
    assert len(await records_of(writer)) == 1


async def test_a_merge_that_deletes_and_inserts_one_key_leaves_it(writer: Any):
    await writer.execute("insert into pages values ('a', 1)")

    await writer.execute(
        "merge into pages using (values ('a', 0), ('z', 1)) as s (id, n) on pages.id = s.id"
        " when matched then delete"
        " when not matched then insert values ('a', 9)"
    )

    assert await replayed(writer) == await records_of(writer)


async def test_what_is_rolled_back_is_not_logged(writer: Any):
    async with writer.transaction():
        await writer.execute("insert into pages values ('a', 1)")
        savepoint = writer.transaction()
        await savepoint.start()
        await writer.execute("update pages set n = 2")
        await savepoint.rollback()
        await writer.execute("update pages set body = 'kept'")

    assert await changes_of(writer) == [
        ("c", {"id": "a", "n": 1, "body": None}),
        ("u", {"id": "a", "n": 1, "body": "kept"}),
    ]


async def test_a_change_is_seen_with_its_transaction(writer: Any, connections: Any):
    reader = await connections()
    async with writer.transaction():
        await writer.execute("insert into pages values ('a', 1)")
        before = await log_of(reader)

    assert (before, len(await log_of(reader))) == ([], 1)


# Keys --------------------------------------------------------------------------------------------


async def test_a_changed_key_is_a_delete_and_a_create(writer: Any):
    """Each is an op of its own, and the delete is the older one."""
    await writer.execute("insert into pages values ('a', 1), ('b', 2)")

    await writer.execute("update pages set id = 'z' where id = 'a'")

    log = (await log_of(writer))[2:]
    assert [(one.action, one.data) for one in log] == [
        ("d", {"id": "a"}),
        ("c", {"id": "z", "n": 1, "body": None}),
    ]
    assert log[0].ulid < log[1].ulid


async def test_a_key_that_passes_to_another_record_is_not_deleted(writer: Any):
    """Both statements have the key in their old rows, and the record that has it now is newer."""
    await writer.execute("insert into pages values ('3', 30), ('2', 20), ('1', 10)")

    await writer.execute("update pages set id = id::integer + 1")

    assert await replayed(writer) == await records_of(writer)
    assert sorted(one.action for one in (await log_of(writer))[3:]) == ["c", "d", "u", "u"]


async def test_a_key_of_several_columns(db: Database, writer: Any):
    await writer.execute("create table parts (a integer, x text, b uuid, primary key (b, a))")
    await track(db, "parts")

    await writer.execute(
        "insert into parts values (1, 'x', '00000000-0000-0000-0000-00000000000a')"
    )
    await writer.execute("delete from parts")

    log = await log_of(writer, "parts")
    assert [one.key for one in log] == [["00000000-0000-0000-0000-00000000000a", 1]] * 2
    assert log[1].data == {"b": "00000000-0000-0000-0000-00000000000a", "a": 1}


# Old rows ----------------------------------------------------------------------------------------


async def test_an_update_and_a_delete_know_the_row_that_they_changed(writer: Any):
    await writer.execute("insert into pages select n, n from generate_series(1, 5) as n")
    before = {
        row["id"]: row["hash"]
        for row in await writer.fetch("select id, restante.op_row_hash(pages) as hash from pages")
    }
    await writer.execute("update pages set n = n + 1 where id <> '5'")
    await writer.execute("delete from pages where id = '5'")

    log = (await log_of(writer))[5:]

    assert {one.key[0]: one.old_hash for one in log} == before
    assert len(before) == 5


async def test_a_type_without_a_hash_function_is_hashed_as_text(db: Database, writer: Any):
    await writer.execute("create table notes (id integer primary key, about json, at point)")
    await track(db, "notes")
    await writer.execute("""insert into notes values (1, '{"a": 1}', '(1, 2)')""")
    before = await writer.fetchval("select restante.op_row_hash(notes) from notes")

    await writer.execute("update notes set id = id")

    assert (await log_of(writer, "notes"))[1].old_hash == before


# Other triggers ----------------------------------------------------------------------------------


async def test_a_trigger_that_changes_the_record_again_is_not_overwritten(writer: Any):
    """Its change is logged before the one that fired it; the newest op has the last values."""
    await writer.execute(
        "create function again() returns trigger language plpgsql as $$ begin"
        " update pages set body = 'seen' where id = new.id; return null; end $$;"
        " create trigger a_again after insert on pages for each row execute function again()"
    )

    await writer.execute("insert into pages values ('a', 1), ('b', 2)")

    assert await replayed(writer) == await records_of(writer)


async def test_a_trigger_that_inserts_what_was_deleted_is_not_overwritten(writer: Any):
    await writer.execute("insert into pages values ('a', 1)")
    await writer.execute(
        "create function back() returns trigger language plpgsql as $$ begin"
        " insert into pages values (old.id, 100); return null; end $$;"
        " create trigger a_back after delete on pages for each row execute function back()"
    )

    await writer.execute("delete from pages")

    assert await replayed(writer) == await records_of(writer)


async def test_cascades_are_logged(db: Database, writer: Any):
    await writer.execute(
        "create table lines (id integer primary key,"
        " page text references pages on delete cascade on update cascade)"
    )
    await track(db, "lines")
    await writer.execute("insert into pages values ('a', 1), ('b', 1)")
    await writer.execute("insert into lines values (1, 'a'), (2, 'b')")

    await writer.execute("update pages set id = 'z' where id = 'a'")
    await writer.execute("delete from pages where id = 'b'")

    assert await replayed(writer, "lines") == await records_of(writer, "lines")
    assert await replayed(writer) == await records_of(writer)


# Who writes --------------------------------------------------------------------------------------


async def test_a_role_without_rights_on_our_schema_can_write(writer: Any):
    await writer.execute(
        "create role guest; grant insert, update, delete, select on pages to guest"
    )
    try:
        await writer.execute("set role guest")
        await writer.execute("insert into pages values ('a', 1)")
        await writer.execute("update pages set n = 2; delete from pages")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await writer.execute("select from restante.ops")
    finally:
        await writer.execute("reset role; drop owned by guest; drop role guest")

    assert [action for action, _ in await changes_of(writer)] == ["c", "u", "d"]


async def test_a_role_that_only_connects_cannot_stop_writers(writer: Any, connections: Any):
    """Advisory locks are everybody's: those that this role takes must be none of ours."""
    visitor = await connections()
    await visitor.execute("create role visitor; set session authorization visitor")
    try:
        await visitor.execute("select pg_advisory_lock(730117, n) from generate_series(1, 2) as n")
        await writer.execute("set lock_timeout = 500")
        await writer.execute("insert into pages values ('a', 1)")
        for lock in ("op_clock_lock", "op_era_lock"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await visitor.execute(f"begin; lock table restante.{lock} in access share mode")
            await visitor.execute("rollback")
    finally:
        await visitor.execute("reset session authorization; drop role visitor")

    assert len(await log_of(writer)) == 1


async def test_a_session_that_is_a_replica_is_captured(writer: Any):
    await writer.execute("set session_replication_role = replica")

    await writer.execute("insert into pages values ('a', 1)")

    assert len(await log_of(writer)) == 1


async def test_what_is_applied_from_peers_is_not_captured(writer: Any):
    async with writer.transaction():
        await writer.execute(
            "select set_config('restante.applying', id::text, true) from restante.op_tables"
        )
        await writer.execute("insert into pages values ('a', 1); update pages set n = 2")
    await writer.execute("insert into pages values ('b', 1)")

    assert [data["id"] for _, data in await changes_of(writer)] == ["b"]


async def test_only_our_own_role_applies_without_being_captured(writer: Any, connections: Any):
    guest = await connections()
    await guest.execute("create role guest; grant insert on public.pages to guest")
    table_id = await writer.fetchval("select id from restante.op_tables")
    try:
        await guest.execute("set session authorization guest")
        await guest.execute(f"set restante.applying = '{table_id}'")
        await guest.execute("insert into public.pages values ('a', 1)")
    finally:
        await guest.execute("reset session authorization; drop owned by guest; drop role guest")

    assert len(await log_of(writer)) == 1


async def test_serializable_writers_of_different_records_do_not_fail(writer: Any, connections: Any):
    """Capture reads nothing that another writer writes."""
    other = await connections()
    await writer.execute("insert into pages select n from generate_series(1, 4) as n")
    for connection in (writer, other):
        await connection.execute("set enable_seqscan = off; begin isolation level serializable")

    for connection, record in ((writer, 1), (other, 2), (writer, 3), (other, 4)):
        await connection.execute(f"delete from public.pages where id = '{record}'")
    await writer.execute("commit")
    await other.execute("commit")

    assert [action for action, _ in await changes_of(writer)] == [*"ccccdddd"]


async def test_settings_of_a_session_do_not_fail_its_writes(writer: Any, db: Database):
    table_id = await writer.fetchval("select id from restante.op_tables")
    for name in ("nested", "created", "applying"):
        await writer.execute(f"set restante.{name}_{table_id} = 'not a number'")
        await writer.execute(f"set restante.{name} = 'not a number'")

    await writer.execute("insert into pages values ('a', 1)")
    await writer.execute("update pages set n = 2; delete from pages")

    assert [action for action, _ in await changes_of(writer)] == ["c", "u", "d"]


async def test_texts_do_not_depend_on_the_settings_of_the_writer(db: Database, writer: Any):
    await writer.execute(
        "create table odd (id timestamptz primary key, f float8, i interval, b bytea, d date)"
    )
    await track(db, "odd")
    values = (
        "values ($1::text::timestamptz, 0.1::float8 + 0.2, '1 day 2 h', '\\x00ff', '2026-02-01')"
    )
    await writer.execute(f"insert into odd {values}", "2026-01-01 00:00+00")
    await writer.execute(
        "set timezone = 'Asia/Tokyo'; set datestyle = 'German'; set intervalstyle = 'iso_8601';"
        " set extra_float_digits = -15; set bytea_output = 'escape';"
        " set standard_conforming_strings = off; set search_path = ''"
    )
    await writer.execute("delete from public.odd")
    await writer.execute("reset standard_conforming_strings")
    await writer.execute(f"insert into public.odd {values}", "2026-01-01 00:00+00")

    log = await log_of(writer, "odd")

    assert len({str(one.key) for one in log}) == 1
    assert log[0].data == log[2].data
    assert log[0].data["f"] == 0.1 + 0.2


async def test_truncate_is_refused_with_the_way_out(writer: Any):
    await writer.execute("insert into pages values ('a', 1)")

    with pytest.raises(asyncpg.ObjectNotInPrerequisiteStateError, match="cannot log a") as refused:
        await writer.execute("truncate pages")

    assert "restante oplog pause" in (refused.value.hint or "")
    assert "public.pages" in str(refused.value)
    assert len(await records_of(writer)) == 1


# Versions ----------------------------------------------------------------------------------------


async def test_later_statements_have_greater_ulids_and_positions(writer: Any):
    for n in range(20):
        await writer.execute("insert into pages values ($1, $2)", str(n), n)

    rows = await writer.fetch("select era, xid, ulid, n from restante.ops order by arrived_at")
    found = [positions.Position(*row) for row in rows]

    assert found == sorted(found)
    assert [one.ulid for one in found] == sorted({one.ulid for one in found})
    assert positions.parsed(str(found[0])) == found[0]
    assert ulids.moment_of(found[0].ulid) <= ulids.moment_of(found[-1].ulid)


async def test_two_writers_have_different_ulids(writer: Any, connections: Any):
    other = await connections()
    async with writer.transaction(), other.transaction():
        await writer.execute("insert into pages values ('a', 1)")
        await other.execute("insert into public.pages values ('b', 1)")
        await writer.execute("insert into pages values ('c', 1)")

    assert len({one.ulid for one in await log_of(writer)}) == 3


# Any statements ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_the_log_replayed_is_the_table(writer: Any, seed: int):
    """Random statements in random transactions, some of which are rolled back."""
    chance = random.Random(seed)
    for _ in range(60):
        transaction = writer.transaction()
        await transaction.start()
        try:
            for _ in range(chance.randint(1, 4)):
                await _random_statement(writer, chance)
        except asyncpg.UniqueViolationError:
            await transaction.rollback()
            continue
        await (transaction.rollback() if chance.random() < 0.15 else transaction.commit())

    assert await replayed(writer) == await records_of(writer), f"seed {seed}"


async def _random_statement(writer: Any, chance: random.Random) -> None:
    low, high = sorted((chance.randint(0, 30), chance.randint(0, 30)))
    n, other = chance.randint(0, 99), chance.randint(0, 30)
    some = f"(select i::text as id, {n} as n from generate_series({low}, {high}) as i)"
    within = f"id::integer between {low} and {high}"
    insert = f"insert into pages select * from {some} as s"
    back = (
        f"with gone as (delete from pages where id::integer > {high} returning id)"
        f" insert into pages select id, {n} from gone limit {other % 4}"
    )
    merge = (
        f"merge into pages using {some} as s on pages.id = s.id"
        " when matched and pages.n % 2 = 0 then delete"
        " when matched then update set n = s.n when not matched then insert values (s.id, s.n)"
    )
    statement = chance.choice(
        [
            f"{insert} on conflict do nothing",
            f"{insert} on conflict (id) do update set n = {n + 1}",
            f"update pages set n = n + 1 where {within}",
            f"update pages set id = id::integer + {other} where {within}",
            f"delete from pages where {within}",
            back,
            merge,
        ]
    )
    await writer.execute(statement)
