"""The file of a backup: what is damaged, missing or cut off is noticed, wherever it is."""

import errno
import io
import tarfile
from datetime import UTC, datetime

import pytest
from hypothesis import given, strategies as st

from restante.backup import archive, restore
from restante.backup.archive import Reader, Writer
from restante.backup.rules import About
from restante.errors import BackupUnusable

TAKEN_AT = datetime(2030, 1, 31, 11, 30, tzinfo=UTC)
ABOUT = About(
    format=1,
    restante="0.1.0",
    postgres=18,
    taken_at=TAKEN_AT,
    migrations=[],
    oldest_code=0,
    workspaces=1,
    files=2,
    file_bytes=30,
    roles=[],
    admin_token="the-token-of-the-tests",
)


def written(*, database: bytes = b"dump", files: bytes = b"bytes", pieces: int = 3) -> bytes:
    """A whole backup; each part is in so many pieces."""
    file = io.BytesIO()
    writer = Writer(file.write, taken_at=TAKEN_AT)
    writer.about(ABOUT)
    for name, content in ((archive.DATABASE, database), (archive.FILES, files)):
        for _ in range(pieces):
            part = writer.part(name)
            part.write(content)
            part.close()
    writer.end()
    return file.getvalue()


WHOLE = written()


def test_what_was_written_is_read():
    reader = Reader(io.BytesIO(WHOLE))

    assert reader.about() == ABOUT
    assert b"".join(reader.part(archive.DATABASE)) == b"dump" * 3
    assert b"".join(reader.part(archive.FILES)) == b"bytes" * 3
    reader.end()


def test_a_part_is_cut_into_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(archive, "PIECE_BYTES", 10)
    reader = Reader(io.BytesIO(written(database=b"0123456789abcdefghijk", pieces=1)))

    reader.about()

    assert list(reader.part(archive.DATABASE)) == [b"0123456789", b"abcdefghij", b"k"]


def test_tar_can_read_it():
    """Whoever has lost Restante still has the dump."""
    with tarfile.open(fileobj=io.BytesIO(WHOLE)) as tar:
        members = [(one.name.partition("/")[0], one.mode, one.size) for one in tar]

    assert [part for part, _, _ in members] == ["about", *["database"] * 3, *["files"] * 3, "end"]
    assert {mode for _, mode, _ in members} == {0o600}


@given(st.integers(0, len(WHOLE) - 1 - 2 * 512))
def test_a_file_that_ends_early_is_refused(size: int):
    with pytest.raises(BackupUnusable):
        restore.check(Reader(io.BytesIO(WHOLE[:size])))


@given(st.integers(0, len(WHOLE) - 1 - 2 * 512), st.integers(1, 255))
def test_a_changed_byte_is_noticed_or_means_nothing(place: int, change: int):
    """The padding of tar and the fields of its header that nobody reads may change."""
    changed = bytearray(WHOLE)
    changed[place] ^= change
    reader = Reader(io.BytesIO(bytes(changed)))

    try:
        read = [reader.about(), *reader.part(archive.DATABASE), *reader.part(archive.FILES)]
        reader.end()
    except BackupUnusable:
        return
    assert read == [ABOUT, *[b"dump"] * 3, *[b"bytes"] * 3]


@pytest.mark.parametrize("lost", range(1, 7))
def test_a_missing_piece_is_noticed(lost: int):
    with tarfile.open(fileobj=io.BytesIO(WHOLE)) as tar:
        members = [(one, tar.extractfile(one)) for one in tar]
        kept = io.BytesIO()
        with tarfile.open(fileobj=kept, mode="w", format=tarfile.USTAR_FORMAT) as copy:
            for number, (member, content) in enumerate(members):
                if number != lost:
                    copy.addfile(member, content)

    with pytest.raises(BackupUnusable, match="is damaged"):
        restore.check(Reader(io.BytesIO(kept.getvalue())))


@pytest.mark.parametrize(
    "content", [b"", b"hello\n" * 1000, bytes(4096), b"PGDMP" * 1000], ids=lambda c: repr(c[:5])
)
def test_another_file_is_not_a_backup(content: bytes):
    with pytest.raises(BackupUnusable, match="This is not a backup of Restante"):
        Reader(io.BytesIO(content)).about()


def test_another_tar_is_not_a_backup():
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("notes.txt"))

    with pytest.raises(BackupUnusable, match="This is not a backup of Restante"):
        Reader(io.BytesIO(file.getvalue())).about()


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"{}", b'{"members":"x"}'], ids=len)
@pytest.mark.parametrize("part", [archive.ABOUT, archive.END])
def test_a_member_that_is_well_formed_and_nonsense_is_refused(part: str, content: bytes):
    file = io.BytesIO()
    writer = Writer(file.write, taken_at=TAKEN_AT)
    if part == archive.END:
        writer.about(ABOUT)
    pieces = writer.part(part)
    pieces.write(content or b" ")
    pieces.close()

    with pytest.raises(BackupUnusable):
        restore.check(Reader(io.BytesIO(file.getvalue())))


class Unreadable(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_a_disk_that_fails_is_a_sentence():
    with pytest.raises(BackupUnusable, match="cannot be read: Input/output error"):
        Reader(Unreadable()).about()
