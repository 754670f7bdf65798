"""Real `restante connect` processes and their folders, for tests that kill and restart them."""

import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from signal import SIGINT, SIGKILL, Signals
from typing import Any, Self
from uuid import UUID

import warm
from processes import Server, clean_environment, wait_until

from restante.client import Bytes, Client, Credentials
from restante.client.folder import kept_credentials

BEGAN = "Files appear in "
ARRIVED = re.compile(r"[0-9a-f]{32}-(.+)")


class Connect:
    """A `restante connect` process and its folder."""

    def __init__(self, root: Path, url: str, *flags: str | Path, **environment: str) -> None:
        self.root = root
        self.url = url
        self.flags: Sequence[str | Path] = flags
        self.environment = environment
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process and self.process.poll() is None:
            self.kill()

    def start(self) -> Self:
        """Start, and wait until it prints where files appear."""
        self.begin()
        self.until_said(BEGAN)
        return self

    def begin(self) -> Self:
        """Start without waiting."""
        self.lines = []
        self.process = warm.start(
            ["connect", self.url, "--dir", self.root, *self.flags],
            env=clean_environment(**self.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()
        return self

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.lines.append(line)
                    self._changed.notify_all()

    @property
    def said(self) -> str:
        """Standard output and standard error since the last start."""
        return "".join(self.lines)

    def until_said(self, text: str, seconds: float = 30) -> str:
        """Wait for a line with this text, and return it."""
        with self._changed:
            self._changed.wait_for(lambda: text in self.said, seconds)
        found = next((line for line in self.lines if text in line), None)
        assert found is not None, f"{text!r} was not printed within {seconds} s:\n{self.said}"
        return found

    def until_received(self, name: str) -> str:
        """Wait for the line of a received file, and return it."""
        return self.until_said(f"B  {name}")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """kill -9, and wait until the process is gone."""
        self.signal(SIGKILL)
        self.wait()

    def stop(self, number: Signals = SIGINT, *, seconds: float = 10) -> int:
        """Send a signal, Ctrl-C by default, and return the exit code."""
        self.signal(number)
        return self.wait(seconds)

    def signal(self, number: Signals) -> None:
        os.kill(self.pid, number)

    def wait(self, seconds: float = 30) -> int:
        """Wait for the process and its output; returns the exit code."""
        assert self.process is not None
        code = self.process.wait(seconds)
        if self._reader:
            self._reader.join(seconds)
        return code

    def memory_mib(self, which: str = "VmRSS") -> float:
        """Its memory now, or at its peak (VmHWM)."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(rf"{which}:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) / 1024

    @property
    def credentials(self) -> Credentials:
        found = kept_credentials(self.root)
        assert found is not None
        return found

    @property
    def uploads(self) -> Path:
        return self.root / ".molecule" / "chat-uploads"

    @property
    def arriving(self) -> Path:
        return self.root / ".molecule" / "restante" / "arriving"

    def names(self) -> list[str]:
        """The sent names of the files in the folder; any other name is an error."""
        found = [ARRIVED.fullmatch(path.name) for path in self.uploads.iterdir()]
        assert all(found), sorted(path.name for path in self.uploads.iterdir())
        return sorted(match[1] for match in found if match)

    def path_of(self, name: str) -> Path:
        """The only file that was sent with this name."""
        (path,) = (path for path in self.uploads.iterdir() if path.name.endswith(f"-{name}"))
        return path

    def left_behind(self, file_id: UUID, content: bytes) -> None:
        """Create a partial file as an interrupted run leaves it."""
        partial = self.arriving / f"{file_id}.part"
        partial.touch(mode=0o600)
        partial.write_bytes(content)

    def partials(self) -> list[Path]:
        """The partial files."""
        return list(self.arriving.iterdir()) if self.arriving.is_dir() else []

    def until_arriving(self, size: int) -> None:
        """Wait until the partial files have this size."""
        wait_until(
            lambda: sum(map(size_of, self.partials())) == size, seconds=20, what=f"{size} bytes"
        )


def size_of(path: Path) -> int:
    """The size of a file, 0 if it no longer exists."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class Office:
    """A server, with a sender and a view of what is pending."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._clients = ExitStack()
        self._sender: Client | None = None
        self._owners: dict[UUID, Client] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._clients.close()

    @property
    def sender(self) -> Client:
        """A client with the admin token."""
        if self._sender is None:
            admin = Client(self.server.address, token=self.server.admin_token)
            self._sender = self._clients.enter_context(admin)
        return self._sender

    def send(self, to: Connect, *files: Bytes) -> list[UUID]:
        """Send files in one request, without the proxy; returns their ids."""
        staged = self.sender.send_files(to.credentials.workspace_id, files)
        return [UUID(file.uri.rpartition("/")[2]) for file in staged]

    def say(self, to: Connect, body: Mapping[str, Any]) -> None:
        """Send a message."""
        self.sender.send_message(to.credentials.workspace_id, body)

    def waiting(self, at: Connect) -> set[str]:
        """The names of a workspace's pending files."""
        return {upload.name for upload in self.owner(at).pending()}

    def acked_seq(self, at: Connect) -> int:
        """The last row that a workspace has acknowledged."""
        return self.owner(at).feed(limit=1).acked_seq

    def until_nothing_waits(self, at: Connect, seconds: float = 30) -> None:
        """Wait until every file is acknowledged."""
        wait_until(lambda: not self.waiting(at), seconds=seconds, what=f"the end of {at.said}")

    def owner(self, at: Connect) -> Client:
        """A client with the workspace's token, without the proxy."""
        kept = at.credentials
        if kept.workspace_id not in self._owners:
            owner = Client(self.server.address, token=kept.token, workspace_id=kept.workspace_id)
            self._owners[kept.workspace_id] = self._clients.enter_context(owner)
        return self._owners[kept.workspace_id]
