"""Runs the command that takes a file or a message."""

import asyncio
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

from restante.errors import BadRequest, CommandFailed

_LINE_BYTES = 4096
_GRACE_SECONDS = 5
_LAST_WORDS_SECONDS = 1

Say = Callable[[str], None]


def words_of(command: str) -> list[str]:
    """The words of a command as a shell would split them; raises BadRequest."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadRequest(f"The command {command!r} cannot be understood: {error}.") from error
    if not words:
        raise BadRequest("The command is empty.")
    return words


async def run(
    words: Sequence[str], say: Say, *, given: bytes = b"", facts: Mapping[str, str]
) -> None:
    """
    Run a command to its end; raises CommandFailed unless it succeeds.

    No shell is involved, so nothing in a name or a message can become a command.
    """
    # A pipe of our own: asyncio's would be waited for until all of the command's children end.
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as output:
        try:
            process = await _started(words, writing, facts)
        finally:
            os.close(writing)
        status = await _ended(process, given, output, say)
    if status:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise CommandFailed(f"{words[0]} ended with {how}.", status=status)


async def _started(
    words: Sequence[str], output: int, facts: Mapping[str, str]
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **{name: _told(fact) for name, fact in facts.items()}},
        )
    except OSError as error:
        raise CommandFailed(f"{words[0]} cannot be run: {error.strerror or error}.") from error


async def _ended(
    process: asyncio.subprocess.Process, given: bytes, output: BinaryIO, say: Say
) -> int:
    """How it ended; what it has left running may go on, and is not listened to."""
    talking = [
        asyncio.ensure_future(_give(process, given)),
        asyncio.ensure_future(_relay(output, say)),
    ]
    try:
        status = await process.wait()
        await asyncio.wait(talking, timeout=_LAST_WORDS_SECONDS)
    except BaseException:
        await _end(process)
        raise
    finally:
        for talk in talking:
            talk.cancel()
        await asyncio.wait(talking)
    return status


def _told(fact: str) -> str:
    """What a variable can hold of what somebody else wrote."""
    return fact.replace("\0", "")[:_LINE_BYTES]


async def _give(process: asyncio.subprocess.Process, given: bytes) -> None:
    assert process.stdin is not None  # noqa: S101 - it was asked for
    try:
        process.stdin.write(given)
        await process.stdin.drain()
        process.stdin.close()
        await process.stdin.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        return  # a command may ignore what it is given


async def _relay(output: BinaryIO, say: Say) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), output
    )
    try:
        await _relay_lines(reader, say)
    finally:
        transport.close()


async def _relay_lines(reader: asyncio.StreamReader, say: Say) -> None:
    rest = b""
    while piece := await reader.read(_LINE_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) >= _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        for line in lines:
            say(line.decode(errors="replace"))
    if rest:
        say(rest.decode(errors="replace"))


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _GRACE_SECONDS)
    except TimeoutError:
        process.kill()
        await process.wait()
