"""Runs pg_dump and pg_restore of the Postgres that the cluster belongs to."""

import asyncio
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from restante.errors import BackupFailed, PostgresUnusable
from restante.postgres.account import minimal_environment

_READ_BYTES = 1024 * 1024
_ERROR_LINES = 3


def program(bin_dir: Path, name: str) -> Path:
    """The program of this installation; raises PostgresUnusable if it was left out."""
    found = bin_dir / name
    if not found.is_file():
        raise PostgresUnusable(
            f"There is no {name} in {bin_dir}. Install the client programs of this Postgres, or "
            "name another installation of the same version with --postgres-bin."
        )
    return found


async def read_from(command: list[str | Path], take: Callable[[bytes], None]) -> None:
    """Pass on what the program prints; raises BackupFailed with its error message if it fails."""
    async with _running(command, stdin=None, stdout=PIPE) as process:
        assert process.stdout is not None  # noqa: S101 - as asked for above
        while piece := await process.stdout.read(_READ_BYTES):
            take(piece)


async def write_to(command: list[str | Path], pieces: Iterable[bytes]) -> None:
    """Give the program its input; raises BackupFailed with its error message if it fails."""
    async with _running(command, stdin=PIPE, stdout=None) as process:
        assert process.stdin is not None  # noqa: S101 - as asked for above
        # It ends early when it fails, and says why.
        with suppress(BrokenPipeError, ConnectionResetError):
            for piece in pieces:
                process.stdin.write(piece)
                await process.stdin.drain()
            process.stdin.close()
            await process.stdin.wait_closed()


@asynccontextmanager
async def _running(
    command: list[str | Path], *, stdin: int | None, stdout: int | None
) -> AsyncIterator[Process]:
    """A program that ends with the context, whose status is checked there."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=stdin,
        stdout=stdout,
        stderr=PIPE,
        env=minimal_environment(),
        # Ctrl-C must reach only us; the program is ended below.
        start_new_session=True,
        cwd="/",
    )
    assert process.stderr is not None  # noqa: S101 - as asked for above
    errors = asyncio.create_task(process.stderr.read())
    try:
        yield process
        said = await errors
        if await process.wait() != 0:
            raise BackupFailed(f"{Path(command[0]).name} failed: {_last_lines(said)}")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        errors.cancel()


def _last_lines(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return " ".join(lines[-_ERROR_LINES:]) or "it gave no reason."
