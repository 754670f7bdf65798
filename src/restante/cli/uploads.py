"""`restante uploads`: list, show, reopen or expire uploads."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import UUID

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from restante import wire
from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import json_text, shown_bytes
from restante.errors import BadRequest
from restante.ids import FileId, WorkspaceId, as_uuid
from restante.text import printable

if TYPE_CHECKING:
    from restante.delivery.admin import Expiry, UploadAdmin

    UploadsFlags = Any
else:
    UploadsFlags = flags_for("UploadsFlags", DATABASE)

Result = TypeVar("Result")
FileIdText = Annotated[str, Parameter(help="The upload's file id.")]
WorkspaceText = Annotated[
    str | None,
    Parameter(help="The upload's workspace. Optional; speeds up the search in a large table."),
]
AsJson = Annotated[bool, Parameter(help="Print JSON.", negative=(), show_default=False)]
Flags = Annotated[UploadsFlags | None, Parameter(name="*")]


def register(app: App, group: Group) -> None:
    """Add the commands."""
    about = (
        "List, show, reopen or expire uploads.\n\n"
        "Example: restante uploads list --state never_fetched"
    )
    uploads = App(name="uploads", group=group, help=about)
    uploads.command(list_, name="list")
    for command in (show, reopen, expire):
        uploads.command(command)
    app.command(uploads)


def list_(
    *,
    workspace: str | None = None,
    state: wire.UploadState | None = None,
    limit: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 50,
    after: str | None = None,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    List uploads, oldest first.

    Example: restante uploads list --state never_fetched

    Parameters
    ----------
    workspace
        Only uploads for this workspace id.
    state
        Only uploads in this state: never_fetched; fetched but not acknowledged; acked and still
        retained; expired and not yet swept.
    limit
        Maximum number of uploads, up to 10000.
    after
        Continue after this file id, the last one of the previous page.
    """
    of, start = _workspace_id(workspace), None if after is None else _file_id(after)
    page = _run(
        flags, lambda uploads, now: uploads.page(of, state=state, after=start, limit=limit, now=now)
    )
    if json:
        print(json_text(page, indent=2))
    else:
        _print_page(page)


def show(
    file_id: FileIdText,
    /,
    *,
    workspace: WorkspaceText = None,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    Show all details of one upload.

    Example: restante uploads show 0d6e3f1c-8a52-4f5e-9d55-1c4f0f4b7a11
    """
    key = _file_id(file_id), _workspace_id(workspace)
    upload = _run(flags, lambda uploads, now: uploads.show(*key, now=now))
    if json:
        print(json_text(upload, indent=2))
    else:
        _print_details(upload)


def reopen(
    file_id: FileIdText,
    /,
    *,
    workspace: WorkspaceText = None,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    Make an acknowledged file available again and announce it to its workspace.

    For a workspace that lost a file after acknowledging it. Works until the retention of
    acknowledged files is over.

    Example: restante uploads reopen 0d6e3f1c-8a52-4f5e-9d55-1c4f0f4b7a11
    """
    key = _file_id(file_id), _workspace_id(workspace)
    upload = _run(flags, lambda uploads, now: uploads.reopen(*key, now=now))
    if json:
        print(json_text(upload, indent=2))
    else:
        print(f"{_named(upload)} is available again until {_moment(upload.expires_at)}.")


def expire(
    file_id: FileIdText,
    /,
    *,
    workspace: WorkspaceText = None,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    Expire an unacknowledged file now.

    The file can no longer be fetched, and the next sweep deletes it. This cannot be undone.

    Example: restante uploads expire 0d6e3f1c-8a52-4f5e-9d55-1c4f0f4b7a11
    """
    key = _file_id(file_id), _workspace_id(workspace)
    expiry = _run(flags, lambda uploads, now: uploads.expire(*key, now=now))
    if json:
        print(json_text(expiry.upload, indent=2))
    else:
        _print_expiry(expiry)


def _run(flags: Any, action: "Callable[[UploadAdmin, datetime], Awaitable[Result]]") -> Result:
    async def run() -> Result:
        async with operator_for(flags) as operator:
            return await action(operator.uploads, datetime.now(UTC))

    return asyncio.run(run())


def _file_id(text: str) -> FileId:
    return FileId(_uuid(text, "a file id"))


def _workspace_id(text: str | None) -> WorkspaceId | None:
    return None if text is None else WorkspaceId(_uuid(text, "a workspace id"))


def _uuid(text: str, what: str) -> UUID:
    found = as_uuid(text)
    if found is None:
        raise BadRequest(
            f"{printable(text)} is not {what}; run `restante uploads list` to see the ids."
        )
    return found


def _print_page(page: wire.UploadPage) -> None:
    if not page.uploads:
        print("No uploads match.")
        return
    head = ("file id", "workspace", "state", "size", "created (UTC)", "ends (UTC)", "name")
    _print_columns([head, *(_row(upload) for upload in page.uploads)])
    if page.next_after:
        print(f"There are more: continue with --after {page.next_after}")


def _row(upload: wire.UploadView) -> Sequence[str]:
    return (
        str(upload.file_id),
        str(upload.workspace_id),
        upload.state,
        shown_bytes(upload.size),
        f"{upload.created_at:%Y-%m-%d %H:%M}",
        _end(upload),
        printable(upload.display_name),
    )


def _end(upload: wire.UploadView) -> str:
    if upload.acked_at:
        return f"acked {upload.acked_at:%Y-%m-%d %H:%M}"
    verb = "expired" if upload.state == "expired" else "expires"
    return f"{verb} {upload.expires_at:%Y-%m-%d %H:%M}"


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, without truncating to the terminal's width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_expiry(expiry: "Expiry") -> None:
    what = "is expired now"
    if not expiry.is_first:
        what = f"expired earlier, at {_moment(expiry.upload.expires_at)}"
    print(f"{_named(expiry.upload)} {what}; the next sweep deletes it.")


def _print_details(upload: wire.UploadView) -> None:
    details = (
        ("file id", str(upload.file_id)),
        ("workspace", str(upload.workspace_id)),
        ("name", printable(upload.name)),
        ("display name", printable(upload.display_name)),
        ("type", printable(upload.mime_type)),
        ("size", f"{upload.size} bytes"),
        ("sha256", upload.sha256),
        ("state", upload.state),
        ("created", _moment(upload.created_at)),
        ("fetched", _moment(upload.fetched_at)),
        ("acked", _moment(upload.acked_at)),
        ("expires", _moment(upload.expires_at)),
        ("reopen until", _moment(upload.reopenable_until)),
        ("bucket", _moment(upload.bucket)),
        ("partition", upload.partition or "gone"),
    )
    _print_columns(details)


def _named(upload: wire.UploadView) -> str:
    return f"{printable(upload.name)} ({upload.file_id}) of workspace {upload.workspace_id}"


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "-"
