"""Names, types, buckets, chunks, fingerprints and quotas of uploads."""

import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from restante.delivery.rules import (
    CHUNK_BYTES,
    MAX_REQUEST_BYTES,
    Chunk,
    IncomingFile,
    Pace,
    Quota,
    Usage,
    bucket_of,
    clean_mimetype,
    clean_name,
    display_name,
    fingerprint,
    quota_too_small,
    seconds_allowed,
    server_full,
    server_stored_full,
    time_allowed,
    workspace_full,
)
from restante.errors import ServerFull

CLEAN = re.compile(r"[A-Za-z0-9._-]{1,100}")
BARE = re.compile(r"[!-.0-~]+/[!-.0-~]+")
CLEAN_CHARACTERS = "abcXYZ019_-"

anything = st.text(st.characters(), max_size=300)  # lone surrogates too
namelike = st.text("ab/.\\ \0\r\n\"'é\u202e_-0", max_size=250)


@given(anything | namelike)
@example("")
@example(".")
@example("..")
@example("a/..")
@example("../" * 100)
@example("." * 101)
@example("\ud800")
def test_a_clean_name_is_safe_everywhere(name: str):
    clean = clean_name(name)

    assert CLEAN.fullmatch(clean)
    assert clean not in {".", ".."}


@given(anything | namelike)
def test_cleaning_twice_changes_nothing(name: str):
    """Both sides of the wire apply the rule, one after the other."""
    assert clean_name(clean_name(name)) == clean_name(name)


@given(st.text(CLEAN_CHARACTERS + ".", min_size=1, max_size=100).filter(lambda n: n.strip(".")))
def test_a_clean_name_stays_as_it_is(name: str):
    assert clean_name(name) == name


@given(namelike, namelike.filter(lambda name: "/" not in name))
def test_only_the_base_name_counts(directory: str, name: str):
    assert clean_name(f"{directory}/{name}") == clean_name(name)


@given(st.text(CLEAN_CHARACTERS, min_size=1, max_size=200), st.integers(0, 20))
def test_a_cut_name_keeps_a_short_extension(stem: str, letters: int):
    extension = "." + "e" * letters
    name = stem + extension

    clean = clean_name(name)

    if len(name) <= 100:
        assert clean == name
    elif len(extension) <= 16:
        assert len(clean) == 100
        assert clean.endswith(extension)
        assert name.startswith(clean.removesuffix(extension))
    else:
        assert clean == name[:100]


@given(st.text(st.characters(exclude_characters="/"), min_size=1, max_size=100))
def test_every_other_character_becomes_one_underscore(name: str):
    clean = clean_name(name)

    if clean != "file":
        assert len(clean) == len(name)
        for before, after in zip(name, clean, strict=True):
            assert after == (before if CLEAN.fullmatch(before) else "_")


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("a b.txt", "a_b.txt"),
        ("C:\\x\\y.txt", "C__x_y.txt"),
        ("x" * 96 + ".jpeg", "x" * 95 + ".jpeg"),
        ("x" * 84 + "." + "e" * 16, "x" * 84 + "." + "e" * 15),  # an extension of 17
        ("x" * 90 + "." + "e" * 15, "x" * 84 + "." + "e" * 15),  # of 16
        ("." + "e" * 120, "." + "e" * 99),
        ("a/", "file"),
    ],
)
def test_names_by_example(name: str, clean: str):
    assert clean_name(name) == clean


# Names for people

NOT_SHOWN = "\x00\x1f\x7f\x9f\u200b\u2028\u202e\u2066\ufeff\U000e0041"
names = st.text(max_size=400) | st.text(
    "ab./\\ \u0301\u200d\U0001f469\U0001f3fd" + NOT_SHOWN, max_size=600
)


@given(names)
@example("x" * 300 + "." + "e" * 15)
@example("a" + "\u0301" * 300)
def test_a_name_for_people_is_short_visible_and_final(raw: str):
    shown = display_name(raw)

    assert 1 <= len(shown) <= 255
    assert shown not in {".", ".."}
    assert not set(shown) & set("/\\" + NOT_SHOWN)
    assert shown == shown.strip()
    assert display_name(shown) == shown
    shown.encode()  # no surrogates


@given(st.text(st.characters(categories=["L", "N", "S", "P"]), min_size=1, max_size=255))
def test_what_people_write_stays(name: str):
    name = name.replace("/", "-").replace("\\", "-")
    assume(name not in {".", ".."})

    assert display_name(name) == name
    assert display_name(f"C:\\some\\folder\\{name}") == display_name(f"/some/{name}") == name


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("my report (final).pdf", "my report (final).pdf"),
        ("C:\\dir\\a.txt", "a.txt"),
        ("../../etc/passwd", "passwd"),
        ("  spaced out .txt \t", "spaced out .txt"),
        ("e\u0301te\u0301.txt", "e\u0301te\u0301.txt"),  # not normalised
        ("invoice\u202egnp.exe", "invoicegnp.exe"),
        ("\U0001f469\U0001f3fd\u200d\U0001f4bb.txt", "\U0001f469\U0001f3fd\u200d\U0001f4bb.txt"),
        ("\u05e9\u05dc\u05d5\u05dd\u200f (1).txt", "\u05e9\u05dc\u05d5\u05dd\u200f (1).txt"),
        ("hidden\U000e0073\U000e0065.txt", "hidden.txt"),
        ("a\r\nb\0c", "abc"),
        ("a/", "file"),
        ("..", "file"),
        ("\u202e", "_"),
        ("x" * 300 + ".jpeg", "x" * 250 + ".jpeg"),
        ("x" * 300 + "." + "e" * 16, "x" * 255),
        ("x" * 250 + "e\u0301" + "y" * 10 + ".txt", "x" * 250 + ".txt"),
        (
            "x" * 248 + "\U0001f469\u200d\U0001f4bb" + "y" * 9,
            "x" * 248 + "\U0001f469\u200d\U0001f4bb" + "y" * 4,
        ),
        ("x" * 253 + "\U0001f469\u200d\U0001f4bb" + "y" * 9, "x" * 253),
    ],
)
def test_names_for_people_by_example(raw: str, shown: str):
    assert display_name(raw) == shown


@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_a_body_has_the_time_of_its_size_if_it_keeps_the_pace(arrived: int, declared: int):
    pace = Pace(30, 1000)
    allowed = seconds_allowed(arrived, declared, pace)

    assert allowed <= time_allowed(declared, pace).total_seconds()
    assert allowed >= time_allowed(min(arrived, declared), pace).total_seconds()
    if declared <= MAX_REQUEST_BYTES:
        assert allowed == time_allowed(declared, pace).total_seconds()


@given(anything | st.text("ab/;! \t\0é", max_size=30))
def test_a_clean_type_is_empty_or_a_bare_type(given_type: str):
    clean = clean_mimetype(given_type)
    bare = given_type.partition(";")[0].strip()

    assert clean == "" or BARE.fullmatch(clean)
    assert (clean == "") == (bare == "")
    assert clean in {bare, "application/octet-stream"}
    assert clean_mimetype(clean) == clean


@given(st.from_regex(BARE, fullmatch=True).filter(lambda bare: ";" not in bare), anything)
def test_a_bare_type_stays_and_loses_its_parameters(bare: str, parameters: str):
    assert clean_mimetype(f"  {bare} ;{parameters}") == bare


moments = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))  # noqa: DTZ001


@given(moments, moments)
def test_bytes_are_stored_under_the_second_in_which_they_arrive(one: datetime, other: datetime):
    """So they fall into the bucket that covers it, whatever the width of buckets."""
    first, second = sorted((one, other))

    assert bucket_of(first) <= first < bucket_of(first) + timedelta(seconds=1)
    assert bucket_of(first) <= bucket_of(second)


# Chunks


@settings(max_examples=30)
@given(st.lists(st.integers(1, 3 * CHUNK_BYTES), max_size=4))
@example([CHUNK_BYTES])
@example([CHUNK_BYTES - 1, 2])
@example([2 * CHUNK_BYTES, 1])
def test_a_file_is_cut_into_full_chunks_and_a_last_one(sizes: list[int]):
    """In order, without a gap, and with the hash of the whole."""
    file, chunks = IncomingFile("a.bin", "a.bin", ""), list[Chunk]()
    pieces = [bytes([number]) * size for number, size in enumerate(sizes)]

    for piece in pieces:
        chunks += file.add(piece)
    chunks += file.end()

    content = b"".join(pieces)
    assert b"".join(chunk.bytes for chunk in chunks) == content
    assert all(len(chunk.bytes) == CHUNK_BYTES for chunk in chunks[:-1])
    assert all(0 < len(chunk.bytes) <= CHUNK_BYTES for chunk in chunks)
    assert [chunk.seq for chunk in chunks] == list(range(len(chunks)))
    assert {chunk.file_id for chunk in chunks} <= {file.file_id}
    assert file.sha256 == hashlib.sha256(content).digest()


# Fingerprints


def file_of(
    name: str = "a", mimetype: str = "", size: int = 1, sha256: bytes = bytes(32)
) -> IncomingFile:
    return IncomingFile(name, name, mimetype, size=size, sha256=sha256)


files = st.builds(
    file_of,
    st.text(CLEAN_CHARACTERS, min_size=1, max_size=5),
    st.sampled_from(["", "a/b"]),
    st.integers(1, 10**9),
    st.binary(min_size=32, max_size=32),
)


def facts(file: IncomingFile) -> tuple[str, str, int, bytes]:
    return file.name, file.mimetype, file.size, file.sha256


@given(st.lists(files, max_size=3), st.lists(files, max_size=3))
def test_a_fingerprint_distinguishes_other_files(
    some: list[IncomingFile], others: list[IncomingFile]
):
    """It does not depend on the file ids, which a repeated request gets anew."""
    are_equal = list(map(facts, some)) == list(map(facts, others))

    assert (fingerprint(some) == fingerprint(others)) == are_equal
    assert fingerprint([file_of(*facts(file)) for file in some]) == fingerprint(some)


# Pace


def test_a_larger_body_may_take_longer():
    pace = Pace(grace_seconds=30, min_bytes_per_second=1000)

    assert time_allowed(0, pace) == timedelta(seconds=30)
    assert time_allowed(5000, pace) == timedelta(seconds=35)


# Quotas

counts = st.integers(0, 50)
usages = st.builds(Usage, counts, counts)
quotas = st.builds(Quota, st.integers(1, 50), st.integers(1, 50))


@given(usages, usages, quotas)
def test_it_fits_if_neither_bytes_nor_files_exceed_the_quota(
    usage: Usage, extra: Usage, quota: Quota
):
    bytes_fit = usage.bytes + extra.bytes <= quota.max_bytes
    files_fit = usage.files + extra.files <= quota.max_files

    assert usage.fits(quota, extra) == (bytes_fit and files_fit)


def test_a_request_that_can_never_fit_is_refused_with_its_size_and_the_limit():
    refusal = quota_too_small(Quota(16, 4), bytes=17, files=1)

    assert refusal.facts == {"size": 17, "max": 16}


def test_a_refusal_says_how_much_is_used_and_when_there_is_room_again():
    usage, quota = Usage(15, 3), Quota(16, 4)
    noon = datetime(2026, 3, 1, 12, tzinfo=UTC)

    refusal = workspace_full(usage, quota, noon, now=noon - timedelta(seconds=90))

    assert refusal.facts == {
        "waiting_bytes": 15,
        "waiting_files": 3,
        "max_bytes": 16,
        "max_files": 4,
        "frees_at": "2026-03-01T12:00:00+00:00",
        "retry_after_seconds": 90,
    }


def test_a_refusal_does_not_promise_room_at_an_unknown_time():
    """Everything may be reserved by uploads in progress, and nothing has an expiry."""
    refusal = workspace_full(Usage(15, 3), Quota(16, 4), None, now=datetime.now(UTC))

    assert not {"frees_at", "retry_after_seconds"} & set(refusal.facts)


def test_a_client_never_retries_in_zero_seconds():
    """The first file has expired, and the sweep has not deleted it yet."""
    now = datetime(2026, 3, 1, tzinfo=UTC)

    refusal = workspace_full(Usage(15, 3), Quota(16, 4), now - timedelta(minutes=1), now=now)

    assert refusal.facts["retry_after_seconds"] == 1


@pytest.mark.parametrize("refuse", [server_full, server_stored_full])
def test_a_full_server_tells_nothing_about_its_workspaces(refuse: Callable[[], ServerFull]):
    refusal = refuse()

    assert refusal.facts == {"retry_after_seconds": 60}
    assert not any(character.isdigit() for character in str(refusal))
