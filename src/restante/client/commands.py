"""Runs the user's command for a file or a message."""

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

from restante.errors import BadRequest, CommandFailed

# Of standard output, where that is collected.
MAX_PRINTED_BYTES = 1024 * 1024

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
    words: Sequence[str],
    on_line: OnLine,
    *,
    stdin: bytes = b"",
    variables: Mapping[str, str],
    printed: bytearray | None = None,
) -> None:
    """
    Run a command and wait for it; raises CommandFailed unless it exits with 0.

    Each line of its output is reported.  With `printed`, standard output goes there instead, cut
    after one byte more than MAX_PRINTED_BYTES.
    No shell is involved, so nothing in a name or a message can become a command.
    """
    with _pipe() as (lines, line_end), _pipe() as (output, output_end):
        stdout = line_end if printed is None else output_end
        try:
            process = await _start(words, stdout, line_end, variables)
        finally:
            os.close(line_end)
            os.close(output_end)
        readers = [_relay_lines(lines, on_line)]
        if printed is not None:
            readers.append(_collect(output, printed))
        status = await _wait(process, [_write_stdin(process, stdin), *readers])
    if status:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise CommandFailed(f"{words[0]} ended with {how}.", status=status)


@contextmanager
def _pipe() -> Iterator[tuple[BinaryIO, int]]:
    """Our own pipe: asyncio would wait for its own until all of the command's children ended."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as output:
        yield output, writing


async def _start(
    words: Sequence[str], stdout: int, stderr: int, variables: Mapping[str, str]
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=stdout,
            stderr=stderr,
            env={**os.environ, **{name: _variable(value) for name, value in variables.items()}},
        )
    except OSError as error:
        raise CommandFailed(f"{words[0]} cannot be run: {error.strerror or error}.") from error


def _variable(value: str) -> str:
    """Make a value of the sender's fit for the environment: no NUL, and bounded."""
    return value.replace("\0", "")[:_LINE_BYTES]


async def _wait(
    process: asyncio.subprocess.Process, work: Sequence[Coroutine[Any, Any, None]]
) -> int:
    """Return the exit status; processes that the command left running are not waited for."""
    streams = [asyncio.ensure_future(one) for one in work]
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


async def _collect(output: BinaryIO, printed: bytearray) -> None:
    async for piece in _pieces(output):
        printed += piece[: MAX_PRINTED_BYTES + 1 - len(printed)]


async def _relay_lines(output: BinaryIO, on_line: OnLine) -> None:
    rest = b""
    async for piece in _pieces(output):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) >= _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            on_line(line.decode(errors="replace"))
    if rest:
        on_line(rest.decode(errors="replace"))


async def _pieces(output: BinaryIO) -> AsyncIterator[bytes]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    try:
        while piece := await reader.read(_LINE_BYTES):
            yield piece
    finally:
        transport.close()


async def _terminate(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _TERMINATE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
