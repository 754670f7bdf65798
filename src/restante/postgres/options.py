"""The server options of the embedded Postgres that differ from its defaults."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from restante.postgres.output import LOG_LINE_PREFIX
from restante.postgres.sockets import PORT

MIB = 1024 * 1024
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

DEFAULTS = {
    "cluster_name": "restante",
    "max_connections": "100",
    "wal_compression": "off",
    "timezone": "UTC",
    # Details and statements may contain file contents, which must not be logged.
    "log_error_verbosity": "terse",
    "log_min_error_statement": "panic",
    "log_line_prefix": LOG_LINE_PREFIX,
}


def arguments(cluster: Path, sockets: Path, chosen: Mapping[str, str]) -> Iterator[str]:
    """The command line: our defaults, overridden by `chosen`, except for the fixed options."""
    fixed = {
        "port": str(PORT),
        "listen_addresses": "",
        "unix_socket_directories": _quoted(sockets),
        "unix_socket_permissions": "0700",
        "hba_file": str(cluster.parent / "postgres.hba"),
        "ident_file": str(cluster.parent / "postgres.ident"),
    }
    yield from ("-D", str(cluster))
    sizes = _shared_buffers() | _wal_size(cluster)
    for name, value in (DEFAULTS | sizes | dict(chosen) | fixed).items():
        yield from ("-c", f"{name}={value}")


def _quoted(sockets: Path) -> str:
    return '"{}"'.format(str(sockets).replace('"', '""'))


def _shared_buffers() -> dict[str, str]:
    mebibytes = max(16, min(256, _memory() // MIB // 8))
    return {"shared_buffers": f"{mebibytes}MB"}


def _wal_size(cluster: Path) -> dict[str, str]:
    """On a small disk, WAL that waits for a checkpoint must not take the place of files."""
    disk = os.statvfs(cluster)
    mebibytes = disk.f_blocks * disk.f_frsize // MIB // 16
    return {"max_wal_size": f"{max(64, min(2048, mebibytes))}MB"}


def _memory() -> int:
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(installed, int(CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return installed
