"""Reads `postmaster.pid` and detects a stale one."""

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
    """Read the file; None if it is missing or incomplete."""
    try:
        lines = (cluster / "postmaster.pid").read_text().splitlines()
        pid = int(lines[0])
    except (OSError, ValueError, IndexError):
        return None
    lines += [""] * (8 - len(lines))
    return PidFile(pid=pid, sockets=Path(lines[4]), ready=lines[7].strip() == "ready")


def unrelated_pid(cluster: Path) -> int | None:
    """
    The pid in a stale file, if it now belongs to a process that does not serve this cluster.

    Pids are reused, above all in restarted containers.
    """
    found = read(cluster)
    if found is None or not _proc(found.pid).exists() or _serves(found.pid, cluster):
        return None
    return found.pid


def _serves(pid: int, cluster: Path) -> bool:
    """The working directory of every Postgres process is its cluster; a zombie has none."""
    try:
        return (_proc(pid) / "cwd").readlink() == cluster.resolve()
    except FileNotFoundError:
        return False
    except OSError:
        # In a container even root may not read this of another account's process.
        return _has_in_command_line(pid, cluster)


def _has_in_command_line(pid: int, cluster: Path) -> bool:
    try:
        return os.fsencode(cluster) in (_proc(pid) / "cmdline").read_bytes().split(b"\0")
    except FileNotFoundError:
        return False


def _proc(pid: int) -> Path:
    return Path(f"/proc/{pid}")
