"""`restante uploads`: list, show, reopen or expire uploads."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number
from rich.cells import cell_len

from restante import wire
from restante.cli.columns import (
    NAME_CELLS,
    Names,
    print_labelled,
    print_sentence,
    print_table,
    terminal_width,
    within,
)
from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import json_text, shown_bytes
from restante.errors import BadRequest
from restante.ids import FileId, WorkspaceId, as_uuid
from restante.text import MAX_QUOTED, printable

if TYPE_CHECKING:
    from restante.delivery.admin import Expiry, UploadAdmin
    from restante.server.operator import Operator

    UploadsFlags = Any
else:
    UploadsFlags = flags_for("UploadsFlags", DATABASE)

Result = TypeVar("Result")
FileIdText = Annotated[str, Parameter(help="The upload's file id.")]
WorkspaceText = Annotated[
    str | None,
    Parameter(
        help="The upload's workspace, by name or id. Optional; speeds up the search in a large "
        "table."
    ),
]
AsJson = Annotated[bool, Parameter(help="Print JSON.", negative=(), show_default=False)]
Flags = Annotated[UploadsFlags | None, Parameter(name="*")]


_HEAD = ("file id", "state", "size", "created (UTC)", "ends (UTC)", "workspace", "name")


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
        Only uploads for this workspace, given by its name or id.
    state
        Only uploads in this state: never_fetched; fetched but not acknowledged; acked and still
        retained; expired and not yet swept.
    limit
        Maximum number of uploads, up to 10000.
    after
        Continue after this file id, the last one of the previous page.
    """
    start = None if after is None else _file_id(after)

    async def act(operator: "Operator", now: datetime) -> tuple[wire.UploadPage, Names]:
        of = await _id_of(operator, workspace)
        page = await operator.uploads.page(of, state=state, after=start, limit=limit, now=now)
        return page, await operator.workspaces.labels({one.workspace_id for one in page.uploads})

    page, names = _run(flags, act)
    if json:
        print(json_text(page, indent=2))
    else:
        _print_page(page, names)


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
    upload, name = _run_on(flags, file_id, workspace, lambda uploads: uploads.show, lambda one: one)
    if json:
        print(json_text(upload, indent=2))
    else:
        _print_details(upload, name)


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
    upload, name = _run_on(
        flags, file_id, workspace, lambda uploads: uploads.reopen, lambda one: one
    )
    if json:
        print(json_text(upload, indent=2))
    else:
        print_sentence(
            f"{_named(upload, name)} is available again until {_moment(upload.expires_at)}."
        )


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
    expiry, name = _run_on(
        flags, file_id, workspace, lambda uploads: uploads.expire, lambda one: one.upload
    )
    if json:
        print(json_text(expiry.upload, indent=2))
    else:
        _print_expiry(expiry, name)


def _run(flags: Any, action: "Callable[[Operator, datetime], Awaitable[Result]]") -> Result:
    async def run() -> Result:
        async with operator_for(flags) as operator:
            return await action(operator, datetime.now(UTC))

    return asyncio.run(run())


def _run_on(
    flags: Any,
    file_id: str,
    workspace: str | None,
    action: "Callable[[UploadAdmin], Callable[..., Awaitable[Result]]]",
    upload_of: Callable[[Result], wire.UploadView],
) -> tuple[Result, str]:
    """Run an action on one upload; returns its result, and what to call the workspace."""
    file = _file_id(file_id)

    async def act(operator: "Operator", now: datetime) -> tuple[Result, str]:
        of = await _id_of(operator, workspace)
        result = await action(operator.uploads)(file, of, now=now)
        owner = upload_of(result).workspace_id
        return result, (await operator.workspaces.labels([owner]))[owner]

    return _run(flags, act)


async def _id_of(operator: "Operator", workspace: str | None) -> WorkspaceId | None:
    return None if workspace is None else await operator.workspaces.id_of(workspace)


def _file_id(text: str) -> FileId:
    found = as_uuid(text)
    if found is None:
        shown = printable(text, max_length=MAX_QUOTED)
        raise BadRequest(f"{shown} is not a file id; `restante uploads list` shows the ids.")
    return FileId(found)


def _print_page(page: wire.UploadPage, names: Names) -> None:
    if not page.uploads:
        print("No uploads match.")
        return
    rows = [_row(upload, names) for upload in page.uploads]
    if _is_too_wide(rows):
        for upload in page.uploads:
            _print_entry(upload, names[upload.workspace_id])
    else:
        print_table(_HEAD, rows, right=(2,))
    if page.next_after:
        print_sentence(f"There are more: continue with --after {page.next_after}")


def _is_too_wide(rows: Sequence[Sequence[str]]) -> bool:
    """Whether a terminal would break the lines, so that each upload gets several."""
    width = terminal_width()
    if width is None:
        return False
    sizes = (max(cell_len(cell) for cell in column) for column in zip(_HEAD, *rows, strict=True))
    return sum(sizes) + 2 * (len(_HEAD) - 1) > width


def _row(upload: wire.UploadView, names: Names) -> Sequence[str]:
    return (
        str(upload.file_id),
        upload.state,
        shown_bytes(upload.size),
        f"{upload.created_at:%Y-%m-%d %H:%M}",
        _end(upload),
        within(names[upload.workspace_id], NAME_CELLS),
        printable(upload.display_name),
    )


def _print_entry(upload: wire.UploadView, name: str) -> None:
    """An upload in four lines of at most 60 columns; a longer name is cut."""
    print(upload.file_id)
    width = (terminal_width() or 60) - 2
    for line in (
        within(upload.display_name, width),
        within(f"to {name}", width),
        f"{upload.state}, {shown_bytes(upload.size)}, {_end(upload)} UTC",
    ):
        print(f"  {line}")


def _end(upload: wire.UploadView) -> str:
    if upload.acked_at:
        return f"acked {upload.acked_at:%Y-%m-%d %H:%M}"
    verb = "expired" if upload.state == "expired" else "expires"
    return f"{verb} {upload.expires_at:%Y-%m-%d %H:%M}"


def _print_expiry(expiry: "Expiry", name: str) -> None:
    what = "is expired now"
    if not expiry.is_first:
        what = f"expired earlier, at {_moment(expiry.upload.expires_at)}"
    print_sentence(f"{_named(expiry.upload, name)} {what}; the next sweep deletes it.")


def _print_details(upload: wire.UploadView, name: str) -> None:
    details = (
        ("file id", str(upload.file_id)),
        ("workspace", name),
        ("", str(upload.workspace_id) if name != str(upload.workspace_id) else ""),
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
    print_labelled([(label, text) for label, text in details if text])


def _named(upload: wire.UploadView, name: str) -> str:
    return f"{printable(upload.name)} ({upload.file_id}) of {within(name, NAME_CELLS)}"


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "-"
