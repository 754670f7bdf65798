"""Which migrations are due, and which releases may run."""

import pytest
from hypothesis import given, strategies as st

from restante.database.rules import (
    EMPTY,
    Migration,
    Phase,
    Record,
    SchemaState,
    check_compatible,
    due,
    level,
    parse,
)
from restante.errors import CodeTooOld, MigrationFailed


def migration(number: int, phase: str = "pre", text: str = "select 1;") -> Migration:
    return parse(f"{number:04}_{phase}_something.sql", text)


def recorded(*migrations: Migration, oldest_code: int = 0) -> SchemaState:
    records = {m.number: Record(m.number, m.name, m.checksum) for m in migrations}
    return SchemaState(records, oldest_code)


def test_directives_in_a_file_say_how_it_is_run():
    text = "-- transaction: none\n-- oldest code: 0007 reads the column\ncreate index ...;"

    parsed = migration(8, "post", text)

    assert (parsed.number, parsed.phase, parsed.name) == (8, Phase.POST, "something")
    assert not parsed.in_transaction
    assert parsed.oldest_code == 7


@pytest.mark.parametrize("name", ["1_pre_x.sql", "0001_x.sql", "0001_pre_X.sql", "0001_pre_x.txt"])
def test_a_file_with_another_name_is_refused(name: str):
    with pytest.raises(MigrationFailed, match="named like"):
        parse(name, "")


def test_an_empty_database_gets_everything():
    """No older release can be running on it, so nothing has to wait."""
    files = [migration(2, "post"), migration(1, "pre")]

    assert [m.number for m in due(files, EMPTY, {Phase.PRE})] == [1, 2]


def test_post_waits_until_it_is_asked_for():
    first, second, third = migration(1), migration(2, "post"), migration(3)
    state = recorded(first)

    assert due([first, second, third], state, {Phase.PRE}) == [third]
    assert due([first, second, third], state, frozenset(Phase)) == [second, third]


def test_newer_recorded_migrations_do_not_stop_compatible_code():
    """The previous release keeps working after a newer one has migrated the database."""
    ours = [migration(1)]
    newer = recorded(*ours, migration(2), oldest_code=1)

    check_compatible(ours, newer)

    assert due(ours, newer, frozenset(Phase)) == []


def test_code_below_the_oldest_served_level_stops_with_advice():
    ours = [migration(1)]

    with pytest.raises(
        CodeTooOld, match=r"level 2 and above.*at level 1.*Install the newer release"
    ):
        check_compatible(ours, recorded(*ours, migration(2, "post"), oldest_code=2))


def test_an_edited_file_is_noticed():
    with pytest.raises(MigrationFailed, match="never edited"):
        check_compatible([migration(1, text="select 2;")], recorded(migration(1)))


@given(
    st.sets(st.integers(1, 40)),
    st.sets(st.integers(1, 40)),
    st.sets(st.sampled_from(Phase), min_size=1),
)
def test_what_is_due_is_ordered_and_never_runs_twice(
    numbers: set[int], applied: set[int], phases: set[Phase]
):
    files = [migration(n, "pre" if n % 3 else "post") for n in numbers]

    todo = due(files, recorded(*(migration(n) for n in applied)), phases)

    assert [m.number for m in todo] == sorted({m.number for m in todo})
    assert not {m.number for m in todo} & applied
    assert level(files) == max(numbers, default=0)
