"""The headers that describe bytes: the parts of an upload, and the answer of a download."""

import base64
import hashlib
from collections.abc import AsyncIterator, Sequence
from urllib.parse import unquote
from uuid import UUID, uuid4

import pytest
from callers import registered
from file_names import NAMES, Name
from hypothesis import given, strategies as st
from sites import Site

from restante.client import AsyncClient, Bytes, calls
from restante.client.calls import Extent, Part
from restante.client.http_replies import Reply
from restante.client.sending import MultipartBody, Outgoing
from restante.delivery.rules import clean_mimetype, clean_name, display_name
from restante.errors import AnswerInvalid
from restante.ids import FileId, WorkspaceId

pytestmark = pytest.mark.anyio

WORKSPACE = WorkspaceId(uuid4())
KEY = "0" * 32
SHA256 = hashlib.sha256(b"0123456789").digest()
DIGEST = f"sha-256=:{base64.b64encode(SHA256).decode()}:"

HOSTILE_NAMES = [
    'quo"te.txt',
    "back\\slash.txt",
    'a"; name="other"; x="',
    "a\r\nX-Evil: 1\r\n\r\nbody",
    f"a\r\n--{KEY}--\r\n",
    "../../etc/passwd",
    "C:\\windows\\evil.exe",
    "nul\0byte",
    "ünïcödé.pdf",
    "\udcff\udc80.bin",
    "\ud800.txt",
    "%22%0D%0A.txt",
    "tab\tand\x1bescape",
    "",
    "..",
    "x" * 300 + ".jpeg",
    "日本語",
    " spaces  ",
]


async def whole(body: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in body])


def length_of(files: Sequence[Outgoing]) -> int:
    parts = [file.part for file in files]
    return int(calls.upload(WORKSPACE, parts, key=KEY, ttl_seconds=None).headers["Content-Length"])


async def test_hostile_names_are_cleaned(shared_site: Site):
    """No name breaks out of its header, and no name that a disk can have is refused."""
    caller = await registered(shared_site)
    files = [Bytes(name, name.encode("utf-8", "replace") or b"-") for name in HOSTILE_NAMES]

    async with AsyncClient(shared_site.url, token=caller.token) as client:
        accepted = await client.send_files(UUID(caller.id), files)

    assert [file.name for file in accepted] == [clean_name(name) for name in HOSTILE_NAMES]
    assert [file.size for file in accepted] == [len(file.content) for file in files]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name.sent)[:40])
def test_the_original_name_is_sent_beside_the_clean_one(name: Name):
    """A server that does not know the encoded form uses the other."""
    head = calls.part_head(KEY, Part(name.sent, "", 1)).decode()

    plain, _, encoded = head.split("\r\n")[1].partition("; filename*=UTF-8''")
    assert plain == f'Content-Disposition: form-data; name="files"; filename="{name.wire}"'
    assert display_name(unquote(encoded) or name.wire) == name.shown
    assert len(encoded) < 3500
    assert head.isascii()


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain; charset=x", "a/b\r\nX-Evil: 1", "ü/ü", "nonsense", ""]
)
def test_an_invalid_type_becomes_octet_stream(kind: str):
    head = calls.part_head(KEY, Part("a.bin", kind, 1)).decode()

    expected = clean_mimetype(kind) or "application/octet-stream"
    assert head.split("\r\n")[2:] == [f"Content-Type: {expected}", "", ""]


@given(
    st.lists(
        st.tuples(st.text(), st.binary(max_size=50), st.text(max_size=20)), min_size=1, max_size=5
    )
)
async def test_content_length_is_the_length_of_the_body(files: list[tuple[str, bytes, str]]):
    """With one byte more or less, the request would hang or be truncated."""
    outgoing = [Outgoing.of(Bytes(*file)) for file in files]

    body = await whole(MultipartBody(KEY, outgoing).pieces())

    assert len(body) == length_of(outgoing)
    assert body.endswith(f"\r\n--{KEY}--\r\n".encode())


async def test_progress_counts_file_bytes_only():
    """A progress bar that counted headers would exceed 100 %."""
    sizes: list[int] = []
    outgoing = [Outgoing.of(Bytes(str(size), bytes(size))) for size in (3, 4)]

    await whole(MultipartBody(KEY, outgoing, sizes.append).pieces())

    assert sizes == [3, 7]


# The headers of a download


def extent(status: int = 200, start: int = 0, **headers: str) -> Extent:
    """Parse these headers; names are written with _ for -."""
    said = {"Content_Length": "10", "Repr_Digest": DIGEST} | headers
    named = {name.replace("_", "-").lower(): value for name, value in said.items()}
    call = calls.content(WORKSPACE, FileId(uuid4()), start)
    return call.read(Reply(status, named))


def test_the_headers_give_size_and_hash():
    assert extent() == Extent(0, 10, SHA256)


def test_the_headers_of_a_range_give_its_start():
    got = extent(206, 4, Content_Length="6", Content_Range="bytes 4-9/10")

    assert got == Extent(4, 10, SHA256)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content_Range": "bytes 4-9/*", "Content_Length": "6"},
        {"Content_Range": "bytes 4-8/10", "Content_Length": "5"},
        {"Content_Range": "bytes 4-9/10", "Content_Length": "5"},
        {"Content_Range": "bytes 4-9/10", "Content_Length": "7"},
        {"Content_Range": "bytes 4-9/10", "Content_Length": ""},
        {"Content_Range": "bytes 9-4/10", "Content_Length": "6"},
        {"Content_Range": "bytes 12-9/10", "Content_Length": "0"},
        {"Content_Range": "bytes -4-9/10", "Content_Length": "6"},
        {"Content_Range": "bytes 4-9/10, bytes 0-3/10", "Content_Length": "6"},
        {"Content_Range": "bytes \u0664-\u0669/10", "Content_Length": "6"},
        {"Content_Range": f"bytes 0-{'9' * 30}/{'9' * 30}", "Content_Length": "6"},
        {"Content_Range": "junk"},
    ],
    ids=str,
)
def test_a_range_that_contradicts_itself_is_refused(headers: dict[str, str]):
    """Bytes at the wrong offset would be detected only by the hash, after the whole download."""
    with pytest.raises(AnswerInvalid, match="length"):
        extent(206, 4, **headers)


@pytest.mark.parametrize("length", ["", "-1", "ten", "1.0", "9" * 19])
def test_a_file_of_unknown_length_is_refused(length: str):
    with pytest.raises(AnswerInvalid, match="length"):
        extent(Content_Length=length)


@pytest.mark.parametrize(
    "digest",
    [
        "",
        "junk",
        "sha-256=::",
        "sha-256=:AAAA:",
        "sha-256=:A:",
        f"sha-512=:{base64.b64encode(bytes(64)).decode()}:",
        f"sha-256={base64.b64encode(SHA256).decode()}",
    ],
    ids=str,
)
def test_a_file_without_a_hash_is_refused(digest: str):
    """Its content could not be verified."""
    with pytest.raises(AnswerInvalid, match="SHA-256"):
        extent(Repr_Digest=digest)


def test_the_sha256_is_found_among_other_digests():
    assert extent(Repr_Digest=f"md5=:AAAA:, {DIGEST}").sha256 == SHA256
