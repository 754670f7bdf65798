"""Uploads over HTTP: sizes, counts and malformed bodies, to the byte."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import structlog
from callers import (
    FORM,
    Answer,
    Caller,
    Part,
    ask,
    everything,
    form,
    pattern,
    registered,
    upload_head,
    wire_to,
)
from sites import SiteFactory

from restante.delivery.rules import MAX_FILE_BYTES, MAX_FORM_BYTES, MAX_REQUEST_BYTES

pytestmark = pytest.mark.anyio


async def assert_nothing_stored(connection: Any) -> None:
    stored = await everything(connection)
    assert stored["uploads"] == stored["feed"] == stored["answers"] == stored["reservations"] == []
    assert all(set(row[1:]) == {0} for row in stored["feeds"])


async def assert_refused(connection: Any, answer: Answer, status: int, code: str) -> dict[str, Any]:
    """Refused in our format, and nothing was stored."""
    assert (answer.status, answer.json["code"]) == (status, code), answer.body
    assert answer.json["error"].endswith((".", "URL"))
    await assert_nothing_stored(connection)
    return answer.json


async def test_a_file_of_exactly_25_mib_is_accepted(caller: Caller):
    content = pattern(MAX_FILE_BYTES)

    (file_id,) = await caller.staged(Part(content))

    assert (await caller.fetch(file_id)).body == content


async def test_a_file_of_one_byte_more_is_a_413_with_its_name_and_size(
    caller: Caller, connection: Any
):
    answer = await caller.upload(
        Part(b"fine", name="fine.txt"), Part(bytes(MAX_FILE_BYTES + 1), name="too large.bin")
    )

    refusal = await assert_refused(connection, answer, 413, "file_too_large")
    assert refusal["filename"] == "too_large.bin"
    assert (refusal["size"], refusal["max"]) == (MAX_FILE_BYTES + 1, MAX_FILE_BYTES)


async def test_two_files_of_25_mib_fill_a_request_exactly(caller: Caller):
    answer = await caller.upload(Part(bytes(MAX_FILE_BYTES)), Part(bytes(MAX_FILE_BYTES)))

    assert [file["size"] for file in answer.json["files"]] == [MAX_FILE_BYTES] * 2


async def test_a_request_of_one_byte_more_is_a_413_with_the_limit(caller: Caller, connection: Any):
    half = Part(bytes(MAX_FILE_BYTES))

    answer = await caller.upload(half, half, Part(b"x"))

    refusal = await assert_refused(connection, answer, 413, "request_too_large")
    assert refusal["max"] == MAX_REQUEST_BYTES


async def test_a_request_with_a_too_large_content_length_is_refused_before_it_is_sent(
    caller: Caller, connection: Any
):
    async with wire_to(caller.site) as wire:
        lines = [f"Content-Type: {FORM}", "Expect: 100-continue"]
        await wire.send(upload_head(caller, 10**12, lines=lines))
        answer = await wire.answer()

    refusal = await assert_refused(connection, answer, 413, "request_too_large")
    assert refusal["max"] == MAX_REQUEST_BYTES


async def test_the_limits_are_public(caller: Caller):
    answer = await ask(caller.site, "GET", "/uploads/limits")

    assert (answer.status, answer.json) == (
        200,
        {
            "per_file_bytes": 26_214_400,
            "per_request_bytes": 52_428_800,
            "max_attachments_per_message": 64,
        },
    )


async def test_the_operator_sets_the_limits(run_site: SiteFactory, connection: Any):
    async with run_site(max_file_bytes=1000, max_request_bytes=1500) as site:
        caller = await registered(site)
        limits = (await ask(site, "GET", "/uploads/limits")).json
        file = await caller.upload(Part(bytes(1001), name="too large"))
        request = await caller.upload(Part(bytes(1000)), Part(bytes(501)))
        declared = await caller.upload(Part(bytes(1500 + MAX_FORM_BYTES)))

        await assert_refused(connection, file, 413, "file_too_large")
        assert (file.json["filename"], file.json["size"]) == ("too_large", 1001)
        assert file.json["max"] == limits["per_file_bytes"] == 1000
        for answer in (request, declared):
            await assert_refused(connection, answer, 413, "request_too_large")
            assert answer.json["max"] == limits["per_request_bytes"] == 1500
        await caller.staged(Part(bytes(1000)), Part(bytes(500)))


@pytest.mark.parametrize("over", [1, 500_000])
@pytest.mark.parametrize("limit", ["max_request_bytes", "workspace_max_bytes"])
async def test_a_file_that_is_too_large_is_refused_as_such_where_another_limit_is_equal(
    run_site: SiteFactory, connection: Any, limit: str, over: int
):
    """The limits of requests and workspaces follow a raised limit of files, and are equal then."""
    async with run_site(max_file_bytes=100_000, **{limit: 100_000}) as site:
        caller = await registered(site)
        answer = await caller.upload(Part(bytes(100_000 + over), name="too large"), Part(b"fine"))

        refusal = await assert_refused(connection, answer, 413, "file_too_large")
        assert refusal["filename"] == "too_large"
        assert (refusal["size"], refusal["max"]) == (100_000 + over, 100_000)
        await caller.staged(Part(bytes(100_000)))


async def test_a_file_without_a_declared_length_is_counted_up_to_the_limit_of_a_body(
    run_site: SiteFactory, connection: Any
):
    async def endless(head: bytes) -> AsyncIterator[bytes]:
        yield head
        while True:
            yield bytes(64 * 1024)

    async with run_site(max_file_bytes=1000, max_request_bytes=1000) as site:
        caller = await registered(site)
        body = endless(form(Part(b"x", name="endless"), closed=False))
        headers = {"Content-Type": FORM}
        answer = await caller.ask("POST", "/chat/uploads", data=body, headers=headers)

    refusal = await assert_refused(connection, answer, 413, "file_too_large")
    assert (refusal["filename"], refusal["max"]) == ("endless", 1000)
    assert 1000 < refusal["size"] <= 1000 + MAX_FORM_BYTES
    assert f"at least {refusal['size']} bytes" in refusal["error"]


async def test_larger_files_than_by_default_are_accepted(run_site: SiteFactory):
    content = pattern(MAX_FILE_BYTES + 1)
    async with run_site(max_file_bytes=2 * MAX_FILE_BYTES) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged(Part(content))

        assert (await caller.fetch(file_id)).body == content


async def test_a_quota_below_the_limit_is_what_holds_and_is_logged(run_site: SiteFactory):
    with structlog.testing.capture_logs() as logged:
        async with run_site(workspace_max_bytes=2000, server_max_bytes=1000) as site:
            limits = (await ask(site, "GET", "/uploads/limits")).json

    assert (limits["per_file_bytes"], limits["per_request_bytes"]) == (1000, 1000)
    reasons = [line["reason"] for line in logged if line["event"] == "file_limit_above_quota"]
    assert reasons == [
        f"A file of RESTANTE_MAX_FILE_BYTES never fits: {name} is smaller."
        for name in ("RESTANTE_WORKSPACE_MAX_BYTES", "RESTANTE_SERVER_MAX_BYTES")
    ]


async def test_a_large_body_that_does_not_keep_the_pace_is_cut_off(
    run_site: SiteFactory, connection: Any
):
    """Whatever it declares: the time for 50 MiB more than have arrived is all that it has."""
    pace = {"upload_grace_seconds": 0.2, "upload_min_bytes_per_second": MAX_REQUEST_BYTES * 5}
    async with run_site(max_file_bytes=2**30, max_request_bytes=2**30, **pace) as site:
        caller = await registered(site)
        async with wire_to(site) as wire:
            await wire.send(upload_head(caller, 2**30) + form(Part(b"x"), closed=False))
            answer = await wire.answer()

    refusal = await assert_refused(connection, answer, 408, "upload_too_slow")
    assert "0 s" in refusal["error"]


async def test_64_files_are_accepted_and_65_are_not(caller: Caller, connection: Any):
    answer = await caller.upload(*[Part(b"x")] * 65)
    refusal = await assert_refused(connection, answer, 400, "too_many_files")
    assert refusal["max"] == 64

    assert len(await caller.staged(*[Part(b"x")] * 64)) == 64


async def test_an_empty_file_is_a_400_whatever_else_is_sent(caller: Caller, connection: Any):
    for parts in (
        [Part(b"")],
        [Part(b"good"), Part(b"", name="empty one")],
        [Part(b""), Part(b"good")],
    ):
        answer = await caller.upload(*parts)
        refusal = await assert_refused(connection, answer, 400, "upload_malformed")
        assert "empty" in refusal["error"]


async def test_a_request_without_a_part_named_files_is_a_400(caller: Caller, connection: Any):
    for parts in ([], [Part(field="file")], [Part(field="Files")], [Part(field="")]):
        answer = await caller.upload(*parts)
        refusal = await assert_refused(connection, answer, 400, "upload_malformed")
        assert "files" in refusal["error"] or "multipart" in refusal["error"]


async def test_a_malformed_body_is_a_400(caller: Caller, connection: Any):
    for body in (b"", b"hello", form(Part(), closed=False), form(Part())[:-30]):
        answer = await caller.send(body)
        await assert_refused(connection, answer, 400, "upload_malformed")


async def test_a_refusal_keeps_the_connection_of_a_body_that_has_arrived(caller: Caller):
    """Its end is seen at once; waiting for more until a timeout would close the connection."""
    for parts in ([Part(b"")], [Part(field="x")], [Part(b"x")] * 65):
        answer = await caller.upload(*parts)

        assert answer.status == 400
        assert "Connection" not in answer.headers
