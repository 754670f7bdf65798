"""`restante connect` receiving large files, compared with curl."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import msgspec

from bench import http
from bench.report import Figure, show
from bench.server import Running, Workspace
from restante.client import Credentials
from restante.client.folder import Folder
from restante.delivery.rules import MAX_FILE_BYTES
from restante.ids import WorkspaceId

ROUNDS = 6
FILES = 10

_RESTANTE = Path(sys.executable).with_name("restante")


async def measure(server: Running) -> None:
    """Both fetch the same files, each from its own workspace; they alternate in going first."""
    if shutil.which("curl") is None:
        print("25 MiB files through connect\n    not measured: curl is not installed")
        return
    content = os.urandom(MAX_FILE_BYTES)
    speeds: dict[Way, list[float]] = {_connect_speed: [], _curl_speed: []}
    for number in range(ROUNDS):
        with tempfile.TemporaryDirectory(prefix="restante-bench-") as folder:
            for way in list(speeds)[:: 1 if number % 2 else -1]:
                staged = await _staged(server, content)
                os.sync()  # do not measure the writes of the other one
                speeds[way].append(way(server, staged, Path(folder) / way.__name__))
    ours, floor = speeds.values()
    show(Figure("25 MiB files through connect", "MB/s", ours, floor, "curl", 0.8))


@dataclass(frozen=True, slots=True)
class Staged:
    """A workspace and the files staged for it."""

    workspace: Workspace
    files: list[UUID]


Way = Callable[[Running, Staged, Path], float]


async def _staged(server: Running, content: bytes) -> Staged:
    workspace = server.register()
    connection = await http.Connection.open(server.port)
    request = http.upload(f"/workspaces/{workspace.id}/chat/uploads", workspace.token, content)
    files: list[UUID] = []
    for _ in range(FILES):
        status, body = await connection.ask(request)
        assert status == 200, body
        files.append(UUID(msgspec.json.decode(body)["files"][0]["uri"].rpartition("/")[2]))
    connection.close()
    return Staged(workspace, files)


def _curl_speed(server: Running, staged: Staged, folder: Path) -> float:
    """One curl for all files, over one connection, without fsync."""
    folder.mkdir()
    workspace = staged.workspace
    address = f"http://127.0.0.1:{server.port}/workspaces/{workspace.id}/pending-uploads"
    config = folder / "config"
    lines = [f'header = "Authorization: Bearer {workspace.token}"', "fail", "silent"]
    for file in staged.files:
        lines += [f'url = "{address}/{file}/content"', f'output = "{folder / str(file)}"']
    config.write_text("\n".join(lines))
    started = time.monotonic()
    subprocess.run(["curl", "--config", config], check=True)
    seconds = time.monotonic() - started
    assert all((folder / str(file)).stat().st_size == MAX_FILE_BYTES for file in staged.files)
    return FILES * MAX_FILE_BYTES / seconds / 1e6


def _connect_speed(server: Running, staged: Staged, folder: Path) -> float:
    """From its first line to the last file that is verified, synced and acknowledged."""
    url, workspace = f"http://127.0.0.1:{server.port}", staged.workspace
    with Folder.open(folder) as opened:
        opened.keep(Credentials(url, WorkspaceId(workspace.id), workspace.token))
    command = [_RESTANTE, "connect", url, "--dir", folder, "--once"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        started = ended = time.monotonic()
        for line in process.stdout:
            ended = time.monotonic() if line.startswith("received ") else ended
    assert process.returncode == 0
    assert len(list((folder / ".molecule" / "chat-uploads").iterdir())) == FILES
    return FILES * MAX_FILE_BYTES / (ended - started) / 1e6
