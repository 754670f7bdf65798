"""The names of headers in answers are in the usual case, for scripts that search for them."""

import pytest
from callers import Caller, Part, Wire, registered, request_head, upload_head, wire_to
from hypothesis import given, strategies as st
from sites import Site

from restante import wire as names
from restante.server.header_names import with_usual_names

pytestmark = pytest.mark.anyio


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


async def head(wire: Wire) -> list[str]:
    """The names of the headers of the next answer, as they are sent."""
    lines = (await wire.until(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
    return [line.partition(":")[0] for line in lines]


async def names_of(caller: Caller, method: str, path: str, *lines: str) -> set[str]:
    async with wire_to(caller.site) as wire:
        await wire.send(request_head(method, caller.path + path, token=caller.token, lines=lines))
        return set(await head(wire))


COMMON = {"Date", "Content-Type", "X-Request-ID", "Vary"}


async def test_an_answer_has_the_names_that_the_protocol_spells(caller: Caller):
    (file_id,) = await caller.staged()
    content = f"/pending-uploads/{file_id}/content"

    feed = await names_of(caller, "GET", "/activity")
    file = await names_of(caller, "GET", content, "Range: bytes=1-2")
    closing = await names_of(caller, "GET", "/activity", "Connection: close")

    marks = {names.LOWEST_SEQ, names.LATEST_SEQ, names.ACKED_SEQ, names.READ_SEQ}
    assert feed == COMMON | marks | {"Content-Length"}
    assert file >= COMMON | {
        "Content-Length", "Content-Disposition", "ETag", "Repr-Digest", "Content-Range",
        "Accept-Ranges",
    }  # fmt: skip
    assert closing == feed | {"Connection"}


async def test_so_have_refusals_and_what_uvicorn_adds(caller: Caller):
    async with wire_to(caller.site) as wire:
        await wire.send(request_head("GET", f"{caller.path}/activity"))
        refused = set(await head(wire))
    stream = await names_of(caller, "GET", "/events")
    slash = await names_of(caller, "GET", "/activity/")
    method = await names_of(caller, "PUT", "/activity", "Content-Length: 0")

    assert refused == COMMON | {"Content-Length", "WWW-Authenticate"}
    assert stream >= COMMON | {"Transfer-Encoding", "Cache-Control"}
    assert "Location" in slash
    assert "Allow" in method


async def test_so_have_answers_that_never_reach_the_application(caller: Caller):
    async with wire_to(caller.site) as wire:
        await wire.send(b"nonsense\r\n\r\n")
        names = {"Content-Type", "Connection", "Content-Length", "X-Request-ID"}
        assert set(await head(wire)) == names


async def test_bytes_of_a_file_that_look_like_a_head_are_not_touched(caller: Caller):
    """Only the first piece of an answer is its head, also after an interim answer."""
    data = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\n"
    body = b"\r\n".join(
        [b"--x", b'Content-Disposition: form-data; name="files"; filename="a"', b"", data, b"--x--"]
    )

    async with wire_to(caller.site) as wire:
        lines = ["Content-Type: multipart/form-data; boundary=x", "Expect: 100-continue"]
        await wire.send(upload_head(caller, len(body), lines=lines))
        assert await wire.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(body)
        assert await head(wire) >= ["Date"]
    (row,) = await caller.feed()

    assert (await caller.fetch(row["request_body"]["file_id"])).body == data


async def test_every_answer_of_a_connection_has_them(caller: Caller):
    (file_id,) = await caller.staged(Part(b"x"))
    path = f"{caller.path}/pending-uploads/{file_id}/content"

    async with wire_to(caller.site) as wire:
        await wire.send(request_head("GET", path, token=caller.token) * 3)
        answers = [await wire.until(b"\r\n\r\nx") for _ in range(3)]

    assert all(b"\r\nContent-Type: text/plain\r\n" in answer for answer in answers)


VALUES = st.binary().filter(lambda value: b"\r" not in value and b"\n" not in value)


@given(st.lists(st.tuples(st.sampled_from([b"etag", b"date", b"x-a-b", b"te"]), VALUES)))
def test_values_and_their_order_are_kept(headers: list[tuple[bytes, bytes]]):
    lines = [name + b": " + value for name, value in headers]
    sent = b"\r\n".join([b"HTTP/1.1 200 OK", *lines, b"", b""])

    written = with_usual_names(sent)

    assert written.lower() == sent.lower()
    pairs = [line.partition(b": ") for line in written.split(b"\r\n")[1:-2]]
    assert [value for _, _, value in pairs] == [value for _, value in headers]
    assert {name for name, _, _ in pairs} <= {b"ETag", b"Date", b"X-A-B", b"Te"}
