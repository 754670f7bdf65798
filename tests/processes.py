"""Real server processes, to be started, killed with -9 and started again; and other commands."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from restante.postgres import DataDirectory, placement, running_dsn

RESTANTE = Path(sys.executable).with_name("restante")
READY = "Restante is ready at "

# The contracts of the server: a killed one takes its Postgres along, a stopped one leaves.
POSTGRES_GONE_SECONDS = 5
STOPPED_SECONDS = 5


def clean_environment(**extra: str) -> dict[str, str]:
    """This environment without the settings and proxies a developer may have in it."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RESTANTE_") and not name.lower().endswith("_proxy")
    }
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
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def children(pid: int) -> dict[int, str]:
    """The processes that this one has started and that still run, with their programs."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return {}
    return {int(child): _program(int(child)) for child in pids if alive(int(child))}


def _program(pid: int) -> str:
    try:
        return Path(os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0])).name
    except (FileNotFoundError, ProcessLookupError):
        return ""


def working_in(directory: Path) -> list[int]:
    """Every process that was told of a directory or works below it, whoever started it."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _works_in(process, directory) and alive(int(process.name))
    ]


def _works_in(process: Path, directory: Path) -> bool:
    try:
        told = os.fsencode(directory) in (process / "cmdline").read_bytes()
        return told or (process / "cwd").readlink().is_relative_to(directory)
    except OSError:
        return False


class Outcome(NamedTuple):
    """How a command ended and what it said."""

    code: int
    stdout: str
    stderr: str


def restante(*words: str | Path, seconds: float = 60, **environment: str) -> Outcome:
    """Run a command to its end."""
    done = subprocess.run(
        [RESTANTE, *words],
        env=clean_environment(**environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


class Server:
    """One `restante serve` on a free port, or on the one that was chosen."""

    def __init__(self, data_dir: Path, *flags: str, **environment: str) -> None:
        self.data_dir = data_dir
        self.flags: Sequence[str] = flags
        self.environment = environment
        self.port = 0
        self.output: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self.address = ""
        self._reader: threading.Thread | None = None
        self._ready = threading.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self.process and self.process.poll() is None:
                self.stop()
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.wait()
            raise
        finally:
            self._remove_cluster()

    def _remove_cluster(self) -> None:
        """As root, Postgres cannot enter pytest's directories, and its own is not below them."""
        home = self.home
        if home and home != self.data_dir:
            shutil.rmtree(home)

    def start(self) -> Self:
        """Start and wait until it says that it is ready."""
        return self.begin().until_ready()

    def begin(self) -> Self:
        """Start, and come back at once."""
        self.output = []
        self.address = ""
        self._ready = threading.Event()
        where = ["--port", str(self.port), "--data-dir", str(self.data_dir)]
        self.process = subprocess.Popen(
            [RESTANTE, "serve", *where, *self.flags],
            env=clean_environment(**self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(
            target=self._read, args=(self.process, self._ready), daemon=True
        )
        self._reader.start()
        return self

    def until_ready(self, seconds: float = 60) -> Self:
        """Wait until it says that it is ready."""
        self._ready.wait(seconds)
        if not self.address:
            raise AssertionError("the server did not start:\n" + self.said)
        return self

    def _read(self, process: "subprocess.Popen[str]", ready: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.output.append(line)
                if line.startswith(READY):
                    self.address = line.removeprefix(READY).strip()
                    ready.set()
        ready.set()

    @property
    def said(self) -> str:
        """Everything on standard output and standard error since the last start."""
        return "".join(self.output)

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
    def home(self) -> Path | None:
        """The directory that holds the cluster, None before there is one."""
        if not self.data_dir.is_dir():
            return None
        return placement.existing_home(DataDirectory.open(self.data_dir))

    def processes(self) -> list[int]:
        """Every process that works for this server, its Postgres and its children included."""
        places = {self.data_dir, self.home or self.data_dir}
        return [pid for place in places for pid in working_in(place)]

    @property
    def admin_token(self) -> str:
        return (self.data_dir / "admin-token").read_text().strip()

    def postgres_pid(self) -> int:
        """The postmaster that runs under this server."""
        found = self._postgres()
        if found is None:
            raise AssertionError("the server has no Postgres")
        return found

    def _postgres(self) -> int | None:
        return next((pid for pid, name in children(self.pid).items() if name == "postgres"), None)

    def kill(self) -> None:
        """kill -9, and wait until the process and its Postgres are gone."""
        postgres = self._postgres()
        self.signal(signal.SIGKILL)
        self.wait()
        if postgres:
            wait_until(
                lambda: not alive(postgres),
                seconds=POSTGRES_GONE_SECONDS,
                what="the end of its Postgres",
            )

    def stop(self, seconds: float = 10) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 10) -> int:
        """The exit code, once the process has ended and all it said was read."""
        assert self.process is not None
        code = self.process.wait(seconds)
        if self._reader:
            self._reader.join(seconds)
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
