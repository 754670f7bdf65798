"""What `postmaster.pid` says, and whether it can be believed."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PidFile:
    """The lines of `postmaster.pid` that we use."""

    pid: int
    sockets: Path
    ready: bool


def read(cluster: Path) -> PidFile | None:
    """Read the file, None while it is missing or half written."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
        pid = int(lines[0])
    except (OSError, ValueError, IndexError):
        return None
    lines += [""] * (8 - len(lines))
    return PidFile(pid=pid, sockets=Path(lines[4]), ready=lines[7].strip() == "ready")


def stranger(cluster: Path) -> int | None:
    """
    Find a process that a stale file names but that does not serve this cluster.

    Process ids are used again, above all in restarted containers.
    """
    found = read(cluster)
    if found is None or not _proc(found.pid).exists() or _serves(found.pid, cluster):
        return None
    return found.pid


def _serves(pid: int, cluster: Path) -> bool:
    """Every process of Postgres works in its cluster; a zombie works nowhere."""
    try:
        return (_proc(pid) / "cwd").readlink() == cluster.resolve()
    except FileNotFoundError:
        return False
    except OSError:
        # In a container even root may not look at another account's process this closely.
        return _names(pid, cluster)


def _names(pid: int, cluster: Path) -> bool:
    try:
        return os.fsencode(cluster) in (_proc(pid) / "cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return False


def _proc(pid: int) -> Path:
    return Path(f"/proc/{pid}")
