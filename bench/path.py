"""
Counts what one small upload visits on the server: our functions, and the files they are in.

Run it with `python -m bench.path`, and with `--list` to see them.  A server runs in this process,
on a Postgres of its own; the sender is a thread, which the trace does not see.
"""

import asyncio
import sys
import tempfile
import urllib.request
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Self
from uuid import UUID, uuid4

import msgspec

import restante
from restante.server import logs, wiring
from restante.server.listener import address_of, listen
from restante.settings import Settings

AIM_FUNCTIONS, AIM_FILES = 50, 14

_SOURCE = str(Path(restante.__file__).parent)
_BOUNDARY = "the-boundary"

# The background loops run a first pass at start; it may begin tasks of its own.
_FIRST_PASSES_SECONDS = 3.0
# Some of the work is done after the answer.
_AFTERWARDS_SECONDS = 0.5


class Trace:
    """Notes every function of ours that is called in this thread, except by earlier tasks."""

    def __init__(self) -> None:
        self.calls = Counter[tuple[str, str]]()
        self._background = asyncio.all_tasks()

    def __enter__(self) -> Self:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not _is_ours(frame.f_code):
            return
        if asyncio.current_task() not in self._background:
            file = str(Path(frame.f_code.co_filename).relative_to(_SOURCE))
            self.calls[file, frame.f_code.co_qualname] += 1

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}


def _is_ours(code: CodeType) -> bool:
    """Comprehensions are part of the function that they stand in."""
    return code.co_filename.startswith(_SOURCE) and not code.co_name.startswith("<")


async def traced_upload(data_dir: Path, size: int) -> Trace:
    """Send a file twice to a new workspace, and trace the second time."""
    logs.configure("json", "error")
    settings = Settings(data_dir=str(data_dir))
    async with wiring.application(settings) as (app, _):
        ready = asyncio.Event()
        http = wiring.http_server(settings, app, on_ready=ready.set)
        with listen("127.0.0.1", 0) as listening:
            serving = asyncio.create_task(http.serve(sockets=[listening]))
            await ready.wait()
            url = address_of(listening, "127.0.0.1")
            workspace, token = await asyncio.to_thread(_register, url)
            await asyncio.sleep(_FIRST_PASSES_SECONDS)
            await asyncio.to_thread(_upload, url, workspace, token, size)
            await asyncio.sleep(_AFTERWARDS_SECONDS)
            with Trace() as trace:
                await asyncio.to_thread(_upload, url, workspace, token, size)
                await asyncio.sleep(_AFTERWARDS_SECONDS)
            http.should_exit = True
            await serving
    return trace


def _register(url: str) -> tuple[UUID, str]:
    workspace = uuid4()
    body = {"id": workspace, "delivery_mode": "poll", "agent_card": {"name": "bench"}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/registry/register", msgspec.json.encode(body), headers)
    with urllib.request.urlopen(request) as answer:
        return workspace, msgspec.json.decode(answer.read())["auth_token"]


def _upload(url: str, workspace: UUID, token: str, size: int) -> None:
    body = (
        f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="files"; filename="a.bin"\r\n\r\n'
    ).encode()
    body += bytes(size) + f"\r\n--{_BOUNDARY}--\r\n".encode()
    headers = {
        "Authorization": f"Bearer {token}",
        "Content-Type": f"multipart/form-data; boundary={_BOUNDARY}",
    }
    address = f"{url}/workspaces/{workspace}/chat/uploads"
    with urllib.request.urlopen(urllib.request.Request(address, body, headers)) as answer:
        answer.read()


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="restante-path-") as parent:
        Path(parent).chmod(0o711)
        trace = asyncio.run(traced_upload(Path(parent) / "data", 10 * 1024))
    functions, files = len(trace.calls), len(trace.files)
    reached = functions <= AIM_FUNCTIONS and files <= AIM_FILES
    print("one upload of 10 KiB on the server")
    print(
        f"    {functions} functions in {files} files, {trace.calls.total()} calls; aim "
        f"{AIM_FUNCTIONS} in {AIM_FILES}: {'reached' if reached else 'MISSED'}"
    )
    if "--list" in sys.argv:
        for (file, name), calls in sorted(trace.calls.items()):
            print(f"    {file:<24} {name} {calls}")


if __name__ == "__main__":
    main()
