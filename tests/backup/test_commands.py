"""`restante backup` and `restante restore` as commands: signals, refusals, standard streams."""

import asyncio
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from callers import waits_for_a_lock
from cluster import copy_cluster
from processes import RESTANTE, clean_environment, wait_until, working_in
from waiting import until

from restante.backup.archive import Writer
from restante.backup.rules import About
from restante.cli.main import app
from restante.errors import BackupFailed, BackupUnusable
from restante.postgres import DataDirectory, EmbeddedPostgres, cluster, placement

TAKEN_AT = datetime(2030, 1, 31, 11, 30, tzinfo=UTC)
ABOUT = About(
    format=1,
    restante="0.1.0",
    postgres=16,
    taken_at=TAKEN_AT,
    migrations=[],
    oldest_code=0,
    workspaces=0,
    files=0,
    file_bytes=0,
    roles=[],
    admin_token=None,
)
OWN_POSTGRES = "postgresql://somebody@db.example/restante"


def run(*words: str | Path) -> None:
    app([str(word) for word in words], result_action="return_value")


def started(*words: str | Path, **streams: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [RESTANTE, *words],
        env=clean_environment(),
        stdin=streams.get("stdin"),
        stdout=streams.get("stdout"),
        stderr=streams.get("stderr"),
    )


@pytest.mark.parametrize("words", [("backup", "f"), ("restore", "f")], ids=" ".join)
def test_for_a_postgres_of_ones_own_the_sentence_names_its_tools(words: tuple[str, ...]):
    with pytest.raises(BackupFailed, match=r"pg_(dump|restore) .*docs/operations\.md"):
        run(*words, "--database-url", OWN_POSTGRES)


def test_a_directory_without_a_database_is_not_backed_up(place: Path):
    """It must not be created for that."""
    with pytest.raises(BackupFailed, match="There is no database in"):
        run("backup", place / "backup.tar", "--data-dir", place / "typo")

    assert not (place / "backup.tar").exists()
    assert not (place / "typo" / "postgres").exists()


@pytest.mark.parametrize("words", [("restore",), ("restore", "--check")], ids=" ".join)
def test_what_is_not_a_backup_is_a_sentence(place: Path, words: tuple[str, ...]):
    (place / "notes.txt").write_text("not a backup\n" * 100)

    with pytest.raises(BackupUnusable, match="not a backup of Restante"):
        run(*words, place / "notes.txt", "--data-dir", place / "data")
    with pytest.raises(BackupFailed, match="cannot be read: No such file"):
        run(*words, place / "missing.tar", "--data-dir", place / "data")


def test_a_mistyped_flag_is_not_a_file(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        app(["backup", "--overwite"])

    shown = capsys.readouterr()
    assert "--overwite is not a flag" in " ".join((shown.out + shown.err).split())


def test_a_backup_goes_through_a_pipe_and_is_restored_once(place: Path):
    """The whole way of the commands, with a Postgres that they start themselves."""
    copy_cluster(place / "data")
    (place / "data" / "admin-token").write_text("the-token-of-this-server\n")
    with started("backup", "-", "--data-dir", place / "data", stdout=subprocess.PIPE) as backup:
        restored = subprocess.run(
            [RESTANTE, "restore", "-", "--data-dir", place / "restored"],
            env=clean_environment(),
            stdin=backup.stdout,
            capture_output=True,
            text=True,
            check=False,
        )

    assert (backup.returncode, restored.returncode, restored.stderr) == (0, 0, "")
    lines = restored.stdout.splitlines()
    assert lines[0].startswith("Restored 0 workspaces and 0 files (0 B) in ")
    assert lines[-1] == f"Start it: restante serve --data-dir {place}/restored"
    token = place / "restored" / "admin-token"
    assert token.read_text() == "the-token-of-this-server\n"
    assert token.stat().st_mode & 0o777 == 0o600
    with pytest.raises(BackupFailed, match="has a database already"):
        run("restore", "/dev/null", "--data-dir", place / "restored")


@asynccontextmanager
async def locked_table(directory: DataDirectory) -> AsyncIterator[Any]:
    """A running database in which a backup has to wait; yields a connection to watch it."""
    with directory.claim():
        postgres = EmbeddedPostgres(directory)
        try:
            await postgres.start()
            holder, watcher = [await asyncpg.connect(postgres.dsn) for _ in range(2)]
            await holder.execute("begin; lock table restante.feeds in access exclusive mode")
            yield watcher
            holder.terminate()
            watcher.terminate()
        finally:
            await postgres.stop()


@pytest.mark.anyio
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda each: each.name)
async def test_an_interrupted_backup_leaves_nothing(place: Path, number: signal.Signals):
    copy_cluster(place / "data")
    target = place / "backups"
    target.mkdir()
    async with locked_table(DataDirectory.open(place / "data")) as watcher:
        words = ("backup", target / "b.tar", "--data-dir", place / "data")
        with started(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as backup:
            await until(lambda: waits_for_a_lock(watcher))
            unfinished = list(target.iterdir())
            backup.send_signal(number)
            output, errors = await asyncio.to_thread(backup.communicate)

    assert [path.suffix for path in unfinished] == [".partial"]
    assert (backup.returncode, output) == (130, b"")
    assert b"Traceback" not in errors
    assert list(target.iterdir()) == []


def test_a_killed_restore_leaves_no_database(place: Path):
    """The next start begins with an empty one, as if there had been no restore."""
    directory = DataDirectory.open(place / "restored")

    words = ("restore", "-", "--data-dir", directory.path)
    with started(*words, stdin=subprocess.PIPE) as killed:
        assert killed.stdin is not None
        Writer(killed.stdin.write, taken_at=TAKEN_AT).about(ABOUT)  # the rest never comes
        killed.stdin.flush()
        wait_until(
            lambda: list(directory.path.glob("postgres.new.*/postgres/postmaster.pid")),
            seconds=60,
            what="the start of the new cluster",
        )
        killed.kill()
    wait_until(lambda: not working_in(directory.path), seconds=60, what="the end of its Postgres")

    assert placement.existing_home(directory) is None
    assert any(directory.path.glob("postgres.new.*"))
    cluster.remove_drafts(directory.path)  # as every start does
    assert [path.name for path in directory.path.iterdir()] == ["lock"]
