"""The ballast: it takes room while there is some, and gives it up in pieces."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from disks import MIB, OtherProgram, free_bytes, small_disk

from restante.postgres.ballast import LARGEST_PART, PIECES, Ballast

SIZE = 64 * MIB


@pytest.fixture
def disk(place: Path) -> Iterator[Path]:
    with small_disk(place, 64) as disk:
        yield disk


def filled(home: Path, size: int = SIZE) -> Ballast:
    ballast = Ballast(home, size)
    while not ballast.is_complete():
        ballast.refill()
    return ballast


def pieces(home: Path) -> list[Path]:
    return sorted(home.glob("ballast*"))


def test_it_takes_room_of_the_disk_and_never_a_large_part(disk: Path):
    before = free_bytes(disk)

    ballast = filled(disk)

    assert ballast.in_place() == before - free_bytes(disk) == 64 * MIB // LARGEST_PART
    assert len(pieces(disk)) == PIECES
    assert all(piece.stat().st_mode & 0o077 == 0 for piece in pieces(disk))


def test_a_small_ballast_is_as_small_as_it_was_chosen(place: Path):
    assert filled(place, 40_000).in_place() == 40_000


def test_another_size_applies_to_pieces_that_exist(place: Path):
    filled(place, 40_000)

    assert filled(place, 80_000).in_place() == 80_000
    assert filled(place, 0).in_place() == 0
    assert pieces(place) == []


def test_each_release_gives_one_piece(disk: Path):
    """Another program that takes what is free gets no more than that."""
    ballast, other = filled(disk), OtherProgram(disk)
    other.take_all()

    given: list[int] = []
    while ballast.release():
        given.append(free_bytes(disk))
        other.take_all()

    assert given == [MIB] * PIECES
    assert pieces(disk) == []


def test_room_is_made_only_as_far_as_it_is_needed(disk: Path):
    ballast = filled(disk)
    OtherProgram(disk).take_all()

    assert ballast.make_room(MIB // 2)
    assert ballast.make_room(MIB)
    assert len(pieces(disk)) == PIECES - 1
    assert ballast.make_room(2 * MIB)
    assert len(pieces(disk)) == PIECES - 2
    assert not ballast.make_room(64 * MIB)
    assert pieces(disk) == []


def test_the_last_piece_can_be_kept(disk: Path):
    ballast = filled(disk)
    OtherProgram(disk).take_all()

    assert not ballast.make_room(64 * MIB, keep_last=True)
    assert len(pieces(disk)) == 1
    assert ballast.make_room(PIECES * MIB)
    assert pieces(disk) == []


def test_a_piece_for_which_there_is_no_room_leaves_nothing(disk: Path):
    ballast = Ballast(disk, SIZE)
    OtherProgram(disk).take_all()

    with pytest.raises(OSError, match="No space left"):
        ballast.refill()

    assert pieces(disk) == []


def test_an_unfinished_piece_is_completed(place: Path):
    """As after a crash between the creation of a piece and its allocation."""
    (place / "ballast.0").touch()

    assert filled(place, 40_000).in_place() == 40_000
