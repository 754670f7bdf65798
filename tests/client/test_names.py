"""Names for the local disk: safe on every filesystem, and as close to the sender's as possible."""

import unicodedata

import pytest
from file_names import NAMES, Name
from hypothesis import given, strategies as st

from restante.client.names import free_name, local_name
from restante.delivery.rules import clean_name, display_name

ALARMING = (
    "./\\-~ \t\n\0:<>|?*\"'AUXaux1\xb9\u0301\u200d\u200e\u202e\ufeff\U0001f468\ud800\xdf\u0130"
)
hostile = st.text(st.one_of(st.characters(), st.sampled_from(ALARMING)), max_size=400)


def test_the_table_is_large():
    assert len({name.sent for name in NAMES}) == len(NAMES) >= 60


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name.sent)[:40])
def test_a_name_has_three_forms(name: Name):
    assert clean_name(name.sent) == name.wire
    assert display_name(name.sent) == name.shown
    assert local_name(name.shown) == name.local


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name.sent)[:40])
def test_a_name_that_the_server_did_not_clean_is_as_safe(name: Name):
    """The path is cut off as on POSIX; everything else is as for a clean name."""
    assert_safe(local_name(name.sent))


@given(hostile)
def test_no_name_is_dangerous(name: str):
    assert_safe(local_name(name))


def assert_safe(local: str) -> None:
    assert local.rstrip(". ") == local != ""
    assert local[0] not in ".- "
    assert len(local.encode()) <= 255
    assert not set(local) & set('/\\<>:"|?*')
    kinds = {
        unicodedata.category(character) for character in local if character not in "\u200c\u200d"
    }
    assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert unicodedata.is_normalized("NFC", local)
    assert local.partition(".")[0].strip().lower() not in {"con", "prn", "aux", "nul", "com1"}


@given(hostile)
def test_a_local_name_stays_as_it_is(name: str):
    """A file that is sent on keeps its name."""
    local = local_name(name)

    assert local_name(local) == local


def test_a_very_long_name_is_cut_before_it_is_normalised():
    """Sorting a million combining characters would take minutes."""
    local = local_name("a" + "\u0301\u0316" * 500_000 + ".txt")

    assert local.endswith(".txt")
    assert len(local.encode()) <= 255


def test_a_filesystem_with_shorter_names():
    """Encrypted home directories take 143 bytes."""
    assert local_name("x" * 200 + ".pdf", 143) == "x" * 139 + ".pdf"
    assert free_name("x" * 139 + ".pdf", ["x" * 139 + ".pdf"], 143) == "x" * 135 + " (2).pdf"


# Collisions


@pytest.mark.parametrize(
    ("name", "taken", "free"),
    [
        ("a.txt", [], "a.txt"),
        ("a.txt", ["b.txt"], "a.txt"),
        ("a.txt", ["a.txt"], "a (2).txt"),
        ("a.txt", ["a.txt", "a (2).txt"], "a (3).txt"),
        ("a.txt", ["a.txt", "a (3).txt"], "a (2).txt"),
        ("a.txt", ["A.TXT", "A (2).txt"], "a (3).txt"),
        ("a.tar.gz", ["a.tar.gz"], "a.tar (2).gz"),
        ("README", ["readme"], "README (2)"),
        ("v1.2 of the plan", ["v1.2 of the plan"], "v1.2 of the plan (2)"),
        ("ma\xf1ana", ["man\u0303ana"], "ma\xf1ana (2)"),
        ("stra\xdfe", ["STRASSE"], "stra\xdfe (2)"),
        ("\u0130.txt", ["i\u0307.txt"], "\u0130 (2).txt"),
        ("x" * 251 + ".txt", ["x" * 251 + ".txt"], "x" * 247 + " (2).txt"),
        ("\xe9" * 127, ["\xe9" * 127], "\xe9" * 125 + " (2)"),
    ],
)
def test_a_name_that_exists_gets_a_number(name: str, taken: list[str], free: str):
    assert free_name(name, taken) == free


@given(hostile, st.integers(1, 20))
def test_many_files_of_one_name_get_different_names(name: str, count: int):
    wanted, taken = local_name(name), list[str]()
    for _ in range(count):
        free = free_name(wanted, taken)
        assert free is not None
        assert_safe(free)
        taken.append(free)

    assert len({one.casefold() for one in taken}) == count


def test_the_search_for_a_name_ends():
    """Nobody can make us try a million names."""
    taken = ["a", *(f"a ({number})" for number in range(2, 2000))]

    assert free_name("a", taken) is None
