"""
Starts `restante` fast: forks it from a process that has imported everything already.

Importing takes most of the time of a short command, and the tests start hundreds.  A forked command
is a process like any other, with its own id, arguments, environment, directory and streams, and is
ended by signals.  What Python reads when it starts, a fork cannot have: such a command is executed,
as are those of the README and of the guides.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import restante

RESTANTE = Path(sys.executable).with_name("restante")

# Python and libraries read these when they are loaded.
_READ_AT_START = ("PYTHON", "LC_", "LANG", "LD_", "TZ", "SSL_", "MALLOC_")

# Every process of ours loads all certificates at its start, which takes a twentieth of its time;
# no test speaks TLS.
NO_CERTIFICATES = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}

# Linux keeps the command line of a process in its memory; there has to be room for any other.
_ROOM_FOR_WORDS = "." * 16_384
_MESSAGE_BYTES = 1 << 17

# At the tests ------------------------------------------------------------------------------------


def start(
    words: Sequence[object], *, env: Mapping[str, str], **options: Any
) -> "subprocess.Popen[Any]":
    """A `restante` with these words; the options are those of `subprocess.Popen`."""
    command = [str(RESTANTE), *map(str, words)]
    kind = subprocess.Popen if _needs_a_start(env) else _Forked
    return kind(command, env=dict(env), **options)


def run(
    words: Sequence[object],
    *,
    env: Mapping[str, str],
    timeout: float = 60,
    input: Any = None,  # noqa: A002 - as in `subprocess.run`
    **options: Any,
) -> "subprocess.CompletedProcess[Any]":
    """Run a `restante` until it ends, with its output in pipes."""
    pipe = subprocess.PIPE
    stdin = subprocess.DEVNULL if input is None else pipe
    with start(words, env=env, stdin=stdin, stdout=pipe, stderr=pipe, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _needs_a_start(env: Mapping[str, str]) -> bool:
    """Whether the environment differs from the forker's where a fork would not notice."""
    own = os.environ | NO_CERTIFICATES
    names = {name for name in {*env, *own} if name.startswith(_READ_AT_START)}
    return any(env.get(name) != own.get(name) for name in names)


class _Forked(subprocess.Popen[Any]):
    """A process that is forked where Popen would execute a program."""

    def _execute_child(self, *given: Any) -> None:
        args, _, _, _, _, cwd, env, _, _, _, *pipes = given[:16]
        stdin, _, _, stdout, _, stderr = pipes
        ends, told = os.pipe()
        try:
            message = {"words": args, "env": env, "cwd": os.fspath(cwd or Path.cwd())}
            streams = [fd if fd >= 0 else own for own, fd in enumerate((stdin, stdout, stderr))]
            self.pid = _forker().fork(message, [*streams, told])
        finally:
            os.close(told)
            self._close_pipe_fds(*pipes)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        self._ends = open(ends, "rb", buffering=0)  # noqa: SIM115, PTH123 - closed at its end
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._ends], [], [], 0)[0]:
            return 0, 0
        with self._ends:
            return self.pid, int(self._ends.read(16) or signal.SIGKILL)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode


class _Forker:
    """The process that has imported everything, of this process of the tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), _ROOM_FOR_WORDS],
                env=os.environ | NO_CERTIFICATES,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(process.wait)
        atexit.register(self._socket.close)

    def fork(self, message: Mapping[str, Any], fds: Sequence[int]) -> int:
        """Fork a command; returns its process id."""
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(message).encode()], fds)
            return int(self._socket.recv(16))


@functools.cache
def _forker() -> _Forker:
    return _Forker()


# At the forker -----------------------------------------------------------------------------------


def _import_everything() -> None:
    for module in pkgutil.walk_packages(restante.__path__, "restante."):
        # The consoles of the main module look at the streams of the process.
        if module.name not in {"restante.__main__", "restante.cli.main"}:
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()


def _next_command(requests: socket.socket) -> None:
    """Fork the commands that are asked for; returns in each of them."""
    told: dict[int, int] = {}

    def tell_ended(*_: object) -> None:
        while told:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            end = told.pop(pid)
            with suppress(BrokenPipeError):  # nobody waits for it
                os.write(end, str(status).encode())
            os.close(end)

    signal.signal(signal.SIGCHLD, tell_ended)
    while True:
        message, fds, _, _ = socket.recv_fds(requests, _MESSAGE_BYTES, 4)
        if not message:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        if not (pid := os.fork()):
            requests.detach()
            _become(json.loads(message), fds[:3])
            return
        *streams, told[pid] = fds
        for fd in streams:
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        requests.send(str(pid).encode())


def _become(command: Mapping[str, Any], streams: Sequence[int]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(command["cwd"])
    os.environ.clear()
    os.environ.update(command["env"])
    sys.argv = command["words"]
    _show_words([sys.executable, *sys.argv])


def _show_words(words: Sequence[str]) -> None:
    """Let /proc show the command line of the command, not that of the forker."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:  # noqa: PTH123
        memory.seek(begin)
        memory.write(text[: end - begin].ljust(end - begin, b"\0"))


if __name__ == "__main__":
    sys.path.pop(0)  # the directory of the tests
    _import_everything()
    _next_command(socket.socket(fileno=int(sys.argv[1])))
    from restante.cli.main import main

    main()
