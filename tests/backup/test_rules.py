"""Which backups this release restores."""

import msgspec
import pytest

from restante.backup import rules
from restante.backup.rules import About
from restante.database import migrate
from restante.database.rules import Record
from restante.errors import BackupUnusable, MigrationFailed

SHIPPED = migrate.shipped()


def about(**changes: object) -> About:
    given = {
        "format": 1,
        "restante": "9.9.9",
        "postgres": 18,
        "taken_at": "2030-01-31T11:30:00Z",
        "migrations": [
            {"number": m.number, "name": m.name, "checksum": m.checksum} for m in SHIPPED
        ],
        "oldest_code": 0,
        "workspaces": 0,
        "files": 0,
        "file_bytes": 0,
        "roles": [],
        "admin_token": None,
    }
    return rules.about(msgspec.json.encode(given | changes))


@pytest.mark.parametrize("postgres", [18, 19, 20])
def test_a_backup_is_restored_into_the_same_or_a_newer_postgres(postgres: int):
    rules.check_restorable(about(), SHIPPED, postgres=postgres)


def test_a_backup_is_not_restored_into_an_older_postgres():
    with pytest.raises(BackupUnusable, match="Install Postgres 18 or newer"):
        rules.check_restorable(about(), SHIPPED, postgres=16)


def test_a_backup_from_before_the_last_migration_is_restored():
    """The server migrates it at its first start."""
    older = about(migrations=[])

    rules.check_restorable(older, SHIPPED, postgres=18)


def test_a_backup_of_a_newer_release_is_restored_if_this_one_could_still_run_on_it():
    newer = [*about().migrations, Record(9000, "more", "a-checksum")]

    rules.check_restorable(about(migrations=newer), SHIPPED, postgres=18)


def test_a_backup_that_needs_a_newer_release_is_refused():
    with pytest.raises(BackupUnusable, match=r"made by Restante 9\.9\.9, and this release is too"):
        rules.check_restorable(about(oldest_code=9000), SHIPPED, postgres=18)


def test_a_backup_with_another_history_is_refused():
    other = [Record(1, "delivery", "another-checksum")]

    with pytest.raises(MigrationFailed):
        rules.check_restorable(about(migrations=other), SHIPPED, postgres=18)


def test_a_newer_format_is_refused_by_the_name_of_its_release():
    with pytest.raises(BackupUnusable, match=r"Restante 9\.9\.9, in a format .* does not know"):
        about(format=2)


@pytest.mark.parametrize("changes", [{"files": "many"}, {"format": "one"}, {"taken_at": None}])
def test_what_cannot_be_read_is_refused(changes: dict[str, object]):
    with pytest.raises(BackupUnusable, match="not readable"):
        about(**changes)
