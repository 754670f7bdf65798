"""
Owns a data directory as some user, and runs its Postgres until standard input closes.

It switches the user after the imports, because that user may not be able to read this interpreter's
files. asyncio would otherwise import its threads later.
"""

import asyncio
import concurrent.futures.thread  # noqa: F401  # pyright: ignore[reportUnusedImport]
import os
import sys
from pathlib import Path

import structlog

from restante.errors import RestanteError
from restante.postgres import DataDirectory, EmbeddedPostgres


def switch_to(uid: int) -> None:
    if uid != os.geteuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


async def main(path: Path) -> None:
    directory = DataDirectory.open(path)
    with directory.claim():
        postgres = EmbeddedPostgres(directory)
        await postgres.start()
        print(postgres.dsn, postgres.pid, flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await postgres.stop()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    switch_to(int(sys.argv[2]))
    try:
        asyncio.run(main(Path(sys.argv[1])))
    except RestanteError as error:
        print(error, flush=True)
