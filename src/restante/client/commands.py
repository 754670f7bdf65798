"""Runs the user's command for a file or a message."""

import asyncio
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from restante.errors import BadRequest, CommandFailed

_LINE_BYTES = 4096
_TERMINATE_SECONDS = 5
_LAST_OUTPUT_SECONDS = 1

# Called with each line of output.
OnLine = Callable[[str], None]


def words_of(command: str) -> list[str]:
    """Split a command as a shell does; raises BadRequest."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadRequest(f"The command {command!r} cannot be parsed: {error}.") from error
    if not words:
        raise BadRequest("The command is empty.")
    return words


async def run(
    words: Sequence[str], on_line: OnLine, *, stdin: bytes = b"", variables: Mapping[str, str]
) -> None:
    """
    Run a command and wait for it; raises CommandFailed unless it exits with 0.

    No shell is involved, so nothing in a name or a message can become a command.
    """
    # Our own pipe: asyncio would wait for its pipe until all of the command's children have exited.
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as output:
        try:
            process = await _start(words, writing, variables)
        finally:
            os.close(writing)
        status = await _wait(process, stdin, output, on_line)
    if status:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise CommandFailed(f"{words[0]} ended with {how}.", status=status)


async def _start(
    words: Sequence[str], output: int, variables: Mapping[str, str]
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **{name: _variable(value) for name, value in variables.items()}},
        )
    except OSError as error:
        raise CommandFailed(f"{words[0]} cannot be run: {error.strerror or error}.") from error


def _variable(value: str) -> str:
    """Make a value of the sender's fit for the environment: no NUL, and bounded."""
    return value.replace("\0", "")[:_LINE_BYTES]


async def _wait(
    process: asyncio.subprocess.Process, stdin: bytes, output: BinaryIO, on_line: OnLine
) -> int:
    """Return the exit status; processes that the command left running are not waited for."""
    streams = [
        asyncio.ensure_future(_write_stdin(process, stdin)),
        asyncio.ensure_future(_relay(output, on_line)),
    ]
    try:
        status = await process.wait()
        await asyncio.wait(streams, timeout=_LAST_OUTPUT_SECONDS)
    except BaseException:
        await _terminate(process)
        raise
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.wait(streams)
    return status


async def _write_stdin(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None  # noqa: S101 - started with a pipe
    try:
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # a command may ignore its input


async def _relay(output: BinaryIO, on_line: OnLine) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    try:
        await _relay_lines(reader, on_line)
    finally:
        transport.close()


async def _relay_lines(reader: asyncio.StreamReader, on_line: OnLine) -> None:
    rest = b""
    while piece := await reader.read(_LINE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) >= _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            on_line(line.decode(errors="replace"))
    if rest:
        on_line(rest.decode(errors="replace"))


async def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _TERMINATE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
