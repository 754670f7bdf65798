"""Runs `restante serve` and other commands as real processes."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import UUID, uuid4

import warm
from cluster import copy_cluster
from warm import NO_CERTIFICATES, RESTANTE

from restante.postgres import DataDirectory, placement, running_dsn

READY = "Restante is ready at "

# How long a test waits for a process to end. A busy machine may be slow, so this is generous.
STOPPED_SECONDS = 60


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without the developer's own settings and proxies."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RESTANTE_") and not name.lower().endswith("_proxy")
    }
    return kept | NO_CERTIFICATES | extra


def wait_until(condition: Callable[[], Any], *, seconds: float, what: str) -> Any:
    """Poll until the condition holds; another process gives us no event to wait for."""
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
    """The running children of a process, with their program names."""
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
    """Every process with the directory in its command line or its working directory below it."""
    return [
        int(process.name)
        for process in Path("/proc").glob("[0-9]*")
        if _works_in(process, directory) and alive(int(process.name))
    ]


def _works_in(process: Path, directory: Path) -> bool:
    try:
        named = os.fsencode(directory) in (process / "cmdline").read_bytes()
        return named or (process / "cwd").readlink().is_relative_to(directory)
    except OSError:
        return False


class Outcome(NamedTuple):
    """The exit code and the output of a command."""

    code: int
    stdout: str
    stderr: str


def restante(*words: str | Path, seconds: float = 60, **environment: str) -> Outcome:
    """Run a command and wait for it."""
    done = warm.run(words, env=clean_environment(**environment), text=True, timeout=seconds)
    return Outcome(done.returncode, done.stdout, done.stderr)


def on_a_terminal(*words: str | Path | UUID, **environment: str) -> str:
    """Run a command on a pseudo-terminal; its output, once it has ended with 0."""
    ours, terminal = pty.openpty()
    with subprocess.Popen(
        [RESTANTE, *map(str, words)],
        env=clean_environment(**{"TERM": "xterm-256color"} | environment),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    ) as process:
        os.close(terminal)
        with os.fdopen(ours, "rb", buffering=0) as screen:
            received = b"".join(iter(lambda: _read(screen), b""))
        assert process.wait(30) == 0, received
    return received.decode()


def _read(screen: FileIO) -> bytes:
    try:
        return screen.read(4096)
    except OSError:  # Linux's end-of-file of a pseudo-terminal
        return b""


class Server:
    """One `restante serve`, on a free port unless `port` is set."""

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
        """As root, the cluster may be outside of the data directory."""
        home = self.home
        if home and home != self.data_dir:
            shutil.rmtree(home)

    def started_once(self) -> Self:
        """Give it what its first start creates; the next start is like any later one."""
        copy_cluster(self.data_dir)
        return self

    def start(self) -> Self:
        """Start it and wait until it is ready."""
        return self.begin().until_ready()

    def begin(self) -> Self:
        """Start it without waiting."""
        self.output = []
        self.address = ""
        self._ready = threading.Event()
        where = ["--port", str(self.port), "--data-dir", str(self.data_dir)]
        self.process = warm.start(
            ["serve", *where, *self.flags],
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
        """Wait until it is ready."""
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
        """All output since the last start."""
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
        """The directory that holds the cluster, None before the first start."""
        if not self.data_dir.is_dir():
            return None
        return placement.existing_home(DataDirectory.open(self.data_dir))

    def processes(self) -> list[int]:
        """Every process of this server, including its Postgres."""
        places = {self.data_dir, self.home or self.data_dir}
        return [pid for place in places for pid in working_in(place)]

    @property
    def admin_token(self) -> str:
        return (self.data_dir / "admin-token").read_text().strip()

    def postgres_pid(self) -> int:
        """The pid of this server's postmaster."""
        found = self._postgres()
        if found is None:
            raise AssertionError("the server has no Postgres")
        return found

    def _postgres(self) -> int | None:
        return next((pid for pid, name in children(self.pid).items() if name == "postgres"), None)

    def kill(self) -> None:
        """Kill it with SIGKILL, and wait until it and its Postgres have ended."""
        postgres = self._postgres()
        self.signal(signal.SIGKILL)
        self.wait()
        if postgres:
            wait_until(
                lambda: not alive(postgres),
                seconds=STOPPED_SECONDS,
                what="the end of its Postgres",
            )

    def stop(self, seconds: float = STOPPED_SECONDS) -> int:
        """Stop it with SIGTERM; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = STOPPED_SECONDS) -> int:
        """Wait until it has ended and its output is read; returns the exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        if self._reader:
            self._reader.join(seconds)
        return code

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, bytes]:
        """Status and body; status 0 if the connection is refused."""
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


def peak_kib(pid: int) -> int:
    """The peak of the resident memory of the process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def registered_at(server: Server) -> tuple[str, str]:
    """Register a workspace at a server process; returns its id and its token."""
    workspace_id = str(uuid4())
    body = {"id": workspace_id, "delivery_mode": "poll", "agent_card": {"name": "x"}}
    headers = {"Authorization": f"Bearer {server.admin_token}"}
    request = Request(
        server.address + "/registry/register", json.dumps(body).encode(), headers=headers
    )
    with urlopen(request, timeout=10) as answer:
        return workspace_id, json.load(answer)["auth_token"]
