"""What the receiver says about the files that still wait."""

from io import StringIO
from pathlib import Path
from uuid import UUID

import pytest
from callers import Part, registered
from rich.console import Console
from sites import Site

from restante.cli.display import Display
from restante.client import AsyncClient
from restante.client.calls import ROWS_PER_PAGE
from restante.client.folder import Folder
from restante.client.receiving import Receiver

pytestmark = pytest.mark.anyio


class Watched(Display):
    """Notes each length of the queue."""

    def __init__(self) -> None:
        super().__init__(Console(file=StringIO()))
        self.queues: list[tuple[int, int]] = []

    def queued(self, files: int, size: int) -> None:
        self.queues.append((files, size))


async def test_the_queue_is_known_before_its_second_page(shared_site: Site, tmp_path: Path):
    """It counts down with each file, to nothing."""
    caller = await registered(shared_site)
    count = ROWS_PER_PAGE + 2
    await caller.staged(*(Part(b"123", name=f"{n}") for n in range(count)))
    watched = Watched()

    with Folder.open(tmp_path) as folder:
        async with AsyncClient(
            shared_site.url, token=caller.token, workspace_id=UUID(caller.id)
        ) as client:
            assert await Receiver(client, folder, watched).run_once() == 0

    different = list(dict.fromkeys(watched.queues))
    assert different == [(left, left * 3) for left in range(count, -1, -1)]
