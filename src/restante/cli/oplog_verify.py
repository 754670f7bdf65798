"""`restante oplog verify` and `resync`: compare tables with a peer's, and repair one from it."""

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TextColumn

from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import Console, json_text
from restante.errors import BadRequest, PeerUnreachable
from restante.wire.oplog_digests import ResyncReport, TableReport, VerifyReport

if TYPE_CHECKING:
    from restante.database.pool import Database
    from restante.oplog.peers import Peer
    from restante.oplog.remote import Remote
    from restante.oplog.verifying.comparison import Progress

    VerifyFlags = Any
else:
    VerifyFlags = flags_for("VerifyFlags", DATABASE)

# Neither a success nor a failure of the command.
DIFFERS = 3
_SHOWN = {
    "missing_here": "missing here",
    "missing_there": "missing there",
    "different": "different",
}


def register(app: App) -> None:
    """Add the commands to `restante oplog`."""
    app.command(verify)
    app.command(resync)


def verify(
    peer: str,
    /,
    *,
    table: Annotated[list[str] | None, Parameter(negative=())] = None,
    after: str | None = None,
    wait_seconds: float = 60.0,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[VerifyFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Compare the tracked tables with a peer's, and list the keys that differ.

    Changes that are on their way do not count: what differs is looked at again when both nodes have
    read what the other had. Nothing is changed, and the servers may run.

    Exit codes: 0 equal; 3 not equal; 1 the comparison failed or could not be finished.

    Example: restante oplog verify https://b.example

    Parameters
    ----------
    peer
        The address of the peer.
    table
        Compare this table only. Can be repeated.
    after
        Go on after this key of the one table, as an interrupted comparison printed it.
    wait_seconds
        How long to wait for changes that are on their way.
    json
        Print JSON.
    """
    if after is not None and len(table or ()) != 1:
        raise BadRequest("--after is a key of one table: name it with --table.")
    report = asyncio.run(_verify(peer, table or [], after, wait_seconds, flags, quiet=json))
    if json:
        print(json_text(report, indent=2))
    else:
        show(Console(), report)
    sys.exit(_exit_code(report))


def resync(
    peer: str,
    table: str,
    /,
    *,
    wait_seconds: float = 60.0,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[VerifyFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Repair one table from a peer, by a snapshot of it, and list the keys that still differ.

    Records that differ become the peer's, and records that it lacks are deleted, unless this node
    has changed them later. What loses is in `restante oplog conflicts`. An interrupted snapshot
    goes on by itself, or with the same command.

    Exit codes: 0 the table is equal to the peer's; 3 it is not; 1 the resync failed.

    Example: restante oplog resync https://b.example pages

    Parameters
    ----------
    peer
        The address of the peer.
    table
        The table.
    wait_seconds
        How long to wait for changes that are on their way.
    json
        Print JSON.
    """
    report = asyncio.run(_resync(peer, table, wait_seconds, flags, quiet=json))
    if json:
        print(json_text(report, indent=2))
    else:
        _show_resync(Console(), report)
    sys.exit(0 if report.status == "complete" else DIFFERS)


async def _resync(
    url: str, table: str, wait_seconds: float, flags: Any, *, quiet: bool
) -> ResyncReport:
    from restante.oplog import tables
    from restante.oplog.verifying.comparison import Limits
    from restante.oplog.verifying.resync import Resync

    console = Console(stderr=True, quiet=quiet)
    async with calling(flags, url) as (db, peer, remote):
        async with db.connection() as connection:
            own_host = await tables.own_host(connection)
        with console.status(f"{table}: waiting") as shown:
            return await Resync(
                db,
                remote,
                peer,
                own_host,
                lambda: datetime.now(UTC),
                lambda phase, records: shown.update(f"{table}: {phase}, {records} so far"),
            ).run(table, Limits(wait_seconds=wait_seconds))


def _exit_code(report: VerifyReport) -> int:
    outcomes = {table.outcome for table in report.tables}
    if "differs" in outcomes:
        return DIFFERS
    return 1 if "changing" in outcomes else 0


async def _verify(
    url: str, only: list[str], after: str | None, wait_seconds: float, flags: Any, *, quiet: bool
) -> VerifyReport:
    from restante.oplog.verifying.comparison import Here, Limits, Progress
    from restante.oplog.verifying.verify import There, verify

    progress = Progress()
    async with calling(flags, url) as (db, peer, remote):
        with _resumable(peer.host, progress), bar(progress, quiet=quiet):
            return await verify(
                Here(db, peer.id, peer.tables),
                There(remote, peer),
                peer.host,
                only=only,
                after=after,
                limits=Limits(wait_seconds=wait_seconds),
                progress=progress,
            )


@asynccontextmanager
async def calling(flags: Any, url: str) -> "AsyncIterator[tuple[Database, Peer, Remote]]":
    """The database, the peer with this address, and a client; an error names the peer."""
    from restante.oplog import peers, tables
    from restante.oplog.remote import Remote

    async with operator_for(flags) as operator:
        async with operator.db.connection() as connection:
            peer = await peers.find(connection, url)
            own_host = await tables.own_host(connection)
        if peer is None:
            raise BadRequest(
                f"{url} is not a peer of this node. `restante oplog peers list` shows them."
            )
        try:
            async with Remote.opened(own_host=own_host, clock=lambda: datetime.now(UTC)) as remote:
                yield operator.db, peer, remote
        except PeerUnreachable as error:
            raise PeerUnreachable(f"{peer.host}: {error}") from error


@contextmanager
def _resumable(host: str, progress: "Progress") -> Iterator[None]:
    """Say how to go on if the comparison of a table does not come to its end."""
    try:
        yield
    except BaseException:
        if progress.resume_after is not None:
            words = ["restante", "oplog", "verify", host, "--table", progress.table]
            command = shlex.join([*words, "--after", progress.resume_after])
            print(f"To go on where this ended: {command}", file=sys.stderr)
        raise


@contextmanager
def bar(progress: "Progress", *, quiet: bool) -> Iterator[None]:
    """Show how far a comparison is, on a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True, quiet=quiet)
    is_shown = console.is_terminal and not quiet
    with Bars(*columns, console=console, transient=True, disable=not is_shown) as bars:
        task = bars.add_task("", total=None)

        def show(at: "Progress") -> None:
            total = max(at.estimated_rows, at.rows) or None
            bars.update(task, description=at.table, completed=at.rows, total=total)

        progress.on_change = show
        yield


def show(console: Console, report: VerifyReport) -> None:
    """Print what a comparison has found."""
    for table in report.tables:
        console.print(_line(table), markup=False, highlight=False)
        for key in table.keys:
            console.print(f"    {_SHOWN[key.what]:13} {key.key}", markup=False, highlight=False)
        if table.more_ranges:
            console.print(f"    and more keys, in {table.more_ranges} ranges")
        for sentence in table.schema:
            console.print(f"    {sentence}", markup=False, highlight=False)
    verdict = "Equal to" if report.is_equal else "Not equal to"
    console.print(f"{verdict} {report.peer}, compared in {report.seconds:.1f} s.")
    if not report.is_caught_up:
        console.print(
            "The two had not read all of each other's changes by then, so some may be on their "
            "way. `restante oplog status` shows the lag."
        )
    if not report.is_equal:
        console.print(
            "`restante oplog parked list` shows changes that could not be applied; `restante oplog "
            f"resync {report.peer} TABLE` takes the peer's records."
        )


def _show_resync(console: Console, report: ResyncReport) -> None:
    for line in _resync_lines(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _resync_lines(report: ResyncReport) -> Iterator[str]:
    lost = "`restante oplog conflicts` lists what may be lost."
    if report.status == "complete":
        yield f"{report.table} is equal to {report.peer}'s now; {lost}"
    else:
        yield f"{report.table} was taken from {report.peer}, and is not equal to it; {lost}"
    if report.reason:
        yield report.reason
    for one in report.keys:
        yield f"    {_SHOWN[one.what]:13} {one.key}  {one.reason}"
    if report.more_ranges:
        yield f"    and more keys, in {report.more_ranges} ranges"
    if report.refused:
        yield (
            f"Refused meanwhile: {_records(report.refused)} of the peer. The log of the server "
            "names the reasons (`ops_refused`)."
        )


def _line(table: TableReport) -> str:
    match table.outcome:
        case "equal":
            return f"{table.table}: equal, {_records(table.rows_here)}"
        case "not_compared":
            return f"{table.table}: not compared. {table.reason}"
        case "changing":
            return f"{table.table}: not decided. {table.reason}"
        case _:
            counts = f"{_records(table.rows_here)} here, {table.rows_there} there"
            return f"{table.table}: not equal, {counts}"


def _records(count: int) -> str:
    return "1 record" if count == 1 else f"{count} records"
