"""Fetching over HTTP: the bytes, their headers, ranges, and what is recorded."""

import base64
import hashlib
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
import structlog
from aiohttp import ClientPayloadError
from callers import Answer, Caller, Part, pattern, request_head, wire_to
from waiting import until

from restante.delivery.download import disposition
from restante.delivery.rules import MIB

pytestmark = pytest.mark.anyio

CONTENT = pattern(700_001)
TAG = f'"{hashlib.sha256(CONTENT).hexdigest()}"'


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
            "attachment; filename=\"my_report.bin\"; filename*=UTF-8''my%20report.bin"
        ),
        "etag": TAG,
        "repr-digest": f"sha-256=:{digest}:",
        "accept-ranges": "bytes",
        "cache-control": "private, no-cache",
        "x-content-type-options": "nosniff",
        "vary": "Origin",
    }


async def test_an_empty_or_malformed_type_is_sent_as_octet_stream(caller: Caller):
    for given in (None, "", "nonsense"):
        (file_id,) = await caller.staged(Part(mimetype=given))
        answer = await caller.fetch(file_id)
        assert answer.headers["Content-Type"] == "application/octet-stream"


def test_no_name_can_break_out_of_its_header():
    """Names are cleaned when they arrive; this is safe whatever is in the table."""
    for name in (
        'a"b.txt',
        "a\\b",
        'x"; filename="evil',
        "CR\r\nLF\0NUL\x1b",
        "naïve ☃.txt",
        "\ud800",
    ):
        header = disposition(name, name)
        replaced = name.encode("utf-8", "replace")

        assert header.isascii()
        assert header.isprintable()
        assert header.endswith(f"; filename*=UTF-8''{quote(replaced, safe='')}")
        quoted = header.removeprefix('attachment; filename="').partition("; filename*=")[0]
        inner = quoted.removesuffix('"').replace("\\\\", "").replace('\\"', "")
        assert '"' not in inner
        assert "\\" not in inner
    assert disposition('a"b\\c', 'A "b"') == (
        'attachment; filename="a\\"b\\\\c"; filename*=UTF-8\'\'A%20%22b%22'
    )


async def test_a_fetch_is_recorded_after_the_body(caller: Caller, connection: Any, file_id: str):
    before = datetime.now(UTC)
    assert await fetched_at(connection) is None

    await caller.fetch(file_id)

    await until(lambda: fetched_at(connection))
    recorded = await fetched_at(connection)
    assert recorded is not None
    assert before <= recorded <= datetime.now(UTC)


async def test_a_fetch_is_recorded_if_the_client_closes_after_the_last_byte(
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


async def test_a_fetch_is_repeatable_and_recorded_each_time(
    caller: Caller, connection: Any, file_id: str
):
    assert (await caller.fetch(file_id)).body == CONTENT
    await until(lambda: fetched_at(connection))
    first = await fetched_at(connection)

    assert (await caller.fetch(file_id)).body == CONTENT

    await until(lambda: connection.fetchval("select fetched_at > $1 from uploads", first))


async def test_a_request_without_the_last_byte_is_not_recorded_as_a_fetch(
    caller: Caller, connection: Any, file_id: str
):
    await caller.fetch(file_id, "HEAD")
    await caller.fetch(file_id, If_None_Match=TAG)
    await caller.fetch(file_id, Range="bytes=0-99")
    await caller.fetch(file_id, Range="bytes=9999999-")
    await caller.waiting()

    # A later fetch is recorded after anything that these requests might record.
    assert await fetched_at(connection) is None
    (other,) = await caller.staged()
    await caller.fetch(other)
    recorded = "select fetched_at is not null from uploads where file_id = $1"
    await until(lambda: connection.fetchval(recorded, other))
    assert await connection.fetchval(recorded, file_id) is False


async def test_an_aborted_download_stops_and_is_not_recorded(caller: Caller, connection: Any):
    (file_id,) = await caller.staged(Part(pattern(24 * MIB)))

    with structlog.testing.capture_logs() as logged:
        async with wire_to(caller.site) as wire:
            path = f"{caller.path}/pending-uploads/{file_id}/content"
            await wire.send(request_head("GET", path, token=caller.token))
            await wire.head()
            await wire.read(1000)
            wire.close()
            await until(lambda: [x for x in logged if x["event"] == "request"])

    assert [line["event"] for line in logged] == ["request"]
    assert await fetched_at(connection) is None


async def test_a_fetch_succeeds_even_if_it_cannot_be_recorded(
    caller: Caller, connection: Any, file_id: str
):
    """As when the row is locked for longer than the statement timeout."""
    await connection.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise query_canceled; end $$"
    )
    await connection.execute(
        "create trigger refuse before update on uploads for each row execute function refuse()"
    )

    with structlog.testing.capture_logs() as logged:
        answer = await caller.fetch(file_id)
        await until(lambda: [x for x in logged if x["event"] == "request"])

    assert (answer.status, answer.body) == (200, CONTENT)
    assert "fetch_not_noted" in [line["event"] for line in logged]
    assert "bug" not in [line["event"] for line in logged]
    assert (await caller.fetch(file_id)).body == CONTENT


async def test_a_locked_row_does_not_delay_the_body(caller: Caller, connection: Any, file_id: str):
    lock = connection.transaction()
    await lock.start()
    await connection.execute("select from uploads for update")

    assert (await caller.fetch(file_id)).body == CONTENT

    await lock.rollback()
    await until(lambda: fetched_at(connection))


# Ranges and conditions


async def ranged(caller: Caller, file_id: str, **headers: str) -> tuple[int, str | None, Answer]:
    answer = await caller.fetch(file_id, **headers)
    return answer.status, answer.headers.get("Content-Range"), answer


async def test_a_single_range_is_answered_with_its_bytes(caller: Caller, file_id: str):
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


async def test_several_or_malformed_ranges_get_the_whole_file(caller: Caller, file_id: str):
    for header in ("bytes=0-1,5-6", "bytes=9-5", "bytes=-", "bytes=a-b", "lines=1-2", "x", ""):
        status, content_range, answer = await ranged(caller, file_id, Range=header)

        assert (status, content_range) == (200, None), header
        assert answer.body == CONTENT


async def test_if_range_applies_the_range_only_to_the_same_file(caller: Caller, file_id: str):
    same, _, _ = await ranged(caller, file_id, Range="bytes=0-9", If_Range=TAG)
    others = [
        (await ranged(caller, file_id, Range="bytes=0-9", If_Range=value))[0]
        for value in ('"other"', f"W/{TAG}", "Sun, 06 Nov 1994 08:49:37 GMT", "")
    ]

    assert same == 206
    assert others == [200] * 4


async def test_a_file_that_the_client_has_is_not_sent_again(caller: Caller, file_id: str):
    for value in (TAG, f"W/{TAG}", f'"x", {TAG}', "*"):
        answer = await caller.fetch(file_id, If_None_Match=value)

        assert (answer.status, answer.body) == (304, b"")
        assert answer.headers["ETag"] == TAG
        assert "Content-Length" not in answer.headers
    other = await caller.fetch(file_id, If_None_Match='"other"')
    assert (other.status, other.body) == (200, CONTENT)


async def test_head_has_the_headers_of_get(caller: Caller, file_id: str):
    whole = await caller.fetch(file_id)
    for headers in ({}, {"Range": "bytes=0-9"}):
        head = await caller.fetch(file_id, "HEAD", **headers)

        assert (head.status, head.body) == (200, b"")
        names = set(whole.headers) - {"Date", "X-Request-ID"}
        assert {name: head.headers[name] for name in names} == {
            name: whole.headers[name] for name in names
        }
    assert (await caller.fetch(str(uuid4()), "HEAD")).status == 404


async def test_a_download_continues_after_its_bytes_were_moved(caller: Caller, connection: Any):
    """A sweep may move a file's bytes to another bucket while they are sent."""
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


async def test_a_download_without_all_of_its_bytes_is_aborted(caller: Caller, connection: Any):
    """A short body must not look complete."""
    (file_id,) = await caller.staged(Part(pattern(24 * MIB)))
    await connection.execute("delete from chunks where seq >= 40")

    with pytest.raises(ClientPayloadError):
        await caller.fetch(file_id)

    assert await fetched_at(connection) is None
