"""Text of somebody else: the server and the client treat it alike."""

import pytest

from restante.client.names import local_name
from restante.delivery.rules import display_name
from restante.text import cut, without_invisible


@pytest.mark.parametrize("character", ["\u0600", "\u06dd", "\u200d", "\U00013430"])
def test_what_belongs_to_a_script_stays_in_both_names(character: str):
    name = f"a{character}b.txt"

    assert display_name(name) == local_name(name) == name


@pytest.mark.parametrize("character", ["\u202e", "\u2066", "\xad", "\ufeff", "\U000e0041"])
def test_what_is_invisible_is_in_neither_name(character: str):
    name = f"a{character}b.txt"

    assert display_name(name) == local_name(name) == "ab.txt"
    assert without_invisible(name) == "ab.txt"


@pytest.mark.parametrize(
    ("text", "at", "kept"),
    [
        ("abc", 5, "abc"),
        ("abc", 2, "ab"),
        ("abe\u0301", 3, "ab"),  # an accent
        ("ab\u0645\u200c\u0646", 3, "ab"),  # the joiner belongs to its letter
        ("a\U0001f44d\U0001f3fd", 2, "a"),  # a skin tone
        ("a\U0001f468\u200d\U0001f469", 3, "a"),  # a family
        ("e\u0301", 1, "e"),  # nothing else would be left
        ("e" + "\u0301" * 99, 80, "e" + "\u0301" * 79),  # no letter has so many
    ],
)
def test_a_text_is_cut_between_letters(text: str, at: int, kept: str):
    assert cut(text, at) == kept
