"""The marks of a feed, and what tells messages apart."""

from uuid import UUID, uuid4

from hypothesis import given, strategies as st

from restante.feed.message_rules import digest_of
from restante.feed.rules import Marks


@given(kept=st.sets(st.integers(1, 12)), seq=st.integers(0, 15))
def test_a_cursor_is_valid_exactly_where_every_row_after_it_is_kept(kept: set[int], seq: int):
    """Rows are trimmed from the beginning, and appended at the end."""
    lowest, latest = (min(kept), max(kept)) if kept else (1, 0)
    marks = Marks(last_seq=latest, trimmed_seq=lowest - 1, acked_seq=0)

    valid = marks.all_kept_after(seq)

    assert marks.lowest_seq == lowest
    assert valid == (seq + 1 in {*range(lowest, latest + 1), latest + 1})


def test_a_digest_tells_senders_methods_and_ids_apart():
    one, other = uuid4(), uuid4()
    given: list[tuple[UUID | None, str, str]] = [
        (None, "a", "b"),
        (one, "a", "b"),
        (other, "a", "b"),
        (one, "a", "c"),
        (one, "b", "b"),
        (one, "a", "\nb"),
        (one, "a", "b" * 1_000_000),
    ]

    assert len({digest_of(*each) for each in given}) == len(given)
    assert digest_of(*given[1]) == digest_of(*given[1])
