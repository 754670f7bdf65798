"""The feed over HTTP: rows, pages, filters, cursors by id and by seq, and who may read."""

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import (
    ADMIN,
    Caller,
    Part,
    ask,
    bearer,
    registered,
)
from sites import Site

from restante.ids import new_activity_id

pytestmark = pytest.mark.anyio

FIELDS = {
    "id", "workspace_id", "activity_type", "source_id", "target_id", "method", "summary",
    "request_body", "response_body", "duration_ms", "status", "error_detail", "created_at", "seq",
}  # fmt: skip
RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
HELLO = {"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": {"message": {"parts": []}}}


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


async def test_a_row_has_exactly_the_fields_of_the_wire(caller: Caller):
    (file_id,) = await caller.staged(Part(b"12345", name="a b.txt", mimetype="text/plain; x=y"))

    (row,) = await caller.feed()

    assert set(row) == FIELDS
    assert UUID(row["id"])
    assert RFC_3339.fullmatch(row["created_at"])
    age = datetime.now(UTC) - datetime.fromisoformat(row["created_at"])
    assert timedelta(0) <= age < timedelta(minutes=1)
    expected = {
        "workspace_id": caller.id,
        "activity_type": "a2a_receive",
        "method": "chat_upload_receive",
        "summary": "chat_upload_receive: a_b.txt",
        "status": "ok",
        "source_id": None,
        "target_id": caller.id,
        "request_body": {
            "file_id": file_id,
            "name": "a_b.txt",
            "display_name": "a b.txt",
            "mimeType": "text/plain",
            "size": 5,
            "uri": f"platform-pending:{caller.id}/{file_id}",
        },
        "response_body": None,
        "duration_ms": None,
        "error_detail": None,
        "seq": 1,
    }
    assert {name: row[name] for name in expected} == expected


async def test_seqs_increase_by_one_in_the_order_of_the_parts(caller: Caller):
    for n in range(3):
        await caller.staged(*(Part(name=f"{n}-{part}") for part in range(3)))

    rows = list(reversed(await caller.feed()))

    assert [row["seq"] for row in rows] == list(range(1, 10))
    assert [row["request_body"]["name"] for row in rows] == [
        f"{n}-{part}" for n in range(3) for part in range(3)
    ]


async def test_without_a_cursor_the_newest_come_first(caller: Caller):
    await caller.staged(*[Part()] * 5)

    assert [row["seq"] for row in await caller.feed()] == [5, 4, 3, 2, 1]
    assert [row["seq"] for row in await caller.feed(limit=2)] == [5, 4]


async def test_rows_after_a_cursor_come_oldest_first(caller: Caller):
    await caller.staged(*[Part()] * 5)
    second = (await caller.feed())[3]

    assert [row["seq"] for row in await caller.feed(since_id=second["id"])] == [3, 4, 5]
    assert [row["seq"] for row in await caller.feed(since_id=second["id"], limit=1)] == [3]
    assert [row["seq"] for row in await caller.feed(since_id=second["id"].upper())] == [3, 4, 5]


async def test_nothing_after_the_cursor_is_an_empty_array(caller: Caller):
    await caller.staged()
    (row,) = await caller.feed()

    assert await caller.feed(since_id=row["id"]) == []
    assert await (await registered(caller.site)).feed() == []


async def test_following_the_cursor_by_small_pages_returns_every_row_once(caller: Caller):
    await caller.staged(*[Part()] * 7)
    (first,) = (await caller.feed())[-1:]
    seen = [first]

    while page := await caller.feed(since_id=seen[-1]["id"], limit=2):
        seen += page

    assert [row["seq"] for row in seen] == list(range(1, 8))


async def test_type_filters_by_activity_type(caller: Caller):
    await caller.staged()

    assert len(await caller.feed(type="a2a_receive")) == 1
    assert await caller.feed(type="a2a_send") == []
    assert await caller.feed(type="A2A_RECEIVE") == []


async def test_source_separates_rows_of_the_canvas_from_rows_of_agents(caller: Caller):
    agent = await registered(caller.site)
    await caller.staged()
    await agent.message(HELLO, to=caller)

    canvas, agents = await caller.feed(source="canvas"), await caller.feed(source="agent")

    assert [row["source_id"] for row in canvas] == [None]
    assert [row["source_id"] for row in agents] == [agent.id]
    for wrong in ("robot", "Canvas", "null", " "):
        answer = await caller.read_feed(source=wrong)
        assert answer.status == 400
        assert "source" in answer.json["error"]


async def test_since_secs_leaves_older_rows_out(caller: Caller, connection: Any):
    await caller.staged(Part(), Part(), Part())
    for seq, age in ((1, "31 days"), (2, "29 days")):
        await connection.execute(
            f"update feed set created_at = now() - interval '{age}' where seq = {seq}"
        )

    for seconds, seqs in (
        (60, [3]),
        (29 * 86_400 + 3600, [3, 2]),
        (30 * 86_400, [3, 2]),
        (365 * 86_400, [3, 2]),  # capped at 30 days
        (10**30, [3, 2]),
    ):
        rows = await caller.feed(since_secs=seconds)
        assert [row["seq"] for row in rows] == seqs, seconds
    for wrong in (0, -5, "x", "1.5", "nan", "inf", "null"):
        answer = await caller.read_feed(since_secs=wrong)
        assert answer.status == 400, wrong
        assert "since_secs" in answer.json["error"]


async def test_filters_work_together_and_after_a_cursor(caller: Caller):
    agent = await registered(caller.site)
    for _ in range(3):
        await caller.staged()
        await agent.message(HELLO, to=caller)
    first = (await caller.feed())[-1]

    rows = await caller.feed(
        since_id=first["id"], source="canvas", type="a2a_receive", since_secs=60, limit=1
    )

    assert [row["seq"] for row in rows] == [3]


async def test_rows_after_a_seq_come_oldest_first(caller: Caller):
    """0 is before the first row: a reader that has nothing yet begins at the beginning."""
    await caller.staged(*[Part()] * 5)

    assert seqs(await caller.feed(since_seq=0)) == [1, 2, 3, 4, 5]
    assert seqs(await caller.feed(since_seq=3)) == [4, 5]
    assert seqs(await caller.feed(since_seq=3, limit=1)) == [4]
    assert await caller.feed(since_seq=5) == []
    assert await (await registered(caller.site)).feed(since_seq=0) == []


def seqs(rows: list[dict[str, Any]]) -> list[int]:
    return [row["seq"] for row in rows]


async def test_a_seq_and_the_id_of_its_row_are_the_same_cursor(caller: Caller):
    await caller.staged(*[Part()] * 3)
    second = (await caller.feed())[1]

    by_id = await caller.read_feed(since_id=second["id"])
    by_seq = await caller.read_feed(since_seq=second["seq"])

    assert by_seq.json == by_id.json
    for name in ("X-Restante-Lowest-Seq", "X-Restante-Latest-Seq", "X-Restante-Acked-Seq"):
        assert by_seq.headers[name] == by_id.headers[name]


async def test_filters_work_together_with_a_seq(caller: Caller, connection: Any):
    agent = await registered(caller.site)
    for _ in range(3):
        await caller.staged()
        await agent.message(HELLO, to=caller)
    await connection.execute("update feed set created_at = now() - interval '1 hour' where seq = 3")

    async def read(**wanted: Any) -> list[int]:
        return seqs(await caller.feed(since_seq=1, **wanted))

    assert await read(source="agent") == [2, 4, 6]
    assert await read(source="canvas", since_secs=60) == [5]
    assert await read(type="a2a_receive", since_secs=7200, limit=3) == [2, 3, 4]
    assert await read(type="a2a_send") == []


async def test_following_a_seq_over_several_pages_returns_every_row_once(
    caller: Caller,
):
    for _ in range(9):
        await caller.staged(*[Part(b"x")] * 64)
    pages = [await caller.feed(since_seq=0, limit=500)]

    while page := await caller.feed(since_seq=pages[-1][-1]["seq"], limit=500):
        pages.append(page)

    assert [len(page) for page in pages] == [500, 76]
    assert [row["seq"] for page in pages for row in page] == list(range(1, 577))


async def test_a_seq_that_is_not_a_number_from_0_is_a_400(caller: Caller):
    await caller.staged()

    for wrong in (-1, "1.5", "x", "null", "true", "nan", "1e-3", "0x1", "\0", 2**63, 10**30):
        answer = await caller.read_feed(since_seq=wrong)
        assert answer.status == 400, wrong
        assert answer.json["error"].startswith("since_seq is wrong")


async def test_two_cursors_at_once_are_a_400(caller: Caller):
    """Even if they are of the same row: a client that sends both has lost its way."""
    await caller.staged()
    (row,) = await caller.feed()

    answer = await caller.read_feed(since_id=row["id"], since_seq=row["seq"])

    assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert "not both" in answer.json["error"]


async def test_a_cursor_that_is_not_a_uuid_is_a_400(caller: Caller):
    for wrong in ("x", "1", f"{uuid4()}0", f"{{{uuid4()}", "\0", "null"):
        answer = await caller.read_feed(since_id=wrong)
        assert answer.status == 400, wrong
        assert "since_id" in answer.json["error"]


async def test_a_lost_cursor_gets_the_same_410_whatever_the_reason(caller: Caller, connection: Any):
    """Unknown, trimmed, or of another feed: a cursor never silently hides every row."""
    other = await registered(caller.site)
    await other.staged()
    (others,) = await other.feed()
    await caller.staged(*[Part()] * 4)
    trimmed = (await caller.feed())[2]
    await connection.execute("delete from feed where seq <= 2 and workspace_id = $1", caller.id)
    await connection.execute("update feeds set trimmed_seq = 2 where workspace_id = $1", caller.id)

    answers = [
        await caller.read_feed(since_id=an_id, **more)
        for an_id in (
            uuid4(),
            UUID(int=0),
            UUID(int=2**128 - 1),
            new_activity_id(datetime.now(UTC)),
            trimmed["id"],
            others["id"],
        )
        for more in ({}, {"wait": 5}, {"type": "nothing"})
    ]

    assert {answer.status for answer in answers} == {410}
    assert len({answer.body for answer in answers}) == 1
    refusal = answers[0].json
    assert refusal["code"] == "cursor_gone"
    assert "since_id" in refusal["error"]
    assert "omit since_id" in refusal["error"]
    assert (refusal["lowest_seq"], refusal["latest_seq"]) == (3, 4)


async def trim(connection: Any, caller: Caller, up_to: int) -> None:
    await connection.execute(
        "delete from feed where seq <= $1 and workspace_id = $2", up_to, caller.id
    )
    await connection.execute(
        "update feeds set trimmed_seq = $1 where workspace_id = $2", up_to, caller.id
    )


async def test_a_seq_outside_of_the_feed_is_a_410_that_says_what_is_kept(
    caller: Caller, connection: Any
):
    """Trimmed, or from before a restore: a cursor never silently hides every row."""
    await caller.staged(*[Part()] * 6)
    await trim(connection, caller, 3)

    answers = [
        await caller.read_feed(since_seq=seq, **more)
        for seq in (0, 2, 7, 2**63 - 1)
        for more in ({}, {"wait": 5}, {"type": "nothing"})
    ]

    assert {answer.status for answer in answers} == {410}
    for refusal in (answer.json for answer in answers):
        assert set(refusal) == {"error", "code", "lowest_seq", "latest_seq"}
        assert (refusal["code"], refusal["lowest_seq"], refusal["latest_seq"]) == (
            "cursor_gone",
            4,
            6,
        )
        assert "start over with since_seq=3" in refusal["error"]


@pytest.mark.parametrize("kept", [3, 0])
async def test_after_a_410_a_reader_starts_over_with_the_lowest_row_that_is_kept(
    caller: Caller, connection: Any, kept: int
):
    """If none is kept, the next row that arrives is the first."""
    await caller.staged(*[Part()] * 6)
    await trim(connection, caller, 6 - kept)
    refusal = (await caller.read_feed(since_id=uuid4())).json

    rows = await caller.feed(since_seq=refusal["lowest_seq"] - 1)
    await caller.staged()
    rows += await caller.feed(since_seq=rows[-1]["seq"] if rows else refusal["latest_seq"])

    assert seqs(rows) == list(range(7 - kept, 8))


async def test_a_seq_of_a_feed_without_rows_is_gone(caller: Caller):
    """The server lost its data, and the workspace has registered again with its old id."""
    answer = await caller.read_feed(since_seq=17)

    assert answer.status == 410
    assert (answer.json["lowest_seq"], answer.json["latest_seq"]) == (1, 0)


async def test_a_cursor_below_a_trim_is_gone_even_if_its_row_is_still_there(
    caller: Caller, connection: Any
):
    """The mark is raised before rows are dropped, so rows after the cursor may be missing."""
    await caller.staged(*[Part()] * 4)
    first, third = (await caller.feed())[3], (await caller.feed())[1]
    await connection.execute("update feeds set trimmed_seq = 2")

    assert (await caller.read_feed(since_id=first["id"])).status == 410
    assert [row["seq"] for row in await caller.feed(since_id=third["id"])] == [4]


async def test_headers_show_the_marks_of_the_feed(caller: Caller, connection: Any):
    async def marks(**query: Any) -> tuple[str, ...]:
        headers = (await caller.read_feed(**query)).headers
        names = ("X-Restante-Lowest-Seq", "X-Restante-Latest-Seq", "X-Restante-Acked-Seq")
        return tuple(headers[name] for name in names)

    assert await marks() == ("1", "0", "0")
    await caller.staged(*[Part()] * 4)
    await connection.execute("update feeds set trimmed_seq = 2, acked_seq = 1")
    await connection.execute("delete from feed where seq <= 2")
    (latest, *_) = await caller.feed()

    assert await marks() == ("3", "4", "1")
    assert await marks(since_id=latest["id"]) == ("3", "4", "1")


async def test_only_its_workspace_and_the_operator_read_a_feed(caller: Caller):
    other = await registered(caller.site)
    await other.staged()

    for headers in ({}, bearer("x"), bearer(other.token)):
        answer = await ask(caller.site, "GET", f"{caller.path}/activity", headers=headers)
        assert answer.status == 401
    assert await caller.feed() == []
    bad = await ask(caller.site, "GET", "/workspaces/x/activity", headers=ADMIN)
    assert (bad.status, bad.json["error"]) == (400, "invalid workspace ID")
