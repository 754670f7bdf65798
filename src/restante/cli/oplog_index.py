"""`restante oplog ensure-index`: build the indexes of the op log that are missing."""

import asyncio
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter
from rich.progress import BarColumn, Progress as Bars, TaskProgressColumn, TextColumn

from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.interrupting import INTERRUPTED
from restante.cli.output import Console, json_text, shown_bytes
from restante.errors import BadRequest

if TYPE_CHECKING:
    from restante.database.pool import Database
    from restante.oplog.indexing.ensure import Outlook
    from restante.oplog.indexing.plan import Step, Wanted
    from restante.oplog.indexing.run import FreeBytes, Report, Watcher

    IndexFlags = Any
else:
    IndexFlags = flags_for("IndexFlags", DATABASE)

Optional = Literal["arrival"]
Switch = Annotated[bool, Parameter(negative=(), show_default=False)]

# Neither a success nor a failure of the command.
NOT_ALL = 3


def register(app: App) -> None:
    """Add the command to `restante oplog`."""
    app.command(ensure_index)


def ensure_index(
    *tables: str,
    add: Optional | None = None,
    drop: Optional | None = None,
    dry_run: Switch = False,
    force: Switch = False,
    json: Switch = False,
    flags: Annotated[IndexFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Build the indexes that partitions of the op log lack, without blocking anybody.

    For a log that was attached, and after an index was dropped or its build was cut off. Partitions
    are done one by one, the smallest first; an INVALID leftover that nobody is building is
    replaced. It may take hours. Ctrl-C stops it and leaves nothing half-done behind; the next run
    goes on from there. Servers may run, and none of them does this by itself.

    Exit codes: 0 every index is there; 3 not all: another run is active, somebody else is building
    an index there, or a partition could not be done; 1 failure; 130 interrupted.

    Example: restante oplog ensure-index --dry-run

    Parameters
    ----------
    tables
        Only in the logs of these tracked tables. [default: all]
    add
        One more index: arrival, to find ops by the time of their arrival. Small.
        Without tables, partitions and logs that are created later have it too.
    drop
        Drop such an index again, and build nothing.
    dry_run
        Show what would be done, how many bytes it would take, and change nothing.
    force
        Build although less than 1.2 times the estimated bytes are free, or nobody knows how many.
    json
        Print JSON.
    """
    if add and drop:
        raise BadRequest("--add and --drop exclude each other.")
    if drop and dry_run:
        raise BadRequest("--dry-run shows what would be built; --drop builds nothing.")
    if dry_run:
        outlook = asyncio.run(_outlook(flags, tables, add))
        _print_outlook(outlook, as_json=json)
        return
    report = asyncio.run(_act(flags, tables, add, drop, force=force, quiet=json))
    _print_report(report, as_json=json)
    sys.exit({"complete": 0, "interrupted": INTERRUPTED}.get(report.status, NOT_ALL))


async def _outlook(flags: Any, tables: Sequence[str], add: Optional | None) -> "Outlook":
    from restante.oplog.indexing import ensure

    async with operator_for(flags) as operator:
        wanted = await _wanted(operator.db, tables, add)
        free = await _free_bytes(operator.db)
        return await ensure.outlook(operator.db, wanted, free_bytes=free)


async def _act(
    flags: Any,
    tables: Sequence[str],
    add: Optional | None,
    drop: Optional | None,
    *,
    force: bool,
    quiet: bool,
) -> "Report":
    from restante.oplog.indexing import ensure

    async with operator_for(flags) as operator:
        db, stop = operator.db, _stopped_by_signal()
        wanted = await _wanted(db, tables, add)
        with _watcher(Console(stderr=True, quiet=quiet)) as watcher:
            if drop:
                return await ensure.drop(db, drop, wanted.logs, stop=stop, watcher=watcher)
            return await ensure.ensure(
                db,
                wanted,
                free_bytes=await _free_bytes(db),
                force=force,
                stop=stop,
                watcher=watcher,
            )


async def _wanted(db: "Database", names: Sequence[str], add: Optional | None) -> "Wanted":
    from restante.oplog.indexing.plan import Wanted
    from restante.oplog.tracking import relations

    async with db.connection() as connection:
        logs = [(await relations.find(connection, name)).log for name in names]
    return Wanted((add,) if add else (), tuple(logs) if logs else None)


async def _free_bytes(db: "Database") -> "FreeBytes":
    from restante.retention.disk import Disk

    disk = Disk(db)
    async with db.connection() as connection:
        await disk.locate(connection)
    return lambda: disk.room.free if disk.room else None


def _stopped_by_signal() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop


class _Lines:
    """One plain line for each event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = ""
        self._quarter = 0

    def began(self, step: "Step", number: int, count: int) -> None:
        self._said, self._quarter = "", 0
        self.line(f"[{number}/{count}] {_shown(step)}")

    def progress(self, part: float) -> None:
        if int(part * 4) > self._quarter:
            self._quarter = int(part * 4)
            self.line(f"  {self._quarter * 25} %")

    def waits(self, who: str) -> None:
        who_without_age, _, _ = who.partition(",")
        if who_without_age != self._said:
            self._said = who_without_age
            self.line(f"  waiting for {who}")

    def ended(self, outcome: str) -> None:
        if outcome != "done":
            self.line(f"  {outcome}")

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Bar(_Lines):
    """The same, above a bar for the build that runs."""

    def __init__(self, console: Console, bars: Bars) -> None:
        super().__init__(console)
        self._bars = bars
        self._task = bars.add_task("", total=1.0)

    def began(self, step: "Step", number: int, count: int) -> None:
        super().began(step, number, count)
        self._bars.update(self._task, description=step.index, completed=0.0)

    def progress(self, part: float) -> None:
        self._bars.update(self._task, completed=part)


@contextmanager
def _watcher(console: Console) -> "Iterator[Watcher]":
    if not console.is_terminal or console.quiet:
        yield _Lines(console)
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        yield _Bar(console, bars)


def _shown(step: "Step") -> str:
    size = step.estimate.index_bytes
    about = f", about {shown_bytes(size)}" if size else ""
    why = f": {step.why}" if step.why else ""
    return f"{step.action} {step.index} on {step.table} using {step.definition}{about}{why}"


def _print_outlook(outlook: "Outlook", *, as_json: bool) -> None:
    if as_json:
        print(json_text(outlook, indent=2))
        return
    for step in outlook.steps:
        print(_shown(step))
    if not outlook.steps:
        print("Every partition has its indexes.")
    elif outlook.shortage:
        print(f"It would be refused. {outlook.shortage}")
    elif outlook.estimated_bytes:
        print(
            f"{shown_bytes(outlook.estimated_bytes)} would be taken while it runs, and "
            f"{shown_bytes(outlook.free_bytes or 0)} are free."
        )


def _print_report(report: "Report", *, as_json: bool) -> None:
    if as_json:
        print(json_text(report, indent=2))
        return
    for step in report.done:
        print(f"{_PAST[step.action]} {step.index} on {step.table}")
    for left in report.left:
        print(f"Not done: {left.index} on {left.table}: {left.why}")
    for note in report.notes:
        print(note)
    if report.status == "interrupted":
        print("Stopped; the same command goes on from here.")
    elif report.status == "complete" and not report.done:
        print("There was nothing to do.")


_PAST = {
    "declare": "declared",
    "build": "built",
    "replace": "replaced",
    "rebuild": "rebuilt",
    "attach": "attached",
    "validate": "validated",
    "drop": "dropped",
}
