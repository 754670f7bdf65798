"""`restante uploads`: the operator looks at uploads, reopens one, or lets one expire."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from uuid import UUID

import msgspec
from cyclopts import App, Group, Parameter
from cyclopts.validators import Number

from restante import wire
from restante.cli.flags import DATABASE, flags_for, settings_from
from restante.cli.sizes import shown_bytes
from restante.errors import BadRequest
from restante.ids import FileId, WorkspaceId, as_uuid
from restante.text import printable

if TYPE_CHECKING:
    from restante.delivery.admin import Expiry, UploadAdmin

    UploadsFlags = Any
else:
    UploadsFlags = flags_for("UploadsFlags", DATABASE)

Result = TypeVar("Result")
One = Annotated[str, Parameter(help="Which upload.")]
Its = Annotated[
    str | None,
    Parameter(help="The workspace it is for. Not needed; it is found sooner among very many."),
]
AsJson = Annotated[bool, Parameter(help="Print JSON.", negative=(), show_default=False)]
Flags = Annotated[UploadsFlags | None, Parameter(name="*")]


def register(app: App, group: Group) -> None:
    """Add the commands."""
    about = (
        "Look at uploads, reopen one, or let one expire.\n\n"
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
    List uploads, oldest first: what has waited longest stands at the top.

    Example: restante uploads list --state never_fetched

    Parameters
    ----------
    workspace
        Only those for this workspace.
    state
        Only those that were never fetched (waiting), were fetched but not acknowledged, are
        acknowledged and still kept, or have expired and are about to be swept.
    limit
        How many at most, up to 10000.
    after
        Go on after this file id, the last one of the page before.
    """
    of, start = _workspace_id(workspace), None if after is None else _file_id(after)
    page = _asked(
        flags, lambda uploads, now: uploads.page(of, state=state, after=start, limit=limit, now=now)
    )
    if json:
        _print_json(page)
    else:
        _print_page(page)


def show(
    file_id: One, /, *, workspace: Its = None, json: AsJson = False, flags: Flags = None
) -> None:
    """
    Show everything about one upload.

    Example: restante uploads show 0d6e3f1c-8a52-4f5e-9d55-1c4f0f4b7a11
    """
    one, its = _file_id(file_id), _workspace_id(workspace)
    upload = _asked(flags, lambda uploads, now: uploads.show(one, its, now=now))
    if json:
        _print_json(upload)
    else:
        _print_facts(upload)


def reopen(
    file_id: One, /, *, workspace: Its = None, json: AsJson = False, flags: Flags = None
) -> None:
    """
    Let an acknowledged file wait again, and announce it again to its workspace.

    For a workspace that acknowledged a file and then lost it, while its retention lasts.

    Example: restante uploads reopen 0d6e3f1c-8a52-4f5e-9d55-1c4f0f4b7a11
    """
    one, its = _file_id(file_id), _workspace_id(workspace)
    upload = _asked(flags, lambda uploads, now: uploads.reopen(one, its, now=now))
    if json:
        _print_json(upload)
    else:
        print(f"{_named(upload)} waits again, until {_moment(upload.expires_at)}.")


def expire(
    file_id: One, /, *, workspace: Its = None, json: AsJson = False, flags: Flags = None
) -> None:
    """
    Let a file that nobody has acknowledged expire now.

    It cannot be fetched any more, and the next sweep deletes it. This cannot be undone.

    Example: restante uploads expire 0d6e3f1c-8a52-4f5e-9d55-1c4f0f4b7a11
    """
    one, its = _file_id(file_id), _workspace_id(workspace)
    expiry = _asked(flags, lambda uploads, now: uploads.expire(one, its, now=now))
    if json:
        _print_json(expiry.upload)
    else:
        _print_expiry(expiry)


def _asked(flags: Any, ask: "Callable[[UploadAdmin, datetime], Awaitable[Result]]") -> Result:
    """What the inventory answers."""
    settings = settings_from(flags, dict(os.environ))

    async def answer() -> Result:
        from restante.server import wiring

        async with wiring.operator(settings) as operator:
            return await ask(operator.uploads, datetime.now(UTC))

    return asyncio.run(answer())


def _file_id(text: str) -> FileId:
    return FileId(_uuid(text, "a file id"))


def _workspace_id(text: str | None) -> WorkspaceId | None:
    return None if text is None else WorkspaceId(_uuid(text, "the id of a workspace"))


def _uuid(text: str, what: str) -> UUID:
    found = as_uuid(text)
    if found is None:
        raise BadRequest(f"{printable(text)} is not {what}; `restante uploads list` shows the ids.")
    return found


def _print_json(shown: msgspec.Struct) -> None:
    print(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())


def _print_page(page: wire.UploadPage) -> None:
    if not page.uploads:
        print("There are no such uploads.")
        return
    head = ("file id", "workspace", "state", "size", "created (UTC)", "ends (UTC)", "name")
    _print_columns([head, *(_row(upload) for upload in page.uploads)])
    if page.next_after:
        print(f"There are more; go on with --after {page.next_after}")


def _row(upload: wire.UploadView) -> Sequence[str]:
    return (
        str(upload.file_id),
        str(upload.workspace_id),
        upload.state,
        shown_bytes(upload.size),
        f"{upload.created_at:%Y-%m-%d %H:%M}",
        _end(upload),
        printable(upload.name),
    )


def _end(upload: wire.UploadView) -> str:
    if upload.acked_at:
        return f"acked {upload.acked_at:%Y-%m-%d %H:%M}"
    verb = "expired" if upload.state == "expired" else "expires"
    return f"{verb} {upload.expires_at:%Y-%m-%d %H:%M}"


def _print_columns(rows: Sequence[Sequence[str]]) -> None:
    """As wide as it gets: an id with its end cut off is worth nothing."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def _print_expiry(expiry: "Expiry") -> None:
    when = "has expired now"
    if not expiry.is_first:
        when = f"had expired already, at {_moment(expiry.upload.expires_at)}"
    print(f"{_named(expiry.upload)} {when}; the next sweep deletes it.")


def _print_facts(upload: wire.UploadView) -> None:
    facts = (
        ("file id", str(upload.file_id)),
        ("workspace", str(upload.workspace_id)),
        ("name", printable(upload.name)),
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
    _print_columns(facts)


def _named(upload: wire.UploadView) -> str:
    return f"{printable(upload.name)} ({upload.file_id}) of workspace {upload.workspace_id}"


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "-"
