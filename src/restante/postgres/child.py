"""A Postgres child process: captures its output, shuts it down, and ends it if we die."""

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
from restante.postgres.account import Account, minimal_environment
from restante.postgres.output import Output

PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)

# Fast shutdown, immediate shutdown, kill; with the seconds to wait before the next one.
# Together with the grace for open requests, a stop stays below 5 s.
SHUTDOWN_SIGNALS = ((signal.SIGINT, 2.0), (signal.SIGQUIT, 0.5), (signal.SIGKILL, 5.0))


class Child:
    """
    A running process and its output.

    Only the event loop's thread reaps it. Its pid cannot be reused before that, so a signal never
    reaches another process.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.output = Output()
        self.exited = asyncio.Event()
        self._process = process
        loop = asyncio.get_running_loop()
        self._reader = _in_background(self.output.read, process.stdout)
        _in_background(_set_on_exit, process, loop, self.exited)

    @classmethod
    def spawn(
        cls,
        command: Sequence[str | os.PathLike[str]],
        account: Account,
        *,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
    ) -> "Child":
        """Start the command. Call this in the main thread: the process ends with its thread."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=minimal_environment() | dict(environment or {}),
                # Ctrl-C must reach only us; we shut Postgres down ourselves.
                start_new_session=True,
                preexec_fn=_end_with_parent(),  # noqa: PLW1509 - it only makes two system calls
                **account.identity,
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise PostgresUnusable(
                f"{command[0]} cannot be started as {account.name}: {error}."
            ) from error
        _write_input(process.stdin, stdin)
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait until the process has ended and its output is read; return the exit status."""
        await self.exited.wait()
        status = self._process.wait()
        # Orphans of a killed server may keep the pipe open; do not wait for them.
        await asyncio.to_thread(self._reader.join, 0.5)
        return status

    async def end(self) -> None:
        """Shut it down, with a stronger signal after each timeout; idempotent."""
        for number, timeout_seconds in SHUTDOWN_SIGNALS:
            if self.exited.is_set():
                break
            self._process.send_signal(number)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.exited.wait(), timeout_seconds)
        self._process.poll()


def _end_with_parent() -> Callable[[], None] | None:
    """
    A function for the child to run before exec; it makes Postgres end when we die.

    The signal is SIGQUIT (immediate shutdown), because SIGINT would wait for a checkpoint. Postgres
    recovers at the next start.
    """
    if sys.platform != "linux":
        return None
    parent = os.getpid()
    prctl, death_signal, exit_now = LIBC.prctl, int(signal.SIGQUIT), os._exit

    def end_with_parent() -> None:
        prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() != parent:
            exit_now(1)

    return end_with_parent


def _set_on_exit(
    process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop, exited: asyncio.Event
) -> None:
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    else:
        process.wait()
    with suppress(RuntimeError):  # the event loop is closed already
        loop.call_soon_threadsafe(exited.set)


def _write_input(pipe: IO[bytes] | None, text: bytes) -> None:
    if pipe:
        with suppress(BrokenPipeError), pipe:
            pipe.write(text)


def _in_background(target: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, daemon=True, name=target.__name__)
    thread.start()
    return thread
