"""Uploads over HTTP: how file names are sent, and what senders in the field get wrong."""

from typing import Any

import pytest
from callers import BOUNDARY, FORM, Answer, Caller, Part, everything, form

pytestmark = pytest.mark.anyio

DELIMITER = b"--" + BOUNDARY.encode()


def named(disposition: bytes, *more: bytes) -> Part:
    """A file whose Content-Disposition ends with this."""
    start = b'Content-Disposition: form-data; name="files"; '
    return Part(b"hello", headers=[start + disposition, *more])


async def names_of(caller: Caller, part: Part) -> tuple[str, str]:
    answer = await caller.upload(part)
    assert answer.status == 200, (part, answer.body)
    (file,) = answer.json["files"]
    return file["name"], file["display_name"]


async def assert_refused(connection: Any, answer: Answer, words: str) -> None:
    assert (answer.status, answer.json["code"]) == (400, "upload_malformed"), answer.body
    assert words in answer.json["error"]
    stored = await everything(connection)
    assert stored["uploads"] == stored["feed"] == stored["reservations"] == []


async def test_an_extended_name_is_preferred_wherever_it_stands(caller: Caller):
    for disposition in (
        b"filename=\"na_ve.txt\"; filename*=UTF-8''na%C3%AFve%20name.txt",
        b"filename*=utf-8'en'na%C3%AFve%20name.txt; filename=\"other.txt\"",
        b"FileName*=iso-8859-1''na%EFve%20name.txt",
        b"filename*=\"UTF-8''na%C3%AFve%20name.txt\"",
    ):
        names = await names_of(caller, named(disposition))
        assert names == ("na_ve_name.txt", "naïve name.txt"), disposition


async def test_a_malformed_extended_name_is_ignored(caller: Caller):
    for extended in (
        b"na%C3%AFve.txt",
        b"UTF-8'na%C3%AFve.txt",
        b"UTF-8''%C3",
        b"UTF-8''%zz",
        b"UTF-8''",
        b"UTF-16''a",
        b"klingon''a",
        b"UTF-8''caf\xc3\xa9",
    ):
        part = named(b'filename="plain.txt"; filename*=' + extended)
        assert await names_of(caller, part) == ("plain.txt", "plain.txt"), extended


async def test_a_name_that_is_not_utf8_is_read_as_latin_1(caller: Caller):
    latin = named(b'filename="caf\xe9.txt"', b"Content-Type: text/\xff")
    utf8 = named('filename="café ☕.txt"'.encode())

    assert await names_of(caller, latin) == ("caf_.txt", "café.txt")
    assert await names_of(caller, utf8) == ("caf___.txt", "café ☕.txt")


async def test_a_backslash_is_a_character_of_the_name(caller: Caller):
    assert await names_of(caller, named(rb'filename="C:\dir\a.txt"')) == ("C__dir_a.txt", "a.txt")
    assert await names_of(caller, named(rb'filename="..\..\win.ini"')) == (
        ".._.._win.ini",
        "win.ini",
    )


async def test_quotes_in_a_name_may_be_escaped_or_encoded(caller: Caller):
    for disposition in (rb'filename="a \"b\".txt"', b'filename="a %22b%22.txt"'):
        assert await names_of(caller, named(disposition)) == ("a__b_.txt", 'a "b".txt')


async def test_a_bare_name_ends_at_the_next_parameter(caller: Caller):
    assert await names_of(caller, named(b"filename=a b.txt ; x=y")) == ("a_b.txt", "a b.txt")


async def test_a_file_without_a_name_is_refused(caller: Caller, connection: Any):
    for part in (Part(b"hello", name=None), Part(b"", name=None), Part(b"hello", name="")):
        answer = await caller.upload(Part(b"good"), part)
        await assert_refused(connection, answer, "no filename")


async def test_a_file_field_in_which_nothing_was_chosen_is_no_file(caller: Caller, connection: Any):
    """Browsers send it without a name and without contents."""
    empty = Part(b"", name="", mimetype="application/octet-stream")

    await assert_refused(connection, await caller.upload(empty), "no part named files")

    answer = await caller.upload(empty, Part(b"good", name="good.txt"))
    assert [file["name"] for file in answer.json["files"]] == ["good.txt"]


async def test_part_heads_may_end_their_lines_with_a_bare_lf(caller: Caller):
    whole = form(Part(b"one\r\ntwo\n", name="a b.txt"), Part(b"x"))
    head, _, contents = whole.partition(b"one")
    mixed = (
        DELIMITER + b"\r\n" + head[len(DELIMITER) + 2 :].replace(b"\r\n", b"\n") + b"one" + contents
    )

    answer = await caller.send(mixed)

    assert answer.status == 200, answer.body
    first, second = answer.json["files"]
    assert (first["display_name"], first["mimeType"]) == ("a b.txt", "text/plain")
    assert (await caller.fetch(first["uri"].rpartition("/")[2])).body == b"one\r\ntwo\n"
    assert second["size"] == 1


async def test_a_whole_body_may_end_its_lines_with_a_bare_lf(caller: Caller):
    body = form(Part(b"one\r\ntwo\n"), Part(b"")).replace(b"\r\n", b"\n")
    body = body.replace(b"one\ntwo", b"one\r\ntwo").replace(b'name="files"', b'name="x"', 2)
    body = body.replace(b'name="x"', b'name="files"', 1)

    answer = await caller.send(body)

    assert answer.status == 200, answer.body
    (file,) = answer.json["files"]
    assert (await caller.fetch(file["uri"].rpartition("/")[2])).body == b"one\r\ntwo\n"


async def test_what_surrounds_the_parts_is_skipped(caller: Caller):
    whole = form(Part(b"--not " + DELIMITER + b" the end"), Part(b"\r\n" + DELIMITER + b"x\r\n"))
    padded = whole.replace(DELIMITER + b"\r\n", DELIMITER + b" \t\r\n")

    answer = await caller.send(b"a preamble\r\n--\r\n" + padded + b"an epilogue")

    assert answer.status == 200, answer.body
    contents = [
        (await caller.fetch(file["uri"].rpartition("/")[2])).body for file in answer.json["files"]
    ]
    assert contents == [b"--not " + DELIMITER + b" the end", b"\r\n" + DELIMITER + b"x\r\n"]


async def test_other_headers_of_a_part_are_ignored(caller: Caller):
    """RFC 7578 says so of all but two, even of a wrong length."""
    part = named(b'filename="a"', b"Content-Length: 99", b"Content-Length: x", b"X-Any: thing")

    assert await names_of(caller, part) == ("a", "a")


async def test_a_part_that_is_no_form_data_is_ignored(caller: Caller, connection: Any):
    part = Part(headers=[b'Content-Disposition: attachment; name="files"; filename="a"'])

    await assert_refused(connection, await caller.upload(part), "no part named files")
    assert (await caller.upload(part, Part(b"good"))).status == 200


async def test_the_content_type_may_quote_its_boundary(caller: Caller):
    quoted = FORM.replace(BOUNDARY, f'"{BOUNDARY}"')

    assert (await caller.send(form(Part()), {"Content-Type": quoted})).status == 200


@pytest.mark.parametrize(
    "boundary",
    [
        "*=idna''x",
        "*=utf-7''+2AA-",
        "*0=a; boundary*1=b",
        "=",
        '="a\u00e9"',
        "=" + "x" * 201,
        '="a "',
    ],
)
async def test_a_boundary_that_cannot_be_one_is_a_400(caller: Caller, boundary: str):
    sent = {"Content-Type": f"multipart/form-data; boundary{boundary}"}

    assert (await caller.send(form(Part()), sent)).status == 400
