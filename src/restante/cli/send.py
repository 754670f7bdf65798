"""`restante send`: send files to a workspace."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from cyclopts import App, Group, Parameter
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from restante import wire
from restante.cli.access import Access, workspace_named
from restante.cli.output import Console, json_text, shown_bytes
from restante.errors import BadRequest
from restante.text import printable

if TYPE_CHECKING:
    from restante.client.sending import Outgoing

# Leaves room for the multipart headers.
_FORM_BYTES = 64 * 1024


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(send, group=group)


def send(
    workspace: str,
    /,
    *files: Annotated[Path, Parameter(negative=())],
    ttl_seconds: int | None = None,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    access: Access = Access(),  # noqa: B008 - frozen
) -> None:
    """
    Send files to a workspace.

    Each request is stored completely or not at all. Many or large files are split into several
    requests, sent in order. A failed request is retried and never stored twice.

    Example: restante send laptop report.pdf photo.jpg

    Parameters
    ----------
    workspace
        The workspace's id; with the admin token also its name.
    files
        The files.
    ttl_seconds
        Time until the files expire. [default: the server's setting]
    json
        Print the accepted files as JSON.
    """
    accepted: list[wire.StagedFile] = []
    try:
        asyncio.run(_send(workspace, files, access, ttl_seconds, accepted))
    finally:
        # Files accepted before a failure stay accepted.
        _show(accepted, as_json=json)


def _show(accepted: list[wire.StagedFile], *, as_json: bool) -> None:
    if as_json:
        print(json_text(accepted, indent=2))
        return
    for file in accepted:
        print(printable(f"accepted {file.name} ({shown_bytes(file.size)}): {file.uri}"))


async def _send(
    workspace: str,
    paths: Sequence[Path],
    access: Access,
    ttl_seconds: int | None,
    accepted: list[wire.StagedFile],
) -> None:
    from restante.client.sending import Outgoing, check_sizes

    if not paths:
        raise BadRequest("Say which files to send.")
    # Check all files before sending the first.
    files = [Outgoing.of(path) for path in paths]
    async with access.client() as client:
        limits = await client.upload_limits()
        check_sizes(files, limits)
        to = await workspace_named(client, workspace)
        with _Bar(files) as bar:
            for batch in batches(files, limits):
                accepted += await client.send_files(
                    to, batch, ttl_seconds=ttl_seconds, progress=bar.sent
                )
                bar.batch_ended()


def batches(files: "Sequence[Outgoing]", limits: wire.UploadLimits) -> "Iterator[list[Outgoing]]":
    """Split the files, in order, into as few requests as the server's limits allow."""
    max_files = limits.max_attachments_per_message
    max_bytes = limits.per_request_bytes - _FORM_BYTES
    batch: list[Outgoing] = []
    size = 0
    for file in files:
        if batch and (len(batch) >= max_files or size + file.part.size > max_bytes):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.part.size
    yield batch


class _Bar:
    """A progress bar on a terminal; nothing elsewhere."""

    def __init__(self, files: "Sequence[Outgoing]") -> None:
        console = Console(stderr=True)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("sending", total=sum(file.part.size for file in files))
        self._earlier_batches = self._batch = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def sent(self, size: int) -> None:
        """Bytes sent of this batch; a retry starts again at 0."""
        self._batch = size
        self._bar.update(self._task, completed=self._earlier_batches + size)

    def batch_ended(self) -> None:
        self._earlier_batches += self._batch
