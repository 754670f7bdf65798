"""`restante send`: send files and messages to a workspace."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from cyclopts import App, Group, Parameter
from msgspec import Struct, field
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn

from restante import wire
from restante.cli.access import Access, client_of_folder, workspace_named
from restante.cli.output import Console, json_text, shown_bytes
from restante.cli.words import text_given
from restante.errors import BadRequest, ServerRefused
from restante.ids import WorkspaceId
from restante.text import printable

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient
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
    message: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    dir: Path | None = None,  # noqa: A002 - the flag's name
    ttl_seconds: int | None = None,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    access: Access = Access(),  # noqa: B008 - frozen
) -> None:
    """
    Send files or a message to a workspace.

    Each request is stored completely or not at all. Many or large files are split into several
    requests, sent in order; a message follows them and refers to them. A failed request is retried
    and never stored twice.

    Example: restante send laptop report.pdf photo.jpg --message "Please read these."

    Parameters
    ----------
    workspace
        The workspace's id; with the admin token also its name.
    files
        The files.
    message
        A text; - reads it from standard input.
    dir
        A connected folder: send as its workspace, which may send messages to any other.
    ttl_seconds
        Time until the files expire. [default: the server's setting]
    json
        Print the accepted files as JSON; with --message an object of `files` and `answer`.
    """
    text = None if message is None else text_given(message)
    client = client_of_folder(dir) if dir else access.client()
    sent = _Sent()
    try:
        asyncio.run(_send(client, workspace, files, text, ttl_seconds=ttl_seconds, sent=sent))
    finally:
        # Files accepted before a failure stay accepted.
        if json:
            print(json_text(sent.files if text is None else sent, indent=2))
        else:
            _show(sent)
    _check_answer(sent.answer)


class _Sent(Struct):
    """What the server has accepted so far, and its answer to the message."""

    files: list[wire.StagedFile] = field(default_factory=list[wire.StagedFile])
    answer: dict[str, Any] | None = None


def _show(sent: _Sent) -> None:
    for file in sent.files:
        name = file.display_name or file.name  # a server of before sends only the name
        print(printable(f"accepted {name} ({shown_bytes(file.size)}): {file.uri}"))
    if sent.answer and "error" not in sent.answer:
        print(printable(_shown(sent.answer)))


def _shown(answer: Mapping[str, Any]) -> str:
    """A message is queued for a workspace that polls; others answer it at once."""
    from restante.client.messages import said_in_answer

    if answer.get("status") == "queued":
        return "queued the message"
    return f"answered: {said_in_answer(answer).text or '(no text)'}"


def _check_answer(answer: Mapping[str, Any] | None) -> None:
    """Raise what a workspace answered if that is a JSON-RPC error."""
    from restante.client.messages import error_in

    if answer and (reason := error_in(answer)) is not None:
        raise ServerRefused(f"The workspace answered with an error: {printable(reason)}")


async def _send(
    client: "AsyncClient",
    workspace: str,
    paths: Sequence[Path],
    text: str | None,
    *,
    ttl_seconds: int | None,
    sent: _Sent,
) -> None:
    from restante.client.sending import Outgoing

    if not paths and text is None:
        raise BadRequest("Say which files to send, or what with --message.")
    # Check all files before sending the first.
    files = [Outgoing.of(path) for path in paths]
    async with client:
        to = await workspace_named(client, workspace)
        if files:
            await _send_files(client, to, files, ttl_seconds, sent)
        if text is not None:
            sent.answer = await client.send_message(to, text, attachments=sent.files)


async def _send_files(
    client: "AsyncClient",
    to: WorkspaceId,
    files: "Sequence[Outgoing]",
    ttl_seconds: int | None,
    sent: _Sent,
) -> None:
    from restante.client.sending import check_sizes

    limits = await client.upload_limits()
    check_sizes(files, limits)
    with _Bar(files) as bar:
        for batch in batches(files, limits):
            sent.files += await client.send_files(
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
    if batch:
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
