"""WIRE, Fetch and acknowledge: the bytes, what is said of them, and that they were received."""

import asyncio
import base64
import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
import structlog
from aiohttp import ClientPayloadError
from callers import (
    Answer,
    Caller,
    Part,
    ask,
    bearer,
    pattern,
    registered,
    request_head,
    waits_for_a_lock,
    wire_to,
)
from sites import Site
from waiting import until

from restante.delivery.download import disposition

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
CONTENT = pattern(700_001)
TAG = f'"{hashlib.sha256(CONTENT).hexdigest()}"'


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


@pytest.fixture
async def file_id(caller: Caller) -> str:
    (file_id,) = await caller.staged(Part(CONTENT, name="my report.bin", mimetype="image/png"))
    return file_id


async def fetched_at(connection: Any) -> datetime | None:
    return await connection.fetchval("select fetched_at from uploads")


async def test_the_content_comes_with_exactly_these_headers(caller: Caller, file_id: str):
    answer = await caller.fetch(file_id)

    assert answer.status == 200
    assert answer.body == CONTENT
    digest = base64.b64encode(hashlib.sha256(CONTENT).digest()).decode()
    own = {
        name.lower(): value
        for name, value in answer.headers.items()
        if name.lower() not in {"date", "x-request-id"}
    }
    assert own == {
        "content-type": "image/png",
        "content-length": str(len(CONTENT)),
        "content-disposition": (
            "attachment; filename=\"my_report.bin\"; filename*=UTF-8''my_report.bin"
        ),
        "etag": TAG,
        "repr-digest": f"sha-256=:{digest}:",
        "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
        "x-content-type-options": "nosniff",
    }


async def test_an_empty_type_is_sent_as_octets(caller: Caller):
    for given in (None, "", "nonsense"):
        (file_id,) = await caller.staged(Part(mimetype=given))
        answer = await caller.fetch(file_id)
        assert answer.headers["Content-Type"] == "application/octet-stream"


def test_a_name_cannot_split_or_leave_its_header():
    """Names are cleaned on the way in; this holds whatever is in the table."""
    for name in (
        'a"b.txt',
        "a\\b",
        'x"; filename="evil',
        "CR\r\nLF\0NUL\x1b",
        "naïve ☃.txt",
        "\ud800",
    ):
        header = disposition(name)
        printable = "".join(character for character in name if character.isprintable())

        assert header.isascii()
        assert header.isprintable()
        assert header.endswith(f"; filename*=UTF-8''{quote(printable, safe='')}")
        quoted = header.removeprefix('attachment; filename="').partition("; filename*=")[0]
        inner = quoted.removesuffix('"').replace("\\\\", "").replace('\\"', "")
        assert '"' not in inner
        assert "\\" not in inner
    assert disposition('a"b\\c') == (
        'attachment; filename="a\\"b\\\\c"; filename*=UTF-8\'\'a%22b%5Cc'
    )


async def test_the_fetch_is_stamped_after_the_body(caller: Caller, connection: Any, file_id: str):
    before = datetime.now(UTC)
    assert await fetched_at(connection) is None

    await caller.fetch(file_id)

    await until(lambda: fetched_at(connection))
    stamp = await fetched_at(connection)
    assert stamp is not None
    assert before <= stamp <= datetime.now(UTC)


async def test_a_client_that_closes_at_the_last_byte_is_stamped_too(
    caller: Caller, connection: Any, file_id: str
):
    for _ in range(5):
        await connection.execute("update uploads set fetched_at = null")
        async with wire_to(caller.site) as wire:
            path = f"{caller.path}/pending-uploads/{file_id}/content"
            lines = ["Connection: close"]
            await wire.send(request_head("GET", path, token=caller.token, lines=lines))
            head = await wire.head()
            assert await wire.read(int(head.headers["Content-Length"])) == CONTENT
            wire.close()

        await until(lambda: fetched_at(connection))


async def test_a_fetch_is_repeatable_and_stamped_each_time(
    caller: Caller, connection: Any, file_id: str
):
    assert (await caller.fetch(file_id)).body == CONTENT
    await until(lambda: fetched_at(connection))
    first = await fetched_at(connection)

    assert (await caller.fetch(file_id)).body == CONTENT

    await until(lambda: connection.fetchval("select fetched_at > $1 from uploads", first))


async def test_asking_about_a_file_does_not_stamp_it(caller: Caller, connection: Any, file_id: str):
    await caller.fetch(file_id, "HEAD")
    await caller.fetch(file_id, If_None_Match=TAG)
    await caller.fetch(file_id, Range="bytes=0-99")
    await caller.fetch(file_id, Range="bytes=9999999-")
    await caller.waiting()

    # Whatever was under way has ended when a later fetch has been stamped.
    assert await fetched_at(connection) is None
    (other,) = await caller.staged()
    await caller.fetch(other)
    stamped = "select fetched_at is not null from uploads where file_id = $1"
    await until(lambda: connection.fetchval(stamped, other))
    assert await connection.fetchval(stamped, file_id) is False


async def test_an_abandoned_download_is_not_stamped_and_stops(caller: Caller, connection: Any):
    (file_id,) = await caller.staged(Part(pattern(24 * MIB)))

    with structlog.testing.capture_logs() as logged:
        async with wire_to(caller.site) as wire:
            path = f"{caller.path}/pending-uploads/{file_id}/content"
            await wire.send(request_head("GET", path, token=caller.token))
            await wire.head()
            await wire.read(1000)
            wire.close()
            await until(lambda: asyncio.sleep(0, [x for x in logged if x["event"] == "request"]))

    assert [line["event"] for line in logged] == ["request"]
    assert await fetched_at(connection) is None


async def test_a_stamp_that_fails_does_not_fail_the_fetch(
    caller: Caller, connection: Any, file_id: str
):
    """Somebody holds the row for longer than a statement may take."""
    await connection.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise query_canceled; end $$"
    )
    await connection.execute(
        "create trigger refuse before update on uploads for each row execute function refuse()"
    )

    with structlog.testing.capture_logs() as logged:
        answer = await caller.fetch(file_id)
        await until(lambda: asyncio.sleep(0, [x for x in logged if x["event"] == "request"]))

    assert (answer.status, answer.body) == (200, CONTENT)
    assert "fetch_not_noted" in [line["event"] for line in logged]
    assert "bug" not in [line["event"] for line in logged]
    assert (await caller.fetch(file_id)).body == CONTENT


async def test_a_locked_row_does_not_hold_up_the_body(
    caller: Caller, connection: Any, file_id: str
):
    lock = connection.transaction()
    await lock.start()
    await connection.execute("select from uploads for update")

    assert (await caller.fetch(file_id)).body == CONTENT

    await lock.rollback()
    await until(lambda: fetched_at(connection))


# ---- ranges and conditions


async def ranged(caller: Caller, file_id: str, **headers: str) -> tuple[int, str | None, Answer]:
    answer = await caller.fetch(file_id, **headers)
    return answer.status, answer.headers.get("Content-Range"), answer


async def test_single_ranges(caller: Caller, file_id: str):
    size = len(CONTENT)
    for header, first, last in (
        ("bytes=0-0", 0, 0),
        ("bytes=0-99", 0, 99),
        ("bytes=262143-262144", 262_143, 262_144),
        ("bytes=100-700000", 100, 700_000),
        ("bytes=500000-", 500_000, size - 1),
        ("bytes=700000-", 700_000, size - 1),
        ("bytes=-1", size - 1, size - 1),
        ("bytes=-300000", size - 300_000, size - 1),
        ("bytes=-9999999", 0, size - 1),
        ("bytes=5-9999999", 5, size - 1),
        ("BYTES=1-2", 1, 2),
    ):
        status, content_range, answer = await ranged(caller, file_id, Range=header)

        assert (status, content_range) == (206, f"bytes {first}-{last}/{size}"), header
        assert answer.body == CONTENT[first : last + 1]
        assert answer.headers["Content-Length"] == str(last - first + 1)
        assert answer.headers["ETag"] == TAG
        assert answer.headers["Content-Type"] == "image/png"


async def test_a_range_beyond_the_end_is_a_416(caller: Caller, file_id: str):
    for header in ("bytes=700001-", "bytes=700001-700002", "bytes=999999999-", "bytes=-0"):
        status, content_range, answer = await ranged(caller, file_id, Range=header)

        assert (status, content_range) == (416, f"bytes */{len(CONTENT)}"), header
        assert answer.json["code"] == "range_not_satisfiable"


async def test_several_ranges_and_nonsense_get_the_whole_file(caller: Caller, file_id: str):
    for header in ("bytes=0-1,5-6", "bytes=9-5", "bytes=-", "bytes=a-b", "lines=1-2", "x", ""):
        status, content_range, answer = await ranged(caller, file_id, Range=header)

        assert (status, content_range) == (200, None), header
        assert answer.body == CONTENT


async def test_a_range_is_heeded_only_if_the_file_is_still_the_same(caller: Caller, file_id: str):
    same, _, _ = await ranged(caller, file_id, Range="bytes=0-9", If_Range=TAG)
    others = [
        (await ranged(caller, file_id, Range="bytes=0-9", If_Range=value))[0]
        for value in ('"other"', f"W/{TAG}", "Sun, 06 Nov 1994 08:49:37 GMT", "")
    ]

    assert same == 206
    assert others == [200] * 4


async def test_what_a_client_has_is_not_sent_again(caller: Caller, file_id: str):
    for value in (TAG, f"W/{TAG}", f'"x", {TAG}', "*"):
        answer = await caller.fetch(file_id, If_None_Match=value)

        assert (answer.status, answer.body) == (304, b"")
        assert answer.headers["ETag"] == TAG
        assert "Content-Length" not in answer.headers
    other = await caller.fetch(file_id, If_None_Match='"other"')
    assert (other.status, other.body) == (200, CONTENT)


async def test_head_says_what_get_would_say(caller: Caller, file_id: str):
    whole = await caller.fetch(file_id)
    for headers in ({}, {"Range": "bytes=0-9"}):
        head = await caller.fetch(file_id, "HEAD", **headers)

        assert (head.status, head.body) == (200, b"")
        names = set(whole.headers) - {"Date", "X-Request-ID"}
        assert {name: head.headers[name] for name in names} == {
            name: whole.headers[name] for name in names
        }
    assert (await caller.fetch(str(uuid4()), "HEAD")).status == 404


async def test_a_download_goes_on_after_its_bucket_moved(caller: Caller, connection: Any):
    """A sweep may carry a file's bytes to another bucket while they are on their way."""
    content = pattern(24 * MIB)
    (file_id,) = await caller.staged(Part(content))

    async with wire_to(caller.site) as wire:
        path = f"{caller.path}/pending-uploads/{file_id}/content"
        await wire.send(request_head("GET", path, token=caller.token))
        await wire.head()
        start = await wire.read(1000)
        async with connection.transaction():
            await connection.execute("update uploads set bucket = bucket + interval '1 hour'")
            await connection.execute("update chunks set bucket = bucket + interval '1 hour'")
        rest = await wire.read(len(content) - 1000)

    assert start + rest == content


async def test_a_body_whose_bytes_vanish_is_broken_off(caller: Caller, connection: Any):
    """A short body must not pass for a whole one."""
    (file_id,) = await caller.staged(Part(pattern(24 * MIB)))
    await connection.execute("delete from chunks where seq >= 40")

    with pytest.raises(ClientPayloadError):
        await caller.fetch(file_id)

    assert await fetched_at(connection) is None


# ---- acknowledging


async def test_an_ack_is_idempotent_and_keeps_the_first_time(
    caller: Caller, connection: Any, file_id: str
):
    first = await caller.ack(file_id)
    at = await connection.fetchval("select acked_at from uploads")
    second = await caller.ack(file_id)

    assert (first.status, first.json) == (200, {"acked": True})
    assert (second.status, second.json) == (200, {"acked": True})
    assert await connection.fetchval("select acked_at from uploads") == at


async def test_acks_at_once_give_the_room_back_once(caller: Caller, connection: Any, file_id: str):
    await caller.staged()

    answers = await asyncio.gather(*(caller.ack(file_id) for _ in range(8)))

    assert [answer.json for answer in answers] == [{"acked": True}] * 8
    usage = await connection.fetchrow("select waiting_bytes, waiting_files from feeds")
    assert tuple(usage) == (5, 1)


async def test_a_file_can_be_acked_without_being_fetched(caller: Caller, file_id: str):
    assert (await caller.ack(file_id)).json == {"acked": True}


async def test_an_ack_that_raced_with_the_sweep_says_so(
    caller: Caller, connection: Any, connections: Any, file_id: str
):
    """The sweep has deleted the row and not committed yet; the ack has seen it and waits."""
    sweep = connection.transaction()
    await sweep.start()
    await connection.execute("delete from uploads where file_id = $1", file_id)
    acking = asyncio.create_task(caller.ack(file_id))
    watcher = await connections()
    await until(lambda: waits_for_a_lock(watcher))
    await sweep.commit()

    answer = await acking

    assert (answer.status, answer.json) == (200, {"acked": True, "raced": True})


async def test_an_acked_file_is_gone_for_fetching(caller: Caller, file_id: str):
    await caller.ack(file_id)

    answer = await caller.fetch(file_id)

    assert (answer.status, answer.json["code"]) == (404, "upload_gone")
    assert (await caller.fetch(file_id, "HEAD")).status == 404
    assert (await caller.fetch(file_id, If_None_Match=TAG)).status == 404


async def test_what_is_not_there_is_the_same_404_for_every_reason(caller: Caller, connection: Any):
    other = await registered(caller.site)
    (others,) = await other.staged()
    expired, acked = await caller.staged(Part(), Part())
    await caller.ack(acked)
    await connection.execute("update uploads set expires_at = now() where file_id = $1", expired)

    fetches = [await caller.fetch(one) for one in (str(uuid4()), others, expired, acked)]
    acks = [await caller.ack(one) for one in (str(uuid4()), others, expired)]

    assert {answer.status for answer in fetches + acks} == {404}
    assert len({answer.body for answer in fetches + acks}) == 1
    assert (await other.fetch(others)).body == b"hello"


async def test_a_bad_id_is_a_400(caller: Caller):
    file_id = str(uuid4())
    for wrong in ("x", "1", uuid4().hex, "%00", "00000000-0000-0000-0000-00000000000g"):
        for method, end in (("GET", "content"), ("HEAD", "content"), ("POST", "ack")):
            bad_file = await caller.ask(method, f"/pending-uploads/{wrong}/{end}")
            bad_workspace = await ask(
                caller.site,
                method,
                f"/workspaces/{wrong}/pending-uploads/{file_id}/{end}",
                headers=bearer(caller.token),
            )

            assert (bad_file.status, bad_workspace.status) == (400, 400)
            if method != "HEAD":
                assert bad_file.json["error"] == "invalid file_id"
                assert bad_workspace.json["error"] == "invalid workspace ID"


async def test_without_the_workspaces_token_it_is_a_401(
    caller: Caller, connection: Any, file_id: str
):
    other = await registered(caller.site)
    for headers in ({}, bearer("x"), bearer(other.token)):
        for method, end in (("GET", "content"), ("POST", "ack")):
            path = f"{caller.path}/pending-uploads/{file_id}/{end}"
            answer = await ask(caller.site, method, path, headers=headers)
            assert (answer.status, answer.json["code"]) == (401, "not_authenticated")

    row = await connection.fetchrow("select fetched_at, acked_at from uploads")
    assert tuple(row) == (None, None)


# ---- the list of what waits


async def test_what_waits_is_listed_oldest_first(caller: Caller):
    first = await caller.staged(Part(b"1", name="one", mimetype="text/plain"))
    await caller.staged(Part(b"22", name="two"))
    third = await caller.staged(Part(b"333", name="three"))
    await caller.ack(third[0])

    listed = (await caller.waiting()).json

    assert [upload["name"] for upload in listed["uploads"]] == ["one", "two"]
    assert "next_after" not in listed
    (one, _) = listed["uploads"]
    created, expires = (datetime.fromisoformat(one[name]) for name in ("created_at", "expires_at"))
    assert expires - created == timedelta(days=1)
    assert one == {
        "file_id": first[0],
        "uri": f"platform-pending:{caller.id}/{first[0]}",
        "name": "one",
        "mimeType": "text/plain",
        "size": 1,
        "sha256": hashlib.sha256(b"1").hexdigest(),
        "created_at": one["created_at"],
        "fetched_at": None,
        "expires_at": one["expires_at"],
    }


async def test_pages_meet_every_waiting_file_once(caller: Caller):
    """Files of one request have one time; the page may end between them."""
    staged = {file_id for _ in range(3) for file_id in await caller.staged(Part(), Part(), Part())}
    seen: list[str] = []
    page = (await caller.waiting(limit=2)).json
    while True:
        seen += [upload["file_id"] for upload in page["uploads"]]
        if "next_after" not in page:
            break
        page = (await caller.waiting(limit=2, after=page["next_after"])).json

    assert len(seen) == 9
    assert set(seen) == staged


async def test_files_may_be_acknowledged_while_they_are_paged_through(caller: Caller):
    await caller.staged(*[Part()] * 5)
    seen: list[str] = []
    page = (await caller.waiting(limit=2)).json
    while True:
        for upload in page["uploads"]:
            seen.append(upload["file_id"])
            await caller.ack(upload["file_id"])
        if "next_after" not in page:
            break
        page = (await caller.waiting(limit=2, after=page["next_after"])).json

    assert len(set(seen)) == 5


async def test_expired_files_are_not_listed(caller: Caller, connection: Any):
    await caller.staged()
    await connection.execute("update uploads set expires_at = now()")

    assert (await caller.waiting()).json == {"uploads": []}


async def test_a_wrong_page_is_refused(caller: Caller):
    other = await registered(caller.site)
    (others,) = await other.staged()

    unknown, another = await caller.waiting(after=uuid4()), await caller.waiting(after=others)
    assert unknown.status == another.status == 404
    assert unknown.body == another.body
    for query in ({"limit": 0}, {"limit": 501}, {"limit": "x"}, {"after": "x"}, {"after": ""}):
        answer = await caller.waiting(**query)
        assert answer.status == 400
        assert next(iter(query)) in answer.json["error"]
