"""The two places where bytes are announced: the parts of an upload, the head of a download."""

import base64
import hashlib
from collections.abc import AsyncIterator, Sequence
from uuid import UUID, uuid4

import pytest
from callers import registered
from hypothesis import given
from hypothesis import strategies as st
from sites import Site

from restante.client import AsyncClient, Bytes, calls
from restante.client.calls import Extent, Part, Reply
from restante.client.sending import MultipartBody, Outgoing
from restante.core.uploads import clean_mimetype, clean_name
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


async def test_hostile_names_arrive_as_their_cleaned_selves(shared_site: Site):
    """No name breaks out of its header, and none that a disk can have is refused."""
    caller = await registered(shared_site)
    files = [Bytes(name, name.encode("utf-8", "replace") or b"-") for name in HOSTILE_NAMES]

    async with AsyncClient(shared_site.url, token=caller.token) as client:
        accepted = await client.send_files(UUID(caller.id), files)

    assert [file.name for file in accepted] == [clean_name(name) for name in HOSTILE_NAMES]
    assert [file.size for file in accepted] == [len(file.content) for file in files]


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain; charset=x", "a/b\r\nX-Evil: 1", "ü/ü", "nonsense", ""]
)
def test_a_type_is_one_or_becomes_octets(kind: str):
    head = calls.part_head(KEY, Part("a.bin", kind, 1)).decode()

    expected = clean_mimetype(kind) or "application/octet-stream"
    assert head.split("\r\n")[2:] == [f"Content-Type: {expected}", "", ""]


@given(
    st.lists(
        st.tuples(st.text(), st.binary(max_size=50), st.text(max_size=20)), min_size=1, max_size=5
    )
)
async def test_the_announced_length_is_the_length(files: list[tuple[str, bytes, str]]):
    """One byte off, and the request hangs or its end is cut."""
    outgoing = [Outgoing.of(Bytes(*file)) for file in files]

    body = await whole(MultipartBody(KEY, outgoing).pieces())

    assert len(body) == length_of(outgoing)
    assert body.endswith(f"\r\n--{KEY}--\r\n".encode())


async def test_progress_counts_the_bytes_of_files():
    """A bar that counted headers would pass its end."""
    heard: list[int] = []
    outgoing = [Outgoing.of(Bytes(str(size), bytes(size))) for size in (3, 4)]

    await whole(MultipartBody(KEY, outgoing, heard.append).pieces())

    assert heard == [3, 7]


# The head of a download


def extent(status: int = 200, start: int = 0, **headers: str) -> Extent:
    """A header's name is written with _ for -."""
    said = {"Content_Length": "10", "Repr_Digest": DIGEST} | headers
    named = {name.replace("_", "-").lower(): value for name, value in said.items()}
    call = calls.content(WORKSPACE, FileId(uuid4()), start)
    return call.read(Reply(status, named))


def test_a_whole_file_says_its_size_and_hash():
    assert extent() == Extent(0, 10, SHA256)


def test_the_rest_of_a_file_says_where_it_begins():
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
    """Bytes written at the wrong place would only show in the hash, after all were fetched."""
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
    """What cannot be checked is not believed."""
    with pytest.raises(AnswerInvalid, match="SHA-256"):
        extent(Repr_Digest=digest)


def test_the_hash_is_found_among_others():
    assert extent(Repr_Digest=f"md5=:AAAA:, {DIGEST}").sha256 == SHA256
