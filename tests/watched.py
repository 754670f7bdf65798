"""
A server in a process of its own that measures its event loop and its memory.

Run as a program, it serves until its standard input closes; for each line there it writes what it
has measured since the line before.
"""

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import uvloop
from callers import FORM, Answer, Part, form, request_head, wire_to
from sites import ADMIN_TOKEN, running_site, settings_for

from restante.server import logs

_BEAT_SECONDS = 0.001


class Measured(NamedTuple):
    """What a server has measured since it was asked last."""

    stall_ms: float  # the most CPU time that the loop used between two of its beats
    resident_kib: int


class Workspace(NamedTuple):
    """A workspace that is registered there."""

    id: str
    token: str
    file_id: str = ""

    @property
    def path(self) -> str:
        return f"/workspaces/{self.id}"


@dataclass(frozen=True, slots=True)
class Watched:
    """A running server; ask for what it has measured."""

    url: str
    _process: "subprocess.Popen[str]"

    def measured(self) -> Measured:
        """What was measured since the last call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return Measured(*json.loads(self._process.stdout.readline()))

    async def ask(self, method: str, path: str, *, token: str = "", body: bytes = b"") -> Answer:
        """One plain request and its whole answer."""
        async with wire_to(self.url) as wire:
            await wire.send(request_head(method, path, token=token, length=len(body)) + body)
            return await wire.answer()

    async def register(self) -> Workspace:
        """A new workspace."""
        workspace_id = str(uuid4())
        card = {"id": workspace_id, "delivery_mode": "poll", "agent_card": {"name": "x"}}
        body = json.dumps(card).encode()
        answer = await self.ask("POST", "/registry/register", token=ADMIN_TOKEN, body=body)
        return Workspace(workspace_id, answer.json["auth_token"])

    async def with_file(self, workspace: Workspace, content: bytes) -> Workspace:
        """The workspace, with a file that waits for it."""
        body, lines = form(Part(content)), [f"Content-Type: {FORM}"]
        path = workspace.path + "/chat/uploads"
        head = request_head("POST", path, token=workspace.token, length=len(body), lines=lines)
        async with wire_to(self.url) as wire:
            await wire.send(head + body)
            answer = await wire.answer()
        return workspace._replace(file_id=answer.json["files"][0]["uri"].rpartition("/")[2])


@contextmanager
def watched(dsn: str, data_dir: Path, **chosen: Any) -> Iterator[Watched]:
    """Run such a server on this database."""
    program = [sys.executable, __file__, dsn, str(data_dir), json.dumps(chosen)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdin is not None
        assert run.stdout is not None
        try:
            yield Watched(run.stdout.readline().strip(), run)
        finally:
            run.stdin.close()


class _Heartbeat:
    """
    Notes the CPU time of the loop's thread between two beats.

    Other processes do not add to it, so a busy machine gives the same figure.
    """

    longest = 0.0

    async def run(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(_BEAT_SECONDS)
            now = time.thread_time()
            self.longest, before = max(self.longest, now - before), now


def _resident_kib() -> int:
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[0])


async def _main(dsn: str, data_dir: str, chosen: str) -> None:
    logs.configure("json", "error")
    heartbeat = _Heartbeat()
    async with running_site(settings_for(dsn, Path(data_dir), **json.loads(chosen))) as site:
        beating = asyncio.create_task(heartbeat.run())
        print(site.url, flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            longest, heartbeat.longest = heartbeat.longest, 0.0
            print(json.dumps([longest * 1000, _resident_kib()]), flush=True)
        beating.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(*sys.argv[1:]))
