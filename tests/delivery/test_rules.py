"""Names, types, buckets and fingerprints of uploads."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from restante.delivery.rules import (
    NewUpload,
    Swept,
    bucket_of,
    clean_mimetype,
    clean_name,
    fingerprint,
    time_allowed,
)
from restante.ids import new_file_id

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
def test_bytes_are_kept_under_the_second_they_came_in(one: datetime, other: datetime):
    """So they fall into the bucket of their time, whatever its width."""
    first, second = sorted((one, other))

    assert bucket_of(first) <= first < bucket_of(first) + timedelta(seconds=1)
    assert bucket_of(first) <= bucket_of(second)


def upload(
    name: str = "a", mimetype: str = "", size: int = 1, sha256: bytes = bytes(32)
) -> NewUpload:
    return NewUpload(new_file_id(), name, mimetype, size, sha256)


files = st.builds(
    upload,
    st.text(CLEAN_CHARACTERS, min_size=1, max_size=5),
    st.sampled_from(["", "a/b"]),
    st.integers(1, 10**9),
    st.binary(min_size=32, max_size=32),
)


def same(one: NewUpload, other: NewUpload) -> bool:
    return (one.name, one.mimetype, one.size, one.sha256) == (
        other.name,
        other.mimetype,
        other.size,
        other.sha256,
    )


@given(st.lists(files, max_size=3), st.lists(files, max_size=3))
def test_a_fingerprint_tells_other_files_apart(some: list[NewUpload], others: list[NewUpload]):
    alike = len(some) == len(others) and all(map(same, some, others))

    assert (fingerprint(some) == fingerprint(others)) == alike
    assert fingerprint([upload(*facts(file)) for file in some]) == fingerprint(some)


def facts(file: NewUpload) -> tuple[str, str, int, bytes]:
    return file.name, file.mimetype, file.size, file.sha256


def test_a_larger_body_may_take_longer():
    def seconds(size: int) -> float:
        allowed = time_allowed(size, grace_seconds=30, min_bytes_per_second=1000)
        return allowed.total_seconds()

    assert (seconds(0), seconds(5000)) == (30, 35)


def test_what_sweeps_removed_adds_up():
    swept = Swept(acked=1, expired=2) + Swept(acked=3)

    assert (swept, swept.total) == (Swept(4, 2), 6)
