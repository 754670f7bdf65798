"""`restante oplog`: track tables, so that other nodes get their changes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from cyclopts import App, Group, Parameter

from restante.cli import (
    oplog_index,
    oplog_parked,
    oplog_peers,
    oplog_plan,
    oplog_reset,
    oplog_status,
    oplog_verify,
)
from restante.cli.columns import print_sentence, print_table
from restante.cli.flags import DATABASE, flags_for, operator_for, settings_from
from restante.cli.output import json_text, shown_bytes
from restante.errors import BadRequest, TableNotTracked
from restante.text import printable
from restante.wire.oplog_tables import TrackedTableView

if TYPE_CHECKING:
    from restante.database.pool import Database
    from restante.oplog.tracking.own_limits import OwnLimits

    OplogFlags = Any
else:
    OplogFlags = flags_for("OplogFlags", (*DATABASE, "self_url"))

Result = TypeVar("Result")
TableName = Annotated[str, Parameter(help="The table, or schema.table; quoted as in SQL.")]
TrackedName = Annotated[str, Parameter(help="The table, or the name that peers use.")]
Days = float | Literal["default"] | None
Bytes = int | Literal["default"] | None
AsJson = Annotated[bool, Parameter(help="Print JSON.", negative=(), show_default=False)]
Flags = Annotated[OplogFlags | None, Parameter(name="*")]


def register(app: App, group: Group) -> None:
    """Add the commands."""
    about = (
        "Keep tables on several nodes in step.\n\n"
        "Changes of tracked tables are logged, and nodes exchange their logs.\n\n"
        "Example: restante oplog track articles"
    )
    oplog = App(name="oplog", group=group, help=about)
    oplog.command(track)
    oplog.command(untrack)
    oplog.command(tables_, name="tables")
    oplog.command(pause)
    oplog.command(resume)
    for commands in (
        oplog_peers,
        oplog_parked,
        oplog_status,
        oplog_plan,
        oplog_verify,
        oplog_reset,
        oplog_index,
    ):
        commands.register(oplog)
    app.command(oplog)


def track(
    table: TableName,
    /,
    *,
    name: Annotated[str | None, Parameter(name="--as")] = None,
    key_map: Annotated[list[str] | None, Parameter(negative=())] = None,
    retention_days: Days = None,
    cap_days: Days = None,
    cap_bytes: Bytes = None,
    force: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    Log every change of a table from now on, or change the limits of its log.

    The table needs a primary key. Records that it has already reach peers by a snapshot. Writers
    wait while the triggers are created.

    Of a table that is tracked already only the limits can be given: the server follows at its next
    sweep.

    Example: restante oplog track articles --retention-days 30

    Parameters
    ----------
    name
        What peers call the table. [default: its name, with the schema unless that is public]
    key_map
        What a peer of the older protocol calls a column: name_in_json=column. Repeatable.
    retention_days
        How long its ops are kept once every peer has read them; 0: for ever, default: as the server
        is set. [default: as the server is set]
    cap_days
        Older ops go although a peer has not read them, which is evicted; 0: never, default: as the
        server is set. [default: as the server is set]
    cap_bytes
        The oldest ops go when its log takes more on disk, although a peer has not read them; 0 or
        default: never. [default: never]
    force
        Track it although its keys come from a sequence: each node must have numbers of its own. Or
        although another role owns it, which can then act as Restante's role.
    """
    from restante.oplog.tracking import capture

    limits = _own_limits(retention_days, cap_days, cap_bytes)
    wanted = capture.Wanted(table, name, _key_map(key_map or ()), forced=force, limits=limits)

    async def start(db: "Database", host: str | None, now: datetime) -> TrackedTableView:
        if limits.are_given and await _is_tracked(db, table):
            return await _view(db, (await capture.set_limits(db, table, limits)).name)
        started = await capture.track(db, wanted, host=host, now=now)
        return await _view(db, started.table.name, started.warnings)

    view = _run(flags, start)
    if json:
        print(json_text(view, indent=2))
        return
    print(f"Changes of {printable(view.table)} are logged; peers call it {printable(view.name)}.")
    if view.floor:
        print("The records that it has now reach peers by a snapshot.")
    if sentence := _limits_sentence(view):
        print(sentence)
    for warning in view.warnings:
        print(f"Note: {printable(warning)}")


def _limits_sentence(view: TrackedTableView) -> str:
    """How long its ops are kept, if not as long as those of other tables."""
    said = list[str]()
    if view.retention_days is not None:
        said.append(f"{view.retention_days:g} days" if view.retention_days else "for ever")
    if view.cap_days:
        said.append(f"at most {view.cap_days:g} days")
    if view.cap_bytes:
        said.append(f"at most {shown_bytes(view.cap_bytes)}")
    return f"Its ops are kept: {', '.join(said)}." if said else ""


def untrack(table: TrackedName, /, *, json: AsJson = False, flags: Flags = None) -> None:
    """
    Log no more changes of a table, and drop its log.

    The table and its records stay. Peers keep theirs, and hear nothing more of it: neither what
    they have not read yet, which is said, nor, if the table is tracked again, what is deleted
    until then.

    Example: restante oplog untrack articles
    """
    from restante.oplog import status
    from restante.oplog.tracking import capture, relations

    async def end(db: "Database", _host: str | None, now: datetime) -> tuple[str, list[str]]:
        async with db.connection() as connection:
            name = (await relations.find(connection, table)).name
            unread = await status.not_read_by(connection, name, now=now)
        return (await capture.untrack(db, table)).name, unread

    name, unread = _run(flags, end)
    if json:
        print(json_text({"name": name, "not_read_by": unread}, indent=2))
        return
    print(f"{printable(name)} is not tracked any more; its log is dropped.")
    for host in unread:
        print(f"Note: {printable(host)} had not read all of it, and does not get the rest.")


def tables_(*, json: AsJson = False, flags: Flags = None) -> None:
    """
    List the tracked tables, and what is wrong with the capture of their changes.

    Example: restante oplog tables
    """
    views = _run(flags, lambda db, _host, _now: _views(db))
    if json:
        print(json_text({"tables": views}, indent=2))
    elif not views:
        print_sentence("No table is tracked. Start with `restante oplog track TABLE`.")
    else:
        _print_tables(views)


def pause(table: TrackedName, /, *, json: AsJson = False, flags: Flags = None) -> None:
    """
    Log no changes of a table until `resume`, for a bulk load or a TRUNCATE.

    Example: restante oplog pause articles
    """
    from restante.oplog.tracking import capture

    async def stop(db: "Database", _host: str | None, now: datetime) -> TrackedTableView:
        return await _view(db, (await capture.pause(db, table, now=now)).name)

    view = _run(flags, stop)
    if json:
        print(json_text(view, indent=2))
    else:
        print(
            f"Changes of {printable(view.name)} are not logged until "
            f"`restante oplog resume {printable(view.name)}`."
        )


def resume(table: TrackedName, /, *, json: AsJson = False, flags: Flags = None) -> None:
    """
    Log changes of a paused table again.

    What was logged before the pause is dropped, and peers take a snapshot.

    Example: restante oplog resume articles
    """
    from restante.oplog.tracking import capture

    async def start(db: "Database", host: str | None, now: datetime) -> TrackedTableView:
        return await _view(db, (await capture.resume(db, table, host=host, now=now)).name)

    view = _run(flags, start)
    if json:
        print(json_text(view, indent=2))
    else:
        print(f"Changes of {printable(view.name)} are logged again; peers take a snapshot of it.")


def _run(
    flags: Any, action: "Callable[[Database, str | None, datetime], Awaitable[Result]]"
) -> Result:
    """Run it with the database, the name of this node if one is set, and the time."""

    async def run() -> Result:
        from restante.oplog.peers import normalised

        url = settings_from(flags).self_url
        host = normalised(url) if url else None
        async with operator_for(flags) as operator:
            return await action(operator.db, host, datetime.now(UTC))

    return asyncio.run(run())


async def _is_tracked(db: "Database", table: str) -> bool:
    from restante.oplog.tracking import relations

    async with db.connection() as connection:
        with suppress(TableNotTracked):
            await relations.find(connection, table)
            return True
    return False


def _own_limits(
    retention_days: "float | Literal['default'] | None",
    cap_days: "float | Literal['default'] | None",
    cap_bytes: "int | Literal['default'] | None",
) -> "OwnLimits":
    from restante.oplog.tracking.own_limits import DEFAULT, OwnLimits

    given = (retention_days, cap_days, cap_bytes)
    if any(isinstance(one, int | float) and not 0 <= one <= 2**62 for one in given):
        raise BadRequest("A limit must not be negative.")
    days, cap, size = (DEFAULT if one == "default" else one for one in given)
    return OwnLimits(days, cap, None if size is None else int(size))


def _key_map(pairs: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for pair in pairs:
        name, separator, column = pair.partition("=")
        if not (separator and name and column) or name in found:
            raise BadRequest(f"{printable(pair)} is not name_in_json=column, or is given twice.")
        found[name] = column
    return found


async def _view(db: "Database", name: str, warnings: Sequence[str] = ()) -> TrackedTableView:
    from msgspec.structs import replace

    (view,) = [view for view in await _views(db) if view.name == name]
    return replace(view, warnings=list(warnings))


async def _views(db: "Database") -> list[TrackedTableView]:
    from restante.oplog import tables, ulids
    from restante.oplog.tracking import own_limits, schema_changes

    async with db.connection() as connection:
        tracked = await tables.all_tables(connection)
        problems = {one.table: one.sentence for one in await schema_changes.problems(connection)}
        sizes = await tables.log_sizes(connection)
        limits = await own_limits.of_tables(connection)
    return [
        TrackedTableView(
            table.name,
            f"{table.schema_name}.{table.table_name}",
            list(table.key_columns),
            table.state,
            dict(table.key_map),
            sizes.get(table.id, 0),
            ulids.text_of(table.floor) if table.floor != ulids.LOWEST else None,
            ulids.moment_of(table.floor) if table.floor != ulids.LOWEST else None,
            problems.get(table.name),
            retention_days=limits[table.id].retention_days,
            cap_days=limits[table.id].cap_days,
            cap_bytes=limits[table.id].cap_bytes,
        )
        for table in tracked
    ]


def _print_tables(views: Sequence[TrackedTableView]) -> None:
    head = ("state", "log", "floor (UTC)", "key", "table")
    print_table(head, [_row(view) for view in views], right=[1])
    for view in views:
        if view.problem:
            print_sentence(f"Problem with {printable(view.name)}: {printable(view.problem)}")


def _row(view: TrackedTableView) -> Sequence[str]:
    is_usual = view.table == f"public.{view.name}"
    return (
        view.state,
        shown_bytes(view.log_bytes),
        f"{view.floor_at:%Y-%m-%d %H:%M:%S}" if view.floor_at else "-",
        printable(", ".join(view.key)),
        view.name if is_usual else f"{view.name} ({view.table})",
    )
