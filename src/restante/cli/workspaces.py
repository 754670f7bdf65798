"""`restante workspaces`: list, show, rename and remove workspaces; issue and revoke tokens."""

import asyncio
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Group, Parameter
from cyclopts.validators import Number
from msgspec import Struct

from restante import wire
from restante.cli.columns import print_labelled, print_sentence, print_table
from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import json_text, shown_bytes, shown_seconds
from restante.errors import BadRequest
from restante.ids import WorkspaceId
from restante.text import MAX_QUOTED, number_of, number_of_files, printable

if TYPE_CHECKING:
    from restante.server.operator import Operator

    WorkspacesFlags = Any
else:
    WorkspacesFlags = flags_for("WorkspacesFlags", DATABASE)

Result = TypeVar("Result")
WorkspaceText = Annotated[str, Parameter(help="The workspace's name or id.")]
AsJson = Annotated[bool, Parameter(help="Print JSON.", negative=(), show_default=False)]
Flags = Annotated[WorkspacesFlags | None, Parameter(name="*")]
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]


def register(app: App, group: Group) -> None:
    """Add the commands."""
    about = (
        "List, show, rename or remove workspaces; issue and revoke their tokens.\n\n"
        "A workspace is given by its name or its id. A name that several have is refused, with the "
        "ids to choose from.\n\n"
        "Example: restante workspaces list"
    )
    workspaces = App(name="workspaces", group=group, help=about)
    workspaces.command(list_, name="list")
    for command in (show, rename, remove):
        workspaces.command(command)
    token = App(
        name="token",
        help="Issue or revoke the token of a workspace; it has one at a time.\n\n"
        "Example: restante workspaces token issue laptop",
    )
    for command in (issue, revoke):
        token.command(command)
    workspaces.command(token)
    app.command(workspaces)


def list_(
    *,
    all: Switch = False,  # noqa: A002 - the flag's name
    limit: Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))] = 100,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    List workspaces: when they were seen, and what waits for them.

    Those that were seen last come first. A workspace is online if it polls, watches or fetches, or
    did so in the last two and a half minutes.

    Example: restante workspaces list

    Parameters
    ----------
    all
        Also list removed workspaces, of which something is kept.
    limit
        Maximum number of workspaces, up to 10000.
    """
    found = _run(
        flags, lambda operator: operator.workspaces.recent(limit=limit + 1, with_removed=all)
    )
    shown, has_more = found[:limit], len(found) > limit
    if json:
        print(json_text(shown, indent=2))
        return
    _print_list(shown, now=datetime.now(UTC))
    if has_more:
        print(f"There are more; --limit {min(2 * limit, 10_000)} shows them.")


def show(workspace: WorkspaceText, /, *, json: AsJson = False, flags: Flags = None) -> None:
    """
    Show all details of one workspace.

    Example: restante workspaces show laptop
    """
    view, held = _run(flags, lambda operator: _looked_at(operator, workspace))
    if json:
        print(json_text(view, indent=2))
    else:
        _print_details(view, held, now=datetime.now(UTC))


def rename(
    workspace: WorkspaceText,
    name: Annotated[str, Parameter(help="The new name.", allow_leading_hyphen=True)],
    /,
    *,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    Give a workspace another name.

    A name that another workspace has is refused. The workspace can change it when it registers
    again.

    Example: restante workspaces rename laptop ana-laptop
    """

    async def act(operator: "Operator") -> wire.WorkspaceView:
        workspace_id = await operator.workspaces.id_of(workspace)
        await operator.workspaces.rename(workspace_id, name)
        return await operator.workspaces.show(workspace_id)

    view = _run(flags, act)
    if json:
        print(json_text(view, indent=2))
    else:
        print_sentence(f"{view.id} is named {_short(view.name)} now.")


class _Removal(Struct):
    """What was removed, and what was kept for it."""

    workspace: wire.WorkspaceView
    files: wire.HeldFiles
    expired_files: int = 0


def remove(
    workspace: WorkspaceText,
    /,
    *,
    yes: Switch = False,
    expire_files: Switch = False,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    Remove a workspace. Its token stops working at once.

    Files that wait for it are kept until they expire, and rows of its feed for the feed's
    retention; sweeps delete them then, and the workspace with the last of them. Until then the
    admin can register the same id again.

    Example: restante workspaces remove laptop --expire-files --yes

    Parameters
    ----------
    yes
        Do not ask. Required if the input is not a terminal.
    expire_files
        Also expire the files that wait for it: the next sweep deletes them. This cannot be undone.
    """
    if json and not yes:
        raise BadRequest("Nothing was removed: --json does not ask, so it needs --yes.")

    async def act(operator: "Operator") -> _Removal:
        view, held = await _looked_at(operator, workspace)
        if view.status == "removed" and not expire_files:
            raise BadRequest(f"The workspace {view.id} was removed already.")
        if not yes:
            _ask(view, held, expires=expire_files)
        return await _removed(operator, view, held, expires=expire_files)

    removal = _run(flags, act)
    if json:
        print(json_text(removal, indent=2))
    else:
        _print_removal(removal)


def issue(workspace: WorkspaceText, /, *, json: AsJson = False, flags: Flags = None) -> None:
    """
    Give a workspace a new token; the old one stops working at once.

    The token is printed alone on standard output, and never again.

    Example: restante workspaces token issue laptop > token
    """

    async def act(operator: "Operator") -> tuple[wire.WorkspaceView, wire.IssuedToken]:
        workspace_id = await operator.workspaces.id_of(workspace)
        issued = await operator.workspaces.reissue_token(workspace_id)
        return await operator.workspaces.show(workspace_id), issued

    view, issued = _run(flags, act)
    if json:
        print(json_text(issued, indent=2))
        return
    print(
        f"The token of {_short(view.name)} ({view.id}), which is not shown again:", file=sys.stderr
    )
    print(issued.auth_token)


def revoke(workspace: WorkspaceText, /, *, json: AsJson = False, flags: Flags = None) -> None:
    """
    Revoke a workspace's token: what it has open ends at once.

    The workspace stays registered, and files and messages still wait for it.

    Example: restante workspaces token revoke laptop
    """

    async def act(operator: "Operator") -> wire.WorkspaceView:
        workspace_id = await operator.workspaces.id_of(workspace)
        await operator.workspaces.revoke_token(workspace_id)
        return await operator.workspaces.show(workspace_id)

    view = _run(flags, act)
    if json:
        print(json_text(view, indent=2))
    else:
        print_sentence(
            f"{_short(view.name)} ({view.id}) has no token now. "
            "`restante workspaces token issue` gives it a new one."
        )


def _run(flags: Any, action: "Callable[[Operator], Awaitable[Result]]") -> Result:
    async def run() -> Result:
        async with operator_for(flags) as operator:
            return await action(operator)

    return asyncio.run(run())


async def _looked_at(operator: "Operator", text: str) -> tuple[wire.WorkspaceView, wire.HeldFiles]:
    workspace_id = await operator.workspaces.id_of(text)
    view = await operator.workspaces.show(workspace_id)
    return view, await operator.uploads.held_for(workspace_id, now=datetime.now(UTC))


async def _removed(
    operator: "Operator", view: wire.WorkspaceView, held: wire.HeldFiles, *, expires: bool
) -> _Removal:
    """First the workspace, so that nothing new is sent to it, then its files."""
    workspace_id = WorkspaceId(view.id)
    if view.status == "active":
        await operator.workspaces.remove(workspace_id)
    expired = 0
    if expires:
        expired = await operator.uploads.expire_waiting(workspace_id, now=datetime.now(UTC))
    return _Removal(await operator.workspaces.show(workspace_id), held, expired)


def _ask(view: wire.WorkspaceView, held: wire.HeldFiles, *, expires: bool) -> None:
    """Say what would happen, and raise BadRequest unless the answer is yes."""
    for sentence in _consequences(view, held, expires=expires):
        print_sentence(sentence)
    if not sys.stdin.isatty():
        raise BadRequest("Nothing was removed. To remove it, repeat with --yes.")
    try:
        answer = input("Remove it? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in {"y", "yes"}:
        raise BadRequest("Nothing was removed.")


def _consequences(view: wire.WorkspaceView, held: wire.HeldFiles, *, expires: bool) -> list[str]:
    name = _short(view.name)
    sentences = [f"{name} ({view.id}) would be removed, and its token stops working."]
    if held.waiting_files:
        end = "The next sweep deletes them."
        if not expires:
            end = f"{_until(held)} --expire-files deletes them with the next sweep."
        sentences.append(f"{_waiting(held)} for it. {end}")
    if view.unread_rows:
        sentences.append(
            f"It has not read {number_of(view.unread_rows, 'row')} of its feed, kept for the "
            "feed's retention."
        )
    return sentences


def _waiting(held: wire.HeldFiles) -> str:
    verb = "waits" if held.waiting_files == 1 else "wait"
    return f"{number_of_files(held.waiting_files)} ({shown_bytes(held.waiting_bytes)}) {verb}"


def _until(held: wire.HeldFiles) -> str:
    return f"They expire, the last at {_moment(held.waiting_until)}; then a sweep deletes them."


def _print_removal(removal: _Removal) -> None:
    view = removal.workspace
    print_sentence(f"{_short(view.name)} ({view.id}) is removed.")
    if removal.expired_files:
        count = number_of_files(removal.expired_files)
        print_sentence(f"{count} expired; the next sweep deletes them.")
    elif removal.files.waiting_files:
        print_sentence(f"{_waiting(removal.files)} for nobody. {_until(removal.files)}")


def _print_list(found: Sequence[wire.WorkspaceEntry], *, now: datetime) -> None:
    from restante.workspaces.rules import quoted_if_odd

    if not found:
        print("There is no workspace. `restante connect` registers one.")
        return
    names = [quoted_if_odd(one.name) for one in found]
    count = Counter(names)
    rows = [
        (
            _seen(one, now=now),
            str(one.waiting_files or "-"),
            shown_bytes(one.waiting_bytes) if one.waiting_files else "-",
            str(one.unread_rows or "-"),
            name,
        )
        for one, name in zip(found, names, strict=True)
    ]
    # Where the name would not do, the id is shown, which other commands take.
    ids = {
        place: str(one.id)
        for place, (one, name) in enumerate(zip(found, names, strict=True))
        if count[name] > 1 or name != one.name or one.status == "removed"
    }
    print_table(("seen", "files", "size", "unread", "name"), rows, right=(1, 2, 3), below=ids)


def _seen(one: wire.WorkspaceEntry | wire.WorkspaceView, *, now: datetime) -> str:
    if one.status == "removed":
        return "removed"
    if one.is_online:
        return "online"
    return f"{shown_seconds(max((now - one.last_seen_at).total_seconds(), 0))} ago"


def _print_details(view: wire.WorkspaceView, held: wire.HeldFiles, *, now: datetime) -> None:
    tasks = f"{view.active_tasks} {_short(view.current_task)}".rstrip()
    lines = [
        ("name", printable(view.name)),
        ("id", str(view.id)),
        ("seen", f"{_seen(view, now=now)}, at {_moment(view.last_seen_at)}"),
        ("registered", _moment(view.created_at)),
        ("mode", f"{view.delivery_mode} {printable(view.url or '')}".rstrip()),
        ("token", "yes" if view.has_token else "none"),
        ("tasks", tasks if view.active_tasks or view.current_task else "none"),
        ("waiting", _shown_files(held.waiting_files, held.waiting_bytes)),
        ("", f"the last expires at {_moment(held.waiting_until)}" if held.waiting_until else ""),
        ("acknowledged", _shown_files(held.acked_files, held.acked_bytes)),
        (
            "unread",
            f"{number_of(view.unread_rows, 'row')} of its feed" if view.unread_rows else "none",
        ),
        ("parent", str(view.parent_id) if view.parent_id else ""),
    ]
    print_labelled([(label, text) for label, text in lines if text])


def _shown_files(count: int, size: int) -> str:
    return f"{number_of_files(count)}, {shown_bytes(size)}" if count else "none"


def _short(text: str) -> str:
    return printable(text, max_length=MAX_QUOTED)


def _moment(moment: datetime | None) -> str:
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC" if moment else "-"
