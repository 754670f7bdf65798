"""Uploads over HTTP: sizes, counts and malformed bodies, to the byte."""

from typing import Any

import pytest
from callers import (
    FORM,
    Answer,
    Caller,
    Part,
    everything,
    form,
    pattern,
    upload_head,
    wire_to,
)

from restante.delivery.rules import MAX_FILE_BYTES, MAX_REQUEST_BYTES

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
