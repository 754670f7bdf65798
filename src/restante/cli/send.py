"""`restante send`: send files and messages to a workspace."""

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter, Token
from msgspec import Struct, field

from restante import wire
from restante.cli.access import Access, client_of_folder, workspace_named
from restante.cli.output import Console, json_text
from restante.cli.sent_lines import SentLines
from restante.cli.words import STANDARD_INPUT, stored_input, text_given
from restante.errors import BadRequest, FileUnreadable, ServerRefused
from restante.ids import WorkspaceId
from restante.text import printable

if TYPE_CHECKING:
    from restante.client.aio import AsyncClient
    from restante.client.choosing import Chosen
    from restante.client.sending import Outgoing

# Leaves room for the multipart headers.
_FORM_BYTES = 64 * 1024


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(send, group=group)


def _path(_type: object, tokens: Sequence[Token]) -> Path:
    """A file; neither a mistyped flag, nor the current directory for an empty variable."""
    text = tokens[0].value
    if not text:
        raise ValueError("The name of a file is empty.")
    if text.startswith("-") and text != STANDARD_INPUT:
        raise ValueError(f"{text} is not a flag of this command; a file of that name is ./{text}")
    # A Path forgets the first two characters of ./-
    return Path(text).absolute() if text.startswith("./-") else Path(text)


def send(
    workspace: str,
    /,
    *files: Annotated[Path, Parameter(negative=(), allow_leading_hyphen=True, converter=_path)],
    message: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    name: str | None = None,
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

    Example: restante send laptop report.pdf photos --message "Please read these."

    Parameters
    ----------
    workspace
        The workspace's id; with the admin token also its name.
    files
        The files. A directory stands for the files in it, up to 1000, without hidden ones and
        links; a quoted pattern such as 'logs/*.txt' for what it matches, unless a file has that
        name; - for standard input.
    message
        A text; - reads it from standard input.
    name
        What to call standard input, or the only file.
    dir
        A connected folder: send as its workspace, which may send messages to any other.
    ttl_seconds
        Time until the files expire. [default: the server's setting]
    json
        Print the accepted files as JSON; with --message an object of `files` and `answer`.
    """
    chosen = _chosen(files, name, message)
    text = None if message is None else text_given(message)
    client = client_of_folder(dir, access) if dir else access.client()
    sent = _Sent()
    try:
        recipient = asyncio.run(_recipient(client, workspace, ttl_seconds, chosen))
        if chosen.files:
            _send_files(client, recipient, chosen, sent, as_json=json)
        if text is not None:
            asyncio.run(_send_message(client, recipient, text, sent))
    finally:
        # Files accepted before a failure stay accepted.
        if json:
            print(json_text(sent.files if text is None else sent, indent=2))
    if sent.answer and not json:
        _show(sent.answer)
    _check_answer(sent.answer)


class _Sent(Struct):
    """What the server has accepted so far, and its answer to the message."""

    files: list[wire.StagedFile] = field(default_factory=list[wire.StagedFile])
    answer: dict[str, Any] | None = None


class _Recipient(Struct, frozen=True):
    """A workspace, what its server accepts, and how long files wait for it."""

    id: WorkspaceId
    limits: wire.UploadLimits
    ttl_seconds: int | None


def _show(answer: Mapping[str, Any]) -> None:
    """A message is queued for a workspace that polls; others answer it at once."""
    from restante.client.messages import said_in_answer

    if answer.get("status") == "queued":
        print("queued the message")
    elif "error" not in answer:
        print(printable(f"answered: {said_in_answer(answer).text or '(no text)'}"))


def _check_answer(answer: Mapping[str, Any] | None) -> None:
    """Raise what a workspace answered if that is a JSON-RPC error."""
    from restante.client.messages import error_in

    if answer and (reason := error_in(answer)) is not None:
        raise ServerRefused(f"The workspace answered with an error: {printable(reason)}")


def _chosen(arguments: Sequence[Path], name: str | None, message: str | None) -> "Chosen":
    """The files that the arguments stand for; all are looked at before the first is sent."""
    from restante.client.choosing import Choice, Chosen

    if not arguments and message is None:
        raise BadRequest("Say which files to send, or what with --message.")
    inputs = _checked_inputs(arguments, name, message)
    chosen = Chosen()
    for argument in arguments:
        if str(argument) == STANDARD_INPUT:
            chosen.files.append(Choice(None, name or ""))
        else:
            _add(chosen, argument, may_be_workspace=argument is not arguments[-1])
    if name and not inputs:
        chosen.rename_only(name)
    if chosen.skipped:
        print(f"restante: {chosen.shown_skipped()}", file=sys.stderr)
    return chosen


def _checked_inputs(arguments: Sequence[Path], name: str | None, message: str | None) -> int:
    """How often standard input is a file: once at most, and with a name."""
    inputs = sum(str(argument) == STANDARD_INPUT for argument in arguments)
    if inputs + (message == STANDARD_INPUT) > 1:
        raise BadRequest("Standard input can be read once: give - only once.")
    if inputs and not name:
        raise BadRequest("Say what to call standard input, for example --name report.txt")
    return inputs


def _add(chosen: "Chosen", argument: Path, *, may_be_workspace: bool) -> None:
    try:
        chosen.add(argument)
    except FileUnreadable as error:
        if may_be_workspace and not chosen.files:
            raise FileUnreadable(f"{error} One workspace comes first, then the files.") from error
        raise


async def _recipient(
    client: "AsyncClient", workspace: str, ttl_seconds: int | None, chosen: "Chosen"
) -> _Recipient:
    from restante.client.sending import DEFAULT_UPLOAD_LIMITS

    async with client:
        workspace_id = await workspace_named(client, workspace)
        limits = await client.upload_limits() if chosen.files else DEFAULT_UPLOAD_LIMITS
    return _Recipient(workspace_id, limits, ttl_seconds)


def _send_files(
    client: "AsyncClient",
    recipient: _Recipient,
    chosen: "Chosen",
    sent: _Sent,
    *,
    as_json: bool,
) -> None:
    from restante.client.sending import check_sizes

    with ExitStack() as until:
        # Not in an event loop, where Ctrl-C could not interrupt it.
        given = stored_input(recipient.limits.per_file_bytes, until) if chosen.has_input else None
        files = chosen.outgoing(given)
        check_sizes(files, recipient.limits)
        # JSON comes at the end, so standard error is free for the live line.
        lines = SentLines(
            Console(stderr=as_json),
            [choice.shown for choice in chosen.files],
            [file.part.size for file in files],
            is_quiet=as_json,
        )
        try:
            asyncio.run(_send_batches(client, recipient, files, sent, lines))
        finally:
            lines.summary()


async def _send_batches(
    client: "AsyncClient",
    recipient: _Recipient,
    files: "Sequence[Outgoing]",
    sent: _Sent,
    lines: SentLines,
) -> None:
    async with client:
        with lines.live():
            for batch in batches(files, recipient.limits):
                accepted = await client.send_files(
                    recipient.id, batch, ttl_seconds=recipient.ttl_seconds, progress=lines.sent
                )
                sent.files += accepted
                lines.accepted(len(batch), accepted)


async def _send_message(
    client: "AsyncClient", recipient: _Recipient, text: str, sent: _Sent
) -> None:
    async with client:
        sent.answer = await client.send_message(recipient.id, text, attachments=sent.files)


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
