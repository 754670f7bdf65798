"""
Pulling from peers that speak only the older protocol, played by a server with made-up answers.

Such a peer says only ULIDs, cannot vouch for what it sends, and may say anything.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from impostors import http
from oplog.made_up_peers import NOW, OWN, Reader, gap, limited, note, op, reading, ulid

from restante.database.pool import Database
from restante.errors import PeerUnreachable
from restante.oplog import remote, ulids
from restante.oplog.pulling import following
from restante.oplog.tracking import capture
from restante.oplog.tracking.capture import Wanted

pytestmark = pytest.mark.anyio


@pytest.fixture
async def reader(db: Database, dsn: str) -> AsyncIterator[Reader]:
    async with reading(db) as found:
        yield found


async def test_a_page_is_applied_and_the_cursor_is_its_last_op(reader: Reader):
    pause_seconds = await reader.pull(
        http(
            body=[op(9, note("a")), op(8, note("b"), note("c")), op(7, note("a"), action="delete")]
        )
    )

    stored = await reader.stored()
    assert await reader.names() == ["b", "c"]
    assert (stored["cursor"], stored["protocol"]) == (ulid(minutes_ago=7), "ulid")
    assert pause_seconds == 10
    assert reader.asked.query == {}
    assert reader.asked.path == "/internal/crud/sweep"


async def test_the_next_page_is_asked_for_with_some_minutes_of_overlap(reader: Reader):
    """Its pages are in the order of ULIDs, so an op that was committed late lies behind."""
    await reader.pull(
        http(body=[op(9, note("a"))]), http(body=[op(11, note("late")), op(9, note("a"))])
    )

    assert reader.asked.query["after"] == ulid(minutes_ago=14)
    assert await reader.names() == ["a", "late"]
    assert (await reader.stored())["cursor"] == ulid(minutes_ago=9)


async def test_names_are_mapped_and_what_is_omitted_is_zero(reader: Reader):
    await reader.sql.execute(
        """update restante.op_tables set key_map = '{"Name": "id", "n": "size"}'"""
    )

    digits = "12345678901234567890.12345678901234567890"
    body = json.dumps([op(9, {"Name": "a", "n": 0, "unknown": {}}), op(8, {"Name": "b"})])
    await reader.pull(http(body=body.replace('"n": 0', f'"n": {digits}').encode()))

    rows = await reader.sql.fetch("select id, body, size::text from notes order by id")
    assert [tuple(row) for row in rows] == [("a", "", digits), ("b", "", "0")]


async def test_a_delete_names_its_key_as_the_peer_does(reader: Reader):
    await reader.sql.execute("""update restante.op_tables set key_map = '{"Name": "id"}'""")

    await reader.pull(
        http(
            body=[
                op(9, {"Name": "a"}, {"Name": "b"}),
                op(8, {"Name": "a", "x": 1}, action="delete"),
            ]
        )
    )

    assert await reader.names() == ["b"]


# Gaps --------------------------------------------------------------------------------------------


async def test_a_gap_is_stored_with_the_body_and_counted_once(reader: Reader):
    await reader.pull(http(body=[op(90, note("a"))]))

    minimum = ulid(minutes_ago=30)
    await reader.pull(gap([op(30, note("b"))], minimum))
    first = await reader.stored()
    await reader.pull(gap([op(30, note("b"))], minimum))
    second = await reader.stored()

    assert (first["cursor"], first["gaps"], first["gap_at"]) == (minimum, 1, minimum)
    assert (second["cursor"], second["gaps"]) == (minimum, 1)
    assert await reader.names() == ["a", "b"]


async def test_the_same_gap_on_an_empty_log_moves_the_cursor_once(reader: Reader):
    await reader.pull(http(body=[op(90, note("a"))]))

    minimum = ulid(minutes_ago=30)
    await reader.pull(gap([], minimum), gap([], minimum))

    stored = await reader.stored()
    assert (stored["cursor"], stored["gaps"]) == (minimum, 1)


async def test_a_first_contact_cannot_be_steered(reader: Reader):
    """Without a cursor nothing can have been missed."""
    await reader.pull(gap([op(60, note("a"))], ulid(minutes_ago=1)))

    stored = await reader.stored()
    assert (stored["cursor"], stored["gaps"]) == (ulid(minutes_ago=60), 0)


async def test_a_first_contact_with_an_empty_page_and_a_gap_stores_nothing(reader: Reader):
    await reader.pull(gap([], ulid(minutes_ago=1)))

    stored = await reader.stored()
    assert (stored["cursor"], stored["gaps"]) == ("", 0)


HOSTILE = [
    pytest.param(ulid(minutes_ago=-60 * 25), id="in 25 hours"),
    ulids.text_of(ulids.lowest_at(datetime(2023, 12, 31, tzinfo=UTC))),
    "00000000000000000000000000",
    "7ZZZZZZZZZZZZZZZZZZZZZZZZZ",
    "ZZZZZZZZZZZZZZZZZZZZZZZZZZ",
    "garbage",
    "'; drop table notes; --",
    pytest.param(ulid(minutes_ago=100), id="100 minutes ago"),
    "",
]


@pytest.mark.parametrize("minimum", HOSTILE)
async def test_a_gap_that_is_not_plausible_or_not_greater_is_ignored(reader: Reader, minimum: str):
    await reader.pull(http(body=[op(90, note("a"))]))

    await reader.pull(gap([op(80, note("b"))], minimum))

    stored = await reader.stored()
    assert (stored["cursor"], stored["gaps"]) == (ulid(minutes_ago=80), 0)
    assert await reader.names() == ["a", "b"]


async def test_without_the_header_there_is_no_gap(reader: Reader):
    await reader.pull(http(body=[op(90, note("a"))]))

    minimum = ulid(minutes_ago=30)
    await reader.pull(http(body=[], X_Mediorum_Available_Min_Ulid=minimum))

    assert (await reader.stored())["cursor"] == ulid(minutes_ago=90)


async def test_a_body_that_breaks_off_changes_nothing(reader: Reader):
    """The header has arrived, but what it announces is stored only with the body."""
    await reader.pull(http(body=[op(90, note("a"))]))
    whole = gap([op(30, note("b")), op(29, note("c"))], ulid(minutes_ago=30))

    for broken in (whole[:-20], whole[: whole.index(b"\r\n\r\n") + 4]):
        with pytest.raises(PeerUnreachable):
            await reader.pull(broken)

    stored = await reader.stored()
    assert (stored["cursor"], stored["gaps"]) == (ulid(minutes_ago=90), 0)
    assert await reader.names() == ["a"]

    await reader.pull(whole)

    stored = await reader.stored()
    assert (stored["cursor"], stored["gaps"]) == (ulid(minutes_ago=29), 1)
    assert await reader.names() == ["a", "b", "c"]


async def test_a_body_without_a_length_that_breaks_off_changes_nothing(reader: Reader):
    whole = http(body=[op(90, note("a"))], Content_Length=None)

    with pytest.raises(PeerUnreachable):
        await reader.pull(whole[:-10])

    assert (await reader.stored())["cursor"] == ""
    assert await reader.names() == []


# What was scanned --------------------------------------------------------------------------------


async def test_an_empty_page_with_what_was_scanned_moves_the_cursor(reader: Reader):
    """All that is there is of tables that we may not see."""
    scanned = ulid(minutes_ago=3)

    await reader.pull(http(body=[], X_Crud_Sweep_Last_Scanned_Ulid=scanned))

    assert (await reader.stored())["cursor"] == scanned


@pytest.mark.parametrize("scanned", HOSTILE)
async def test_what_was_scanned_must_be_plausible_and_greater(reader: Reader, scanned: str):
    await reader.pull(http(body=[op(90, note("a"))]))

    await reader.pull(http(body=[], X_Crud_Sweep_Last_Scanned_Ulid=scanned))

    assert (await reader.stored())["cursor"] == ulid(minutes_ago=90)


async def test_a_limited_page_is_followed_by_the_next_without_overlap(reader: Reader):
    pause_seconds = await reader.pull(limited([op(90, note("a"))]))
    assert pause_seconds == 0

    pause_seconds = await reader.pull(http(body=[op(80, note("b"))]))

    assert reader.asked.query["after"] == ulid(minutes_ago=90)
    assert pause_seconds == 10


async def test_a_full_page_of_old_ops_does_not_stall(reader: Reader):
    """More ops in the minutes of overlap than a page has."""
    await reader.pull(http(body=[op(20, note("a"))]))

    await reader.pull(limited([op(24, note("b"))]))
    await reader.pull(limited([op(23, note("c")), op(10, note("d"))]))

    assert reader.asked.query["after"] == ulid(minutes_ago=24)
    assert await reader.names() == ["a", "b", "c", "d"]
    assert (await reader.stored())["cursor"] == ulid(minutes_ago=10)


# Ops that cannot be taken ------------------------------------------------------------------------


async def test_what_cannot_be_applied_is_parked_and_the_rest_goes_on(reader: Reader):
    await reader.sql.execute("alter table notes add check (body <> 'bad')")

    await reader.pull(http(body=[op(9, note("a")), op(8, note("b", body="bad")), op(7, note("c"))]))

    stored = await reader.stored()
    assert await reader.names() == ["a", "c"]
    assert (stored["cursor"], stored["applied"], stored["parked"]) == (ulid(minutes_ago=7), 2, 1)


@pytest.mark.parametrize(
    "bad",
    [
        op(8, note("x"), ulid=ulid(minutes_ago=-60 * 25)),
        op(8, note("x"), ulid="00000000000000000000000000"),
        op(8, note("x"), ulid="7ZZZZZZZZZZZZZZZZZZZZZZZZZ"),
        op(8, note("x"), ulid="no ulid"),
        op(8, note("x"), ulid=7),
        op(8, note("x"), action="explode"),
        op(8, note("x"), table="op_peers"),
        op(8, note("x"), table='notes"; drop table notes; --'),
        op(8, note("x"), host=""),
        op(8, 5),  # type: ignore[arg-type]
        op(8, {"body": "no key"}),
        op(8) | {"data": None},
        {"nothing": "of it"},
        17,
        None,
    ],
)
async def test_an_op_that_is_none_is_refused_and_counted(reader: Reader, bad: Any):
    """The cursor follows the ops that are."""
    await reader.pull(http(body=[op(9, note("a")), bad, op(7, note("c"))]))

    stored = await reader.stored()
    assert await reader.names() == ["a", "c"]
    assert (stored["cursor"], stored["refused"]) == (ulid(minutes_ago=7), 1)


async def test_an_op_of_a_clock_ahead_waits_and_does_not_drag_the_cursor(reader: Reader):
    """It is last in every page: a cursor on it would skip all that is written until then."""
    body = [op(9, note("a")), op(-60, note("ahead"))]

    await reader.pull(http(body=body), http(body=body))

    stored = await reader.stored()
    assert await reader.names() == ["a"]
    assert await reader.sql.fetchval("select count(*) from restante.op_parked") == 1
    assert stored["cursor"] <= ulid(minutes_ago=0)


@pytest.mark.parametrize("body", [b"", b"null", b"{}", b"[", b"[" * 100_000, b"\xff", b"<html>"])
async def test_a_body_that_is_no_array_is_a_failure(reader: Reader, body: bytes):
    with pytest.raises(PeerUnreachable):
        await reader.pull(http(body=body))

    assert (await reader.stored())["cursor"] == ""


@pytest.mark.parametrize("status", [301, 302, 401, 404, 418, 500, 503])
async def test_other_answers_are_failures_and_redirects_are_not_followed(
    reader: Reader, status: int
):
    with pytest.raises(PeerUnreachable, match=str(status)):
        await reader.pull(
            http(status, [op(9, note("a"))], Location=f"{reader.other.url}/elsewhere")
        )

    assert len(reader.other.asked) == 1
    assert await reader.names() == []


async def test_a_body_that_is_too_long_is_a_failure(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(remote, "MAX_BODY_BYTES", 200)

    with pytest.raises(PeerUnreachable, match="more than 200 bytes"):
        await reader.pull(http(body=[op(9, note("a", body="x" * 200))]))


# Stored cursors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cursor",
    [
        "garbage",
        "00000000000000000000000000",
        pytest.param(ulid(minutes_ago=-60 * 25), id="in 25 hours"),
        "7ZZZZZZZZZZZZZZZZZZZZZZZZZ",
        "'; drop table notes; --",
        "ffffffffffffffff-0000000000000001-01K00000000000000000000000-00000000",
        "7fffffffffffffff-0000000000000001-01K00000000000000000000000-00000000",
        "0000000000000001-0000000000000001-01K00000000000000000000000-00000000",
    ],
)
async def test_a_cursor_that_cannot_be_is_treated_as_missing_and_heals(reader: Reader, cursor: str):
    await reader.sql.execute("update restante.op_peers set cursor = $1", cursor)

    await reader.pull(http(body=[op(9, note("a"))]))

    stored = await reader.stored()
    assert reader.asked.query == {}
    assert stored["cursor"] == ulid(minutes_ago=9)
    assert "The stored cursor" in stored["cursor_problem"]


async def test_a_position_is_of_no_use_when_the_peer_has_become_an_older_one(reader: Reader):
    era = int(NOW.timestamp() * 1_000_000)
    position = f"{era:016x}-0000000000000001-{ulid(minutes_ago=5)}-00000000"
    await reader.sql.execute(
        "update restante.op_peers set cursor = $1, protocol = 'restante'", position
    )

    await reader.pull(
        http(body=[op(3, note("b"))]), http(body=[op(9, note("a")), op(3, note("b"))])
    )

    assert await reader.names() == ["a", "b"]
    assert (await reader.stored())["cursor"] == ulid(minutes_ago=3)


async def test_a_table_that_is_tracked_later_lets_the_log_be_read_again(reader: Reader):
    """Its earlier ops were refused."""
    body = [op(9, note("a")), op(8, {"id": "1"}, table="later")]
    await reader.pull(http(body=body))
    await reader.sql.execute("create table public.later (id text primary key)")
    await capture.track(reader.db, Wanted("public.later"), host=None, now=NOW)

    await reader.follower.advance(await reader.peer(), reader.state)
    await reader.pull(http(body=body))

    assert await reader.sql.fetchval("select count(*) from later") == 1


# Around it ---------------------------------------------------------------------------------------


async def test_the_skew_of_its_clock_is_known(reader: Reader):
    ahead = (NOW + timedelta(minutes=10)).strftime("%a, %d %b %Y %H:%M:%S GMT")

    await reader.pull(http(body=[], Date=ahead))

    assert abs((await reader.stored())["skew_seconds"] - 600) < 2


async def test_limits_of_a_peer_slow_the_pull_down(reader: Reader):
    await reader.sql.execute("update restante.op_peers set max_ops_per_minute = 2")

    pause_seconds = await reader.pull(http(body=[op(9, note("a")), op(8, note("b"))]))

    assert pause_seconds == 60


async def test_the_token_is_shown(reader: Reader):
    await reader.sql.execute("update restante.op_peers set token = 'secret'")

    await reader.pull(http(body=[]))

    assert reader.asked.headers["Authorization"] == "Bearer secret"


# Pages that go on, limits, refusals for now ------------------------------------------------------


def scanned(ulid: str) -> bytes:
    return http(body=[], X_Crud_Sweep_Last_Scanned_Ulid=ulid, X_Crud_Sweep_Limited="true")


async def test_empty_pages_in_the_minutes_of_overlap_do_not_stall(reader: Reader):
    """All that was scanned is of tables that we may not see, and there is more of it."""
    await reader.pull(http(body=[op(20, note("a"))]))

    pause_seconds = await reader.pull(scanned(ulid(minutes_ago=24)))
    await reader.pull(http(body=[op(10, note("b"))]))

    assert pause_seconds <= 1
    assert reader.asked.query["after"] == ulid(minutes_ago=24)
    assert await reader.names() == ["a", "b"]


@pytest.mark.parametrize(
    "end",
    [ulid(minutes_ago=25), ulid(minutes_ago=26), "garbage", ""],
    ids=["the cursor", "before it", "garbage", "nothing"],
)
async def test_a_page_that_is_not_all_but_does_not_go_on_is_a_failure(reader: Reader, end: str):
    await reader.pull(http(body=[op(20, note("a"))]))

    with pytest.raises(PeerUnreachable, match="the page ends where it was to begin"):
        await reader.pull(scanned(end))


async def test_a_peer_that_may_pass_on_more_hosts_is_read_again(reader: Reader):
    """What was refused lies behind the cursor."""
    await reader.sql.execute("update restante.op_peers set relays = '{http://x.example}'")
    body = [op(9, note("a"))]
    await reader.pull(http(body=body))
    refused = await reader.names()

    await reader.sql.execute("update restante.op_peers set relays = '{http://other.example}'")
    await reader.follower.advance(await reader.peer(), reader.state)
    await reader.pull(http(body=body))

    assert refused == []
    assert await reader.names() == ["a"]


async def test_a_peer_that_has_no_time_is_asked_again_when_it_says(reader: Reader):
    """That is no failure; but nobody can make us wait for ever."""
    pauses = list[float]()
    for said in ("7", "999999999", "garbage", None):
        reader.answers.append(http(429, Retry_After=said))
        pauses.append(await reader.follower._tried(await reader.peer(), reader.state))

    assert pauses == [1.25 * 7, 1.25 * 300, 1.25, 1.25]
    stored = await reader.stored()
    assert (reader.state.failures, stored["failure"]) == (0, None)


async def test_our_nodes_are_asked_for_pages_that_fit_the_limits(reader: Reader):
    await reader.sql.execute("update restante.op_peers set max_ops_per_minute = 3")
    await reader.pull(http(body=[]))
    by_ops = reader.asked.query["limit"]

    await reader.sql.execute(
        "update restante.op_peers set max_ops_per_minute = null, max_bytes_per_minute = 1000,"
        " protocol = null"
    )
    await reader.pull(http(body=[op(9, note("a", body="x" * 10_000))]))
    unknown = reader.asked.query["limit"]
    await reader.sql.execute("update restante.op_peers set protocol = 'restante'")
    await reader.pull(http(body=[]))

    assert (by_ops, unknown, reader.asked.query["limit"]) == ("3", "100", "1")


async def test_a_long_pause_ends_when_the_limit_is_lifted(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(following, "_LONGEST_SLEEP_SECONDS", 0.01)
    await reader.sql.execute("update restante.op_peers set max_ops_per_minute = 1")
    sleeping = asyncio.create_task(reader.follower._sleep(reader.other.url, 600_000))
    await asyncio.sleep(0)

    await reader.sql.execute("update restante.op_peers set max_ops_per_minute = null")

    async with asyncio.timeout(10):
        await sleeping


async def test_a_node_that_asks_itself_reads_nothing_and_says_so(reader: Reader):
    position = f"{int(NOW.timestamp() * 1_000_000):016x}-{1:016x}-{ulid(minutes_ago=9)}-{0:08x}"
    answer = http(
        body=[op(9, note("a"))],
        Restante_Oplog="1",
        Restante_Host=OWN,
        Restante_Next_Position=position,
    )

    reader.answers.append(answer)
    await reader.follower._tried(await reader.peer(), reader.state)

    stored = await reader.stored()
    assert "this node itself" in stored["failure"]
    assert (await reader.names(), stored["cursor"]) == ([], "")
