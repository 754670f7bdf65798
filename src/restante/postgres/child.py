"""One process of Postgres: started by us, heard, reaped by us alone, and never alive after us."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO

from restante.errors import PostgresUnusable
from restante.postgres.account import Account, plain_environment
from restante.postgres.output import Transcript

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

# How long a fast and then an immediate shutdown may take before the next stronger signal.
# Together with the grace of open requests, no more than the 5 s that a stop may take.
ENDINGS = ((signal.SIGINT, 2.0), (signal.SIGQUIT, 0.5), (signal.SIGKILL, 5.0))


class Child:
    """
    A running process and what it has said.

    Only the event loop's thread reaps it, so its pid stays its own until we have looked, and a
    signal can never reach a process that came after it.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.said = Transcript()
        self.exited = asyncio.Event()
        self._process = process
        loop = asyncio.get_running_loop()
        self._hearing = _in_background(self.said.hear, process.stdout)
        _in_background(_tell_the_end, process, loop, self.exited)

    @classmethod
    def spawn(
        cls,
        command: Sequence[str | os.PathLike[str]],
        account: Account,
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> "Child":
        """Start the command in the main thread: the process ends with the thread that began it."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=plain_environment() | dict(environment or {}),
                # A terminal's Ctrl-C is for us; we end Postgres in our own time.
                start_new_session=True,
                preexec_fn=_end_with_parent(),  # noqa: PLW1509 - the function only makes two system calls
                **account.identity,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise PostgresUnusable(
                f"{command[0]} cannot be started as {account.name}: {error}."
            ) from error
        _feed(process.stdin, stdin)
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait until the process has ended and all it said was heard; return its exit status."""
        await self.exited.wait()
        status = self._process.wait()
        # Orphans of a killed server may hold the pipe open for a while; they are not waited for.
        await asyncio.to_thread(self._hearing.join, 0.5)
        return status

    async def end(self) -> None:
        """Ask it to shut down fast, then at once, then kill it; harmless when it has ended."""
        for ask, patience_seconds in ENDINGS:
            if self.exited.is_set():
                break
            self._process.send_signal(ask)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), patience_seconds)
        self._process.poll()


def _end_with_parent() -> Callable[[], None] | None:
    """
    Make the function that a child runs before it becomes Postgres.

    SIGQUIT and not SIGINT: whatever a checkpoint would take, Postgres is gone at once, and recovers
    at the next start.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    prctl, deadly, exit_now = LIBC.prctl, int(signal.SIGQUIT), os._exit

    def end_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, deadly)
        if os.getppid() != parent:
            exit_now(1)

    return end_with_parent


def _tell_the_end(
    process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, exited: asyncio.Event
) -> None:
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
    with suppress(RuntimeError):  # the loop has gone before the process
        loop.call_soon_threadsafe(exited.set)


def _feed(pipe: IO[bytes] | None, text: bytes) -> None:
    if pipe:
        with suppress(BrokenPipeError), pipe:
            pipe.write(text)


def _in_background(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True, name=target.__name__)
    thread.start()
    return thread
