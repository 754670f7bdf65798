"""Hostile uploads: a clear refusal or a harmless file, nothing else stored, bounded time."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from attacks import CLEAN_NAME, DELIMITER, DISPOSITION, MIB, assert_refused, pour
from callers import (
    BOUNDARY,
    Caller,
    Part,
    chunked,
    everything,
    form,
    registered,
    upload_head,
    wire_to,
)
from sites import SiteFactory

pytestmark = pytest.mark.anyio


async def test_a_body_cut_off_at_any_place_is_refused(caller: Caller, nothing_stored: None):
    whole = form(Part(b"hello"), Part(b"world"))
    end = whole.rindex(b"--")  # the rest may be missing

    for cut in range(0, end, 7):
        assert_refused(await caller.send(whole[:cut]))


async def test_a_sender_that_disconnects_before_the_end_stores_nothing(
    caller: Caller, nothing_stored: None
):
    whole = form(Part(b"hello"))
    for leave in ("half close", "abort"):
        async with wire_to(caller.site) as wire:
            await wire.send(upload_head(caller, len(whole)) + whole[:-3])
            if leave == "abort":
                wire.close()
            else:
                wire.half_close()
                assert await wire.is_closed()


@pytest.mark.parametrize(
    "beginning",
    [
        pytest.param(form(Part(b"x"), closed=False)[:-2], id="file"),
        pytest.param(form(Part(b"x", field="y"), closed=False)[:-2], id="field"),
        pytest.param(b"", id="preamble"),
        pytest.param(form(Part(b"x")), id="epilogue"),
    ],
)
async def test_an_endless_body_is_cut_off(caller: Caller, nothing_stored: None, beginning: bytes):
    """The answer arrives in the middle of it, and then the connection is closed."""
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller))
        if beginning:
            await wire.send(chunked(beginning))
        answering = asyncio.create_task(wire.answer())
        sent = await pour(wire, chunked(bytes(MIB)), most=300 * MIB)
        answer = await answering

    assert_refused(answer, 413)
    assert answer.headers["Connection"] == "close"
    assert 50 * MIB < sent < 250 * MIB


async def test_endless_part_headers_are_cut_off(caller: Caller, nothing_stored: None):
    for line in (b"X: " + b"y" * 60_000, b"X: y\r\n" * 10_000, b" continued\r\n" * 5_000):
        async with wire_to(caller.site) as wire:
            await wire.send(upload_head(caller))
            await wire.send(chunked(DELIMITER + b"\r\n" + DISPOSITION + b"\r\n"))
            answering = asyncio.create_task(wire.answer())
            await pour(wire, chunked(line), most=2 * MIB)
            await wire.send(b"0\r\n\r\n")
            assert_refused(await answering)


async def test_a_slow_sender_is_refused_and_disconnected(run_site: SiteFactory, connections: Any):
    """Whether it has begun its body or not."""
    async with run_site(upload_grace_seconds=0.3, upload_min_bytes_per_second=10**9) as site:
        caller = await registered(site)
        whole = form(Part(b"hello"))
        for sent in (whole[:100], b""):
            async with wire_to(site) as wire:
                await wire.send(upload_head(caller, len(whole)) + sent)
                answering = asyncio.create_task(wire.answer())
                for byte in whole[len(sent) : -1]:
                    done, _ = await asyncio.wait({answering}, timeout=0.05)
                    if done:
                        break
                    await wire.send(bytes([byte]))
                answer = await answering

                assert_refused(answer, 408)
                assert answer.json["code"] == "upload_too_slow"
                assert await wire.is_closed()
        now = await everything(await connections())

    assert now["uploads"] == now["feed"] == now["reservations"] == []


async def test_a_content_type_that_is_not_a_form_is_refused(caller: Caller, nothing_stored: None):
    for content_type in (
        "",
        "application/json",
        "text/plain",
        "multipart/mixed; boundary=" + BOUNDARY,
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=" + "b" * 5000,
        "multipart/form-data; boundary=another",
        "multipart/form-data; boundary=" + BOUNDARY[:-1],
        "multipart/form-data; boundary*=utf-8''%0A",
        "multipart/form-data; boundary*=nonsense'x'%ff",
        "multipart/form-data; boundary=\u00e9\u00ff",
        "application/x-www-form-urlencoded",
        "multipart/form-data/; boundary=" + BOUNDARY,
        ";" * 100,
        'multipart/form-data; a="' + ";" * 8000,
    ):
        answer = await caller.send(form(Part()), {"Content-Type": content_type})
        assert_refused(answer)


async def test_broken_boundaries_are_refused(caller: Caller, nothing_stored: None):
    part = DELIMITER + b"\r\n" + DISPOSITION + b"\r\n\r\nhello"
    for body in (
        part.replace(b"\r\n", b"\n") + DELIMITER + b"--\n",
        part + b"\r\n" + DELIMITER + b"xx",
        part + b"\r\n" + DELIMITER + b"-",
        part + DELIMITER + b"--",
        b"x" + form(Part()),
        DELIMITER + b"--",
        DELIMITER * 1000,
        DELIMITER + b"\r\n\r\nno headers\r\n" + DELIMITER + b"--",
        DELIMITER + b"\r\n: nameless\r\n\r\nx\r\n" + DELIMITER + b"--",
        DELIMITER + b"\r\nno colon\r\n\r\nx\r\n" + DELIMITER + b"--",
        b"\r\n" * 100_000,
        b"\r\n--" * 50_000,
    ):
        assert_refused(await caller.send(body))


async def test_odd_part_headers_are_refused(caller: Caller, nothing_stored: None):
    for headers in (
        [b'Content-Disposition: attachment; name="files"; filename="a"'],
        [b"Content-Type: text/plain"],
        [b" continued", DISPOSITION],
        [DISPOSITION, b"X\0Y: z"],
        [DISPOSITION, b"X-\xe9: y"],
        [DISPOSITION, b"X-Long: " + b"x" * 1_000_000],
        [DISPOSITION, *[b"X: y"] * 10_000],
    ):
        assert_refused(await caller.upload(Part(b"hello", headers=headers)))


async def test_bodies_that_almost_have_boundaries_are_refused(caller: Caller, nothing_stored: None):
    head = DELIMITER + b"\r\n" + DISPOSITION + b"\r\n\r\n"
    short = {"Content-Type": "multipart/form-data; boundary=b"}
    for body, headers in (
        (b"\n--b-" * 400_000, short),
        (b"\n--bx" * 400_000, short),
        (b"\n--b   " * 300_000, short),
        (head.replace(DELIMITER, b"--b") + b"\r\n--bx" * 400_000, short),
        (head + b"\r" * 2_000_000, {}),
        (head + b"\r\n--" * 500_000, {}),
        (head[:-2] + b";" * 16_000, {}),
        (DELIMITER + b"\r\nContent-Disposition: form-data" + b"; a=" * 4000 + b"\r\n\r\n", {}),
        (DELIMITER + b'\r\nContent-Disposition: form-data; a="' + b"\\" * 16_000, {}),
        (DELIMITER + b"\r\nContent-Disposition: form-data;" + b" " * 16_000, {}),
    ):
        assert_refused(await caller.send(body, headers))


async def test_ten_thousand_parts_are_refused(caller: Caller, nothing_stored: None):
    for parts in ([Part(b"x")] * 10_000, [Part(b"x", field="y")] * 10_000, [Part(b"")] * 10_000):
        assert_refused(await caller.upload(*parts))


HOSTILE_NAMES: Sequence[bytes] = (
    b"a\r\nX-Evil: 1",
    b"a%0D%0AX-Evil: 1",
    b"a\nX-Evil: 1",
    b"a\rX-Evil: 1",
    b"a\0b",
    b'a\\"; X-Evil="1',
    b"%22; filename=%22evil",
    "\u202egnp.exe".encode(),
    "\u00e9\u4e2d\U0001f600".encode(),
    "e\u0301\u200b\ufeff".encode(),
    b"../../etc/passwd",
    b"/etc/shadow",
    b"..\\..\\windows\\win.ini",
    b"C:\\secret.txt",
    b"\\\\host\\share\\x",
    b"....//....//x",
    b"a/../..",
    b"a/.",
    b"%2e%2e%2fx",
    b"~root",
    b"-rf",
    b"CON",
    b"x" * 3000,
    b"." * 300,
    b"a." + b"b" * 300,
    b"\x1b[31m",
    b"<script>",
    b"a;b|c`d`$(e)",
)


async def test_hostile_names_become_plain_names(caller: Caller):
    for name in HOSTILE_NAMES:
        header = b'Content-Disposition: form-data; name="files"; filename="' + name + b'"'
        answer = await caller.upload(Part(b"hello", headers=[header]))

        assert answer.status == 200, (name, answer.body)
        (file,) = answer.json["files"]
        assert CLEAN_NAME.fullmatch(file["name"]), name
        assert file["name"] not in {".", ".."}
        fetched = await caller.fetch(file["uri"].rpartition("/")[2])
        assert (fetched.status, fetched.body) == (200, b"hello")
        assert "X-Evil" not in fetched.headers
        assert f'filename="{file["name"]}"' in fetched.headers["Content-Disposition"]


async def test_html_is_sent_as_an_attachment_that_is_not_sniffed(caller: Caller):
    (file_id,) = await caller.staged(Part(b"<script>", name="x.html", mimetype="text/html"))

    answer = await caller.fetch(file_id)

    assert answer.headers["Content-Disposition"].startswith("attachment;")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_a_part_with_duplicated_headers_is_one_file(caller: Caller):
    answer = await caller.upload(
        Part(
            b"hello",
            headers=[
                DISPOSITION,
                b'Content-Disposition: form-data; name="files"; filename="b"; filename="c d"',
                b"Content-Type: text/plain",
                b"Content-Type: text/html",
            ],
        )
    )

    assert answer.status == 200
    (file,) = answer.json["files"]
    assert CLEAN_NAME.fullmatch(file["name"])
    assert file["mimeType"] in {"text/plain", "text/html"}
