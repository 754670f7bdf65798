"""
What a hostile or broken client can send: a clear 4xx, nothing stored, bounded memory and time.

Raw sockets where a client library would be too polite.
"""

import asyncio
import io
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest
from callers import (
    ADMIN,
    BOUNDARY,
    FORM,
    Answer,
    Caller,
    Part,
    Wire,
    ask,
    bearer,
    chunked,
    everything,
    form,
    registered,
    request_head,
    upload_head,
    wire_to,
)
from processes import Server
from sites import Site, SiteFactory

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024
CLEAN = re.compile(r"[A-Za-z0-9._-]{1,100}")
DELIMITER = b"--" + BOUNDARY.encode()
DISPOSITION = b'Content-Disposition: form-data; name="files"; filename="a"'


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def nothing_stored(caller: Caller, connections: Any) -> AsyncIterator[None]:
    """Whatever the test does, it leaves the tables as they were."""
    connection = await connections()
    before = await everything(connection, caller.id)
    yield
    assert await everything(connection, caller.id) == before


def assert_clear(answer: Answer, *statuses: int) -> None:
    """A refusal in our shape."""
    assert answer.status in (statuses or {400}), answer
    refusal = answer.json
    assert refusal["error"]
    assert re.fullmatch("[a-z_]+", refusal["code"])
    assert refusal["code"] != "internal"


# ---- bodies of uploads


async def test_a_body_cut_off_at_any_place_is_refused(caller: Caller, nothing_stored: None):
    whole = form(Part(b"hello"), Part(b"world"))
    end = whole.rindex(b"--")  # what follows the last boundary may be missing

    for cut in range(0, end, 7):
        assert_clear(await caller.send(whole[:cut]))


async def test_a_sender_that_falls_silent_and_leaves_stores_nothing(
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


async def pour(wire: Wire, piece: bytes, *, most: int) -> int:
    """Send the piece again and again until the server has had enough; how much it took."""
    sent = 0
    with suppress(ConnectionError):
        while sent < most:
            await wire.send(piece)
            sent += len(piece)
    return sent


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
    """Its connection ends after about two requests' worth of bytes."""
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller))
        if beginning:
            await wire.send(chunked(beginning))
        answering = asyncio.create_task(wire.answer())
        sent = await pour(wire, chunked(bytes(MIB)), most=200 * MIB)
        # Who still sends when the connection ends may lose the answer to that.
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            answer = await answering
            assert_clear(answer, 413)
            assert answer.headers["Connection"] == "close"

    assert 50 * MIB < sent < 150 * MIB


async def test_endless_part_headers_are_cut_off(caller: Caller, nothing_stored: None):
    for line in (b"X: " + b"y" * 60_000, b"X: y\r\n" * 10_000, b" continued\r\n" * 5_000):
        async with wire_to(caller.site) as wire:
            await wire.send(upload_head(caller))
            await wire.send(chunked(DELIMITER + b"\r\n" + DISPOSITION + b"\r\n"))
            answering = asyncio.create_task(wire.answer())
            await pour(wire, chunked(line), most=2 * MIB)
            await wire.send(b"0\r\n\r\n")
            assert_clear(await answering)


async def test_a_slow_sender_is_told_and_cut_off(run_site: SiteFactory, connections: Any):
    """One that trickles, one that stops, one that has not begun: none holds on for ever."""
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

                assert_clear(answer, 408)
                assert answer.json["code"] == "upload_too_slow"
                assert await wire.is_closed()
        now = await everything(await connections())

    assert now["uploads"] == now["feed"] == now["reservations"] == []


async def test_what_is_not_a_form_is_refused(caller: Caller, nothing_stored: None):
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
    ):
        answer = await caller.send(form(Part()), {"Content-Type": content_type})
        assert_clear(answer)


async def test_broken_boundaries_are_refused(caller: Caller, nothing_stored: None):
    part = DELIMITER + b"\r\n" + DISPOSITION + b"\r\n\r\nhello"
    for body in (
        part.replace(b"\r\n", b"\n") + b"\n" + DELIMITER + b"--\n",
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
        assert_clear(await caller.send(body))


async def test_odd_part_headers_are_refused(caller: Caller, nothing_stored: None):
    for headers in (
        [b'Content-Disposition: attachment; name="files"; filename="a"'],
        [b"Content-Type: text/plain"],
        [DISPOSITION, b"Content-Length: 4"],
        [DISPOSITION, b"Content-Length: 6"],
        [DISPOSITION, b"Content-Length: -1"],
        [DISPOSITION, b"Content-Length: 5", b"Content-Length: 5"],
        [DISPOSITION, b"Content-Type: text/\xff\xfe"],
        [b'Content-Disposition: form-data; name="files"; filename="\xff.txt"'],
        [DISPOSITION, b"X\0Y: z"],
        [DISPOSITION, b"X-Long: " + b"x" * 1_000_000],
        [DISPOSITION, *[b"X: y"] * 10_000],
    ):
        assert_clear(await caller.upload(Part(b"hello", headers=headers)))


async def test_ten_thousand_parts_are_refused(caller: Caller, nothing_stored: None):
    for parts in ([Part(b"x")] * 10_000, [Part(b"x", field="y")] * 10_000, [Part(b"")] * 10_000):
        assert_clear(await caller.upload(*parts))


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


async def test_hostile_names_become_harmless_ones(caller: Caller):
    for name in HOSTILE_NAMES:
        header = b'Content-Disposition: form-data; name="files"; filename="' + name + b'"'
        answer = await caller.upload(Part(b"hello", headers=[header]))

        assert answer.status == 200, (name, answer.body)
        (file,) = answer.json["files"]
        assert CLEAN.fullmatch(file["name"]), name
        assert file["name"] not in {".", ".."}
        fetched = await caller.fetch(file["uri"].rpartition("/")[2])
        assert (fetched.status, fetched.body) == (200, b"hello")
        assert "X-Evil" not in fetched.headers
        assert f'filename="{file["name"]}"' in fetched.headers["Content-Disposition"]


async def test_a_type_that_lies_is_sent_as_an_attachment(caller: Caller):
    (file_id,) = await caller.staged(Part(b"<script>", name="x.html", mimetype="text/html"))

    answer = await caller.fetch(file_id)

    assert answer.headers["Content-Disposition"].startswith("attachment;")
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_duplicated_part_headers_mean_one_file(caller: Caller):
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
    assert CLEAN.fullmatch(file["name"])
    assert file["mimeType"] in {"text/plain", "text/html"}


# ---- frames of HTTP


async def raw(site: Site, data: bytes) -> bytes:
    """Everything the server answers before it closes the connection."""
    async with wire_to(site) as wire:
        await wire.send(data)
        return await wire.rest()


async def test_contradicting_lengths_are_refused(caller: Caller, nothing_stored: None):
    """The ground on which requests are smuggled; refused before anything of ours is asked."""
    body = form(Part())
    length = f"Content-Length: {len(body)}"
    form_type = f"Content-Type: {FORM}"

    for lines in (
        ["Content-Length: -1"],
        ["Content-Length: 1e3"],
        ["Content-Length: 5, 5"],
        [f"Content-Length: {'9' * 40}"],
        [length, "Content-Length: 1"],
        [length, "Transfer-Encoding: chunked"],
        ["Transfer-Encoding: chunked, identity"],
    ):
        path = f"{caller.path}/chat/uploads"
        head = request_head("POST", path, token=caller.token, lines=[form_type, *lines])
        answer = await raw(caller.site, head + body)
        assert answer.startswith(b"HTTP/1.1 400 "), lines
        assert answer.count(b"HTTP/1.1") == 1


async def test_a_body_longer_than_announced_is_cut_at_its_length(
    caller: Caller, nothing_stored: None
):
    body = form(Part())
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller, len(body) - 10) + body)

        assert (await wire.rest()).startswith(b"HTTP/1.1 400 ")


async def test_broken_chunks_end_the_connection(caller: Caller, nothing_stored: None):
    for chunk in (
        b"zz\r\nhello\r\n",
        b"-5\r\nhello\r\n",
        b"ffffffffffffffffff\r\nx",
        b"5\r\nhelloX",
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(upload_head(caller) + chunked(form(Part(), closed=False)) + chunk)
            assert await wire.is_closed()


async def test_who_waits_to_be_asked_is_refused_without_being_asked(
    caller: Caller, nothing_stored: None
):
    """`Expect: 100-continue` is there to save a sender its body."""
    other = await registered(caller.site)
    absent = Caller(caller.site, str(uuid4()), ADMIN["Authorization"].removeprefix("Bearer "))
    stranger = Caller(caller.site, caller.id, other.token)
    expect = ["Expect: 100-continue", f"Content-Type: {FORM}"]

    for one, length, extra, status in (
        (stranger, 100, [], b"401"),
        (absent, 100, [], b"404"),
        (caller, 10**10, [], b"413"),
        (caller, 100, ["Idempotency-Key: " + "k" * 300], b"400"),
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(upload_head(one, length, lines=[*expect, *extra]))
            assert await wire.read(12) == b"HTTP/1.1 " + status


async def test_who_waits_to_be_asked_is_asked(caller: Caller):
    body = form(Part())
    async with wire_to(caller.site) as wire:
        lines = ["Expect: 100-continue", f"Content-Type: {FORM}"]
        await wire.send(upload_head(caller, len(body), lines=lines))
        assert await wire.read(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(body)

        assert (await wire.answer()).status == 200


async def test_who_was_asked_and_is_refused_then_hears_it(caller: Caller, nothing_stored: None):
    body = form(Part(b""), Part(bytes(3 * MIB)))
    async with wire_to(caller.site) as wire:
        lines = ["Expect: 100-continue", f"Content-Type: {FORM}"]
        await wire.send(upload_head(caller, len(body), lines=lines))
        await wire.read(25)
        await wire.send(body)

        assert_clear(await wire.answer())


async def test_of_duplicated_headers_the_first_counts(caller: Caller):
    other = await registered(caller.site)
    path = f"{caller.path}/activity"

    for first, second, status in (
        (other.token, caller.token, 401),
        (caller.token, other.token, 200),
    ):
        async with wire_to(caller.site) as wire:
            lines = [f"Authorization: Bearer {second}"]
            await wire.send(request_head("GET", path, token=first, lines=lines))
            assert (await wire.answer()).status == status


async def test_odd_tokens_are_refused(caller: Caller):
    path = f"{caller.path}/activity"
    for value in (
        "Bearer",
        "Bearer ",
        "Bearer  ",
        "bearer\t" + caller.token,
        "Basic " + caller.token,
        caller.token,
        "Bearer " + caller.token + "x",
        "Bearer " + caller.token[:-1],
        "Bearer " + caller.token.upper(),
        "Bearer \u00ff\u00fe",
        "Bearer " + "x" * 50_000,
        f"Bearer {caller.token}, Bearer {caller.token}",
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(request_head("GET", path, lines=[f"Authorization: {value}"]))
            assert_clear(await wire.answer(), 401)


async def test_odd_addresses_are_refused(caller: Caller):
    for path in (
        "/workspaces/%00/activity",
        "/workspaces/%ff%fe/activity",
        "/workspaces/" + "x" * 20_000 + "/activity",
        f"/workspaces/{caller.id}%2F..%2F{caller.id}/activity",
        f"/workspaces/../workspaces/{caller.id}/activity",
        f"{caller.path}/pending-uploads/..%2f..%2fadmin/content",
        "//admin/workspaces",
    ):
        async with wire_to(caller.site) as wire:
            await wire.send(request_head("GET", path, token=caller.token))
            assert_clear(await wire.answer(), 400, 401, 404)


async def test_odd_query_values_are_refused(caller: Caller):
    numbers = ("-1", "0", "nan", "inf", "-inf", "1e309", "0x10", "%D9%A3", "1_0", "+", "%00", "")
    for route, name, values in (
        ("/activity", "limit", numbers),
        ("/activity", "since_secs", numbers),
        ("/activity", "since_seq", ("-1", *numbers[2:], "9" * 5000)),
        ("/activity", "wait", (*numbers[2:], "-0.1")),
        ("/activity", "source", ("%00", "%ff", "canvas%00")),
        ("/activity", "type", ("%00", "a2a_receive%00")),
        ("/activity", "since_id", ("%00", "%ff", "x" * 5000)),
        ("/pending-uploads", "limit", numbers),
        ("/pending-uploads", "after", ("%00", "x", "-1", "")),
    ):
        for value in values:
            async with wire_to(caller.site) as wire:
                path = f"{caller.path}{route}?{name}={value}"
                await wire.send(request_head("GET", path, token=caller.token))
                answer = await wire.answer()
                assert_clear(answer)
                assert name in answer.json["error"], path


# ---- JSON


JSON_ROUTES = ("/registry/register", "/registry/heartbeat", "a2a", "activity/ack", "PATCH")


async def send_json(caller: Caller, route: str, body: bytes) -> Answer:
    if route == "PATCH":
        return await ask(caller.site, "PATCH", caller.path, data=io.BytesIO(body), headers=ADMIN)
    path = route if route.startswith("/") else f"{caller.path}/{route}"
    headers = bearer(caller.token)
    return await ask(caller.site, "POST", path, data=io.BytesIO(body), headers=headers)


async def test_broken_json_is_refused_everywhere(caller: Caller, nothing_stored: None):
    bodies = [
        b"",
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf{}",
        b'{"method": "\xff"}',
        b'{"method": "\xed\xa0\x80"}',
        b'{"method": "\\ud800"}',
        b'{"method": "\\ud800x"}',
        b'{"method": "\\udc00"}',
        b'{"method": "x", "id": 1e400}',
        b'{"method": "x", "id": ' + b"9" * 10_000 + b"}",
        b'{"method": "x", "id": NaN}',
        b'{"method": "x", "id": -Infinity}',
        b'{"method": "x"',
        b'{"method": "x",}',
        b"{'method': 'x'}",
        b'{"method": "x"} {"method": "y"}',
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"method": "x", "params": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'"' + b"x" * 1000,
        b"[]",
        b"1",
        b"true",
    ]
    for route in JSON_ROUTES:
        for body in bodies:
            answer = await send_json(caller, route, body)
            assert_clear(answer)


async def test_json_that_is_nested_deeper_than_anybody_means_is_refused(caller: Caller):
    """A row that some reader cannot take would stop that reader for good."""
    for depth in (10, 90, 110, 500, *range(930, 1010, 5)):
        body = b'{"method": "x", "params": ' + b"[" * depth + b"]" * depth + b"}"
        answer = await send_json(caller, "a2a", body)

        assert answer.status == (200 if depth < 100 else 400), depth
        card = b'{"id": "%s", "agent_card": {"name": "x", "y": %s}}' % (
            caller.id.encode(),
            b"[" * depth + b"]" * depth,
        )
        answer = await send_json(caller, "/registry/register", card)
        assert answer.status == (200 if depth < 100 else 400), depth
    assert (await caller.read_feed()).status == 200


async def test_nul_and_odd_text_in_json_strings_are_kept_or_cleaned(caller: Caller):
    odd = "\0\x1b\u202e\ufeff\U0001f600"

    queued = await caller.message({"method": "m" + odd, "params": {odd: odd}}, to=caller)
    beat = json.dumps({"workspace_id": caller.id, "current_task": odd}).encode()
    renamed = await ask(caller.site, "PATCH", caller.path, json={"name": odd}, headers=ADMIN)
    (row,) = await caller.feed()

    assert (queued.status, renamed.status) == (200, 200)
    assert (await send_json(caller, "/registry/heartbeat", beat)).status == 200
    assert row["method"].isprintable()
    assert row["request_body"]["params"] == {odd: odd}
    bad_url = await ask(caller.site, "PATCH", caller.path, json={"url": odd}, headers=ADMIN)
    assert_clear(bad_url)


async def test_json_has_a_largest_size(caller: Caller, connections: Any):
    connection = await connections()
    before = await everything(connection)
    frame = b'{"method": "x", "params": [""]}'
    for route in JSON_ROUTES:
        body = frame.replace(b'""', b'"' + b"y" * (MIB + 1 - len(frame)) + b'"')
        answer = await send_json(caller, route, body)
        assert_clear(answer, 413)
        assert answer.json["max"] == MIB
    assert await everything(connection) == before

    body = frame.replace(b'""', b'"' + b"y" * (MIB - len(frame)) + b'"')
    assert len(body) == MIB
    assert (await send_json(caller, "a2a", body)).status == 200


async def test_endless_json_is_refused_while_it_is_sent(caller: Caller, nothing_stored: None):
    for path, token in (("/registry/register", ""), (f"{caller.path}/a2a", caller.token)):
        async with wire_to(caller.site) as wire:
            lines = ["Transfer-Encoding: chunked"]
            await wire.send(request_head("POST", path, token=token, lines=lines))
            answering = asyncio.create_task(wire.answer())
            while not answering.done():
                await wire.send(chunked(b"[" * 65_536))
            assert_clear(await answering, 413)


# ---- memory


CUT_OFF = 0  # instead of a status: the connection ended while we were still sending


def peak_kib(pid: int) -> int:
    """The most memory the process has had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def registered_at(server: Server) -> tuple[str, str]:
    """A workspace on a server that is a process of its own: its id and its token."""
    workspace_id = str(uuid4())
    body = {"id": workspace_id, "delivery_mode": "poll", "agent_card": {"name": "x"}}
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    request = Request(
        server.address + "/registry/register", json.dumps(body).encode(), headers=headers
    )
    with urlopen(request, timeout=10) as answer:
        return workspace_id, json.load(answer)["auth_token"]


@pytest.mark.slow
async def test_the_worst_of_it_does_not_show_in_the_servers_memory(server: Server):
    """Four of each at once, and the server that is asked afterwards is well."""
    server.start()
    workspace_id, token = registered_at(server)
    path = f"/workspaces/{workspace_id}/chat/uploads"
    form_type = f"Content-Type: {FORM}"
    lines = [form_type, "Transfer-Encoding: chunked"]
    head = request_head("POST", path, token=token, lines=lines)
    message = request_head("POST", f"/workspaces/{workspace_id}/a2a", token=token, lines=lines[1:])
    file = chunked(form(Part(b"x"), closed=False)[:-2])
    parts = form(*[Part(b"x", field="y")] * 10_000, closed=False)

    async def attack(start: bytes, piece: bytes, most: int) -> int:
        async with wire_to(server.address) as wire:
            await wire.send(start)
            answering = asyncio.create_task(wire.answer())
            pouring = asyncio.create_task(pour(wire, piece, most=most))
            try:
                return (await answering).status
            except (ConnectionError, asyncio.IncompleteReadError):
                return CUT_OFF
            finally:
                pouring.cancel()
                await asyncio.wait({pouring})

    async def accepted() -> int:
        async with wire_to(server.address) as wire:
            body = form(Part(bytes(25 * MIB)))
            head = request_head("POST", path, token=token, length=len(body), lines=[form_type])
            await wire.send(head + body)
            return (await wire.answer()).status

    assert await accepted() == 200
    before = peak_kib(server.pid)

    for start, piece, most, status in (
        (head + file, chunked(bytes(MIB)), 150 * MIB, 413),
        (head, chunked(parts), 4 * MIB, 400),
        (head + chunked(DELIMITER + b"\r\n"), chunked(b"X: " + b"y" * MIB), 4 * MIB, 400),
        (message, chunked(b"[" * 65_536), 4 * MIB, 413),
    ):
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(attack(start, piece, most) for _ in range(4)))
        assert set(answers) <= {status, CUT_OFF}

    assert peak_kib(server.pid) - before < 64 * 1024
    assert await accepted() == 200
