"""`restante oplog reset`: empty the op log after a comparison with a peer."""

import asyncio
import shlex
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from cyclopts.validators import Number

from restante.cli import oplog_verify
from restante.cli.flags import DATABASE, flags_for
from restante.cli.interrupting import INTERRUPTED, until_interrupted
from restante.cli.output import Console, json_text, shown_bytes
from restante.text import printable
from restante.wire.oplog_reset import PeerLoss, ResetPlan, ResetReport, ResetTable, SeededCursor

if TYPE_CHECKING:
    from restante.oplog.resetting.plan import Wanted

    ResetFlags = Any
else:
    ResetFlags = flags_for("ResetFlags", DATABASE)

Switch = Annotated[bool, Parameter(negative=(), show_default=False)]

REFUSED = 4


def register(app: App) -> None:
    """Add the command to `restante oplog`."""
    app.command(reset)


def reset(
    *,
    from_: Annotated[str, Parameter(name="--from")],
    table: Annotated[list[str] | None, Parameter(negative=())] = None,
    evict: Switch = False,
    yes: Switch = False,
    wait_seconds: Annotated[float, Parameter(validator=Number(gte=0))] = 60.0,
    json: Switch = False,
    flags: Annotated[ResetFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Empty the op log, if the tables are equal to a peer's; without --yes only show what would go.

    The tables are compared with the peer's, and nothing is changed unless they are equal. Ops go
    that the peer has read; what is written meanwhile stays. It is refused if another peer still
    needs ops that would go. Cursors on other nodes that are behind the peer's are set to the
    peer's. The servers must run, and writers go on. A reset that was interrupted is finished by
    the same command.

    Exit codes: 0 done, or nothing is in the way of it; 3 the tables are not equal; 4 refused, or
    not all could be dropped: the reason is printed; 1 failure; 130 interrupted.

    Example: restante oplog reset --from https://b.example

    Parameters
    ----------
    from_
        The address of the peer to compare with, one of our own nodes.
    table
        Empty the log of this table only. Can be repeated. [default: all that both nodes track]
    evict
        Drop ops although other peers need them. These take a snapshot when they come back.
    yes
        Do it.
    wait_seconds
        How long to wait for changes that are on their way, and for peers that are reading.
    json
        Print JSON.
    """
    from restante.oplog.resetting.plan import Wanted

    wanted = Wanted(tuple(table or ()), evict, wait_seconds)
    done = asyncio.run(
        until_interrupted(_reset(from_, wanted, flags, acts=yes, quiet=json)),
    )
    if done is None:
        print("Stopped; the same command goes on from here.", file=sys.stderr)
        sys.exit(INTERRUPTED)
    plan, report = done
    if json:
        print(json_text(report or plan, indent=2))
    elif report is not None:
        _show_report(Console(), report)
    else:
        _show_plan(Console(), plan, command=_command(from_, wanted))
    sys.exit(_exit_code(plan, report))


async def _reset(
    url: str, wanted: "Wanted", flags: Any, *, acts: bool, quiet: bool
) -> tuple[ResetPlan, ResetReport | None]:
    from restante.oplog.resetting.act import Reset
    from restante.oplog.resetting.plan import Planner
    from restante.oplog.verifying.comparison import Progress

    console, progress = Console(stderr=True, quiet=quiet), Progress()
    lines = _Lines(console)
    async with oplog_verify.calling(flags, url) as (db, peer, remote):
        with oplog_verify.bar(progress, quiet=quiet):
            planner = Planner(db, remote, peer, wanted, _now, progress, lines.waits)
            plan = await planner.plan()
        if not acts or plan.refusals:
            return plan, None
        return plan, await Reset(db, plan, _now, lines.line).run()


def _now() -> datetime:
    return datetime.now(UTC)


class _Lines:
    """One plain line for each event, on standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._said = ""

    def waits(self, what: str) -> None:
        """The same again is not said again."""
        if what != self._said:
            self._said = what
            self.line(f"waiting {what}")

    def line(self, text: str) -> None:
        _print(self._console, text)


def _exit_code(plan: ResetPlan, report: ResetReport | None) -> int:
    outcomes = {table.outcome for table in plan.verified.tables}
    if "differs" in outcomes:
        return oplog_verify.DIFFERS
    if "changing" in outcomes:
        return 1
    return REFUSED if plan.refusals or (report and report.left) else 0


def _command(url: str, wanted: "Wanted") -> str:
    words = ["restante", "oplog", "reset", "--from", url]
    for table in wanted.tables:
        words += ["--table", table]
    return shlex.join([*words, *(["--evict"] if wanted.evicts else []), "--yes"])


def _show_plan(console: Console, plan: ResetPlan, *, command: str) -> None:
    for table in plan.tables:
        _print(console, _table_line(table))
    _show_differences(console, plan)
    for loss in plan.peers:
        _print(console, _loss_line(loss))
    for cursor in plan.cursors:
        _print(console, _cursor_line(cursor))
    if plan.refusals:
        _print(console, "Refused; nothing was changed:")
        for sentence in plan.refusals:
            _print(console, f"  {sentence}")
    else:
        _print(console, f"{shown_bytes(plan.bytes)} would come back. Nothing was changed yet.")
        _print(console, f"To do it: {command}")


def _show_differences(console: Console, plan: ResetPlan) -> None:
    if any(one.outcome in {"differs", "changing"} or one.schema for one in plan.verified.tables):
        oplog_verify.show(console, plan.verified)


def _table_line(table: ResetTable) -> str:
    name = printable(table.name)
    if not table.is_reset:
        return f"{name}: stays as it is. {table.why_not}"
    parts = _partitions(table.partitions)
    return f"{name}: about {table.ops} ops in {parts}, {shown_bytes(table.bytes)}"


def _partitions(count: int) -> str:
    return "1 partition" if count == 1 else f"{count} partitions"


def _loss_line(loss: PeerLoss) -> str:
    if loss.has_read:
        return f"{printable(loss.host)} has read everything, but this node has not read its log"
    ops = f"{'more than ' if loss.is_more else ''}{loss.ops} ops"
    since = f" since {loss.since:%Y-%m-%d %H:%M}" if loss.since else ""
    if loss.standing == "evicted":
        then = "was evicted already"
    else:
        then = "takes a snapshot then" if loss.takes_snapshot else "never gets them"
    size = shown_bytes(loss.bytes)
    tables = ", ".join(map(printable, loss.tables))
    return f"{printable(loss.host)} has not read {ops} of {tables}{since} ({size}): it {then}"


def _cursor_line(cursor: SeededCursor) -> str:
    host = printable(cursor.host)
    if cursor.why_not:
        return f"The cursor on {host} stays as it is: {cursor.why_not}."
    before = printable(cursor.before, max_length=80) or "nothing"
    return f"The cursor on {host}: from {before} to {cursor.after}"


def _show_report(console: Console, report: ResetReport) -> None:
    for cursor in report.seeded:
        _print(console, _cursor_line(cursor))
    for host in report.evicted:
        _print(console, f"{printable(host)} was evicted.")
    _print(
        console,
        f"Dropped about {report.ops} ops in {_partitions(report.partitions)}, "
        f"{shown_bytes(report.bytes)} of files, in {report.seconds:.1f} s.",
    )
    if report.filesystem_bytes is None:
        _print(console, "The filesystem cannot be seen from here: these are sizes of files.")
    elif report.filesystem_bytes >= 0:
        more = shown_bytes(report.filesystem_bytes)
        _print(console, f"The filesystem has {more} more free than before.")
    else:
        less = shown_bytes(-report.filesystem_bytes)
        _print(console, f"The filesystem has {less} less free than before: others write to it.")
    for sentence in report.left:
        _print(console, f"Not done: {sentence}")
    if report.left:
        _print(console, "The same command goes on from here.")


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
