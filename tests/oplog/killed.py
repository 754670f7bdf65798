"""Commands as real processes that are ended by a signal while a lock makes them wait in a step."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from processes import RESTANTE, Outcome, clean_environment
from waiting import until

Process = asyncio.subprocess.Process

# A function in a check constraint, which waits for whoever has this advisory lock.
STOP_KEY = 20261117


@asynccontextmanager
async def command(dsn: str, *words: str) -> AsyncIterator[Process]:
    """A command on a database; whatever happens, its process has ended afterwards."""
    process = await asyncio.create_subprocess_exec(
        RESTANTE,
        *words,
        env=clean_environment(RESTANTE_DATABASE_URL=dsn, COLUMNS="200"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        print(*(text.decode() for text in await process.communicate()))


async def kill(process: Process, holder: Any) -> None:
    """
    Kill a process that waits for a lock of this session, and wait until Postgres has noticed.

    Until then its session goes on, with all its locks.
    """
    waiting = await holder.fetch(
        "select pid from pg_locks"
        " where not granted and pg_backend_pid() = any(pg_blocking_pids(pid))"
    )
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    await until(lambda: _have_ended(holder, [row["pid"] for row in waiting]))


async def _have_ended(connection: Any, pids: list[int]) -> bool:
    await connection.execute("select pg_stat_clear_snapshot()")
    return not await connection.fetchval(
        "select exists (select from pg_stat_get_activity(null) where pid = any($1::int[]))", pids
    )


async def interrupt(process: Process, number: signal.Signals) -> Outcome:
    """Send a signal, and wait for the end."""
    process.send_signal(number)
    return await ended(process)


async def ended(process: Process) -> Outcome:
    """How it ends by itself."""
    stdout, stderr = await process.communicate()
    assert process.returncode is not None
    return Outcome(process.returncode, stdout.decode(), stderr.decode())


async def make_stop_in_copies(connection: Any, log: str) -> None:
    """A command that copies rows of a log waits for `STOP_KEY` at the first one."""
    await connection.execute(
        f"""
        create function public.stops(text) returns boolean language sql as $$
            select case when current_setting('application_name') <> 'restante' then true
                        else pg_advisory_xact_lock_shared({STOP_KEY}) is not null end
        $$;
        alter table restante.{log} add constraint stops check (public.stops(key)) not valid;
        """
    )
