"""Real server processes, to be started, killed with -9 and started again."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from restante.postgres import DataDirectory, running_dsn

RESTANTE = Path(sys.executable).with_name("restante")
READY = "Restante is ready at "


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without the settings a developer may have in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RESTANTE_")}
    return kept | extra


def wait_until(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """Look again and again until it holds; a process outside of ours has no signal to wait for."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not happen within {seconds} s")
        threading.Event().wait(0.02)
    return result


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Server:
    """One `restante serve` on a free port."""

    def __init__(self, data_dir: Path, *flags: str, **environment: str) -> None:
        self.data_dir = data_dir
        self.flags = flags
        self.environment = environment
        self.output: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.address = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.poll() is None:
            self.stop()

    def start(self) -> Self:
        """Start and wait until it says that it is ready."""
        self.output = []
        self.process = subprocess.Popen(
            [RESTANTE, "serve", "--port", "0", "--data-dir", str(self.data_dir), *self.flags],
            env=clean_environment(**self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        ready = threading.Event()
        threading.Thread(target=self._read, args=(self.process, ready), daemon=True).start()
        ready.wait(60)
        if not self.address or self.process.poll() is not None:
            raise AssertionError("the server did not start:\n" + "".join(self.output))
        return self

    def _read(self, process: "subprocess.Popen[str]", ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.output.append(line)
            if line.startswith(READY):
                self.address = line.removeprefix(READY).strip()
                ready.set()
        ready.set()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def dsn(self) -> str:
        found = running_dsn(DataDirectory.open(self.data_dir))
        assert found is not None
        return found

    @property
    def admin_token(self) -> str:
        return (self.data_dir / "admin-token").read_text().strip()

    def postgres_pid(self) -> int:
        """The postmaster that runs under this server."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in children:
            if b"postgres" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
                return int(child)
        raise AssertionError("the server has no Postgres")

    def kill(self) -> None:
        """kill -9, and wait until the process and its Postgres are gone."""
        postgres = self.postgres_pid()
        os.kill(self.pid, signal.SIGKILL)
        self.wait()
        wait_until(lambda: not alive(postgres), seconds=5, what="the end of its Postgres")

    def stop(self, seconds: float = 10) -> int:
        """SIGTERM, and the exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float = 10) -> int:
        assert self.process is not None
        code = self.process.wait(seconds)
        return code

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body; a refused connection is status 0."""
        try:
            with urlopen(
                Request(self.address + path, headers=dict(headers or {})), timeout=10
            ) as answer:
                return answer.status, answer.read()
        except HTTPError as error:
            with error:
                return error.code, error.read()
        except OSError:
            return 0, b""
