"""`restante sweep`: run one sweep, or show what it would do."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter
from rich.table import Column, Table

from restante import wire
from restante.cli.columns import NAME_CELLS, Names, print_sentence, within
from restante.cli.flags import DATABASE, OPS_LIMITS, flags_for, operator_for
from restante.cli.output import Console, json_text, shown_bytes

if TYPE_CHECKING:
    SweepFlags = Any
else:
    SweepFlags = flags_for(
        "SweepFlags", (*DATABASE, "ack_retention_seconds", "feed_retention_days", *OPS_LIMITS)
    )


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(sweep, group=group)


def sweep(
    *,
    dry_run: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[SweepFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Delete what is past its retention and free the disk space, once, now.

    A running server does this every few minutes. The servers' retention applies unless one is given
    here.

    Example: restante sweep --dry-run

    Parameters
    ----------
    dry_run
        Show the plan and change nothing: rows, partitions, bytes freed, and what prevents the rest.
    json
        Print JSON.
    """
    if not dry_run:
        report = asyncio.run(_sweep(flags, quiet=json))
        if json:
            print(json_text(report, indent=2))
        else:
            _show_report(report)
        return
    plan, names = asyncio.run(_plan(flags))
    if json:
        print(json_text(plan, indent=2))
    else:
        _show_plan(plan, names)


async def _plan(flags: Any) -> tuple[wire.RetentionPlan, Names]:
    async with operator_for(flags) as operator:
        plan = await operator.sweep.plan(now=await operator.sweep.now())
        names = await operator.workspaces.labels([held.workspace_id for held in plan.held])
    return plan, names


async def _sweep(flags: Any, *, quiet: bool) -> wire.SweepReport:
    console = Console(stderr=True, quiet=quiet)
    async with operator_for(flags) as operator:
        with console.status("sweeping"):
            return await operator.sweep.run(
                now=await operator.sweep.now(),
                on_step=lambda step, outcome: console.print(
                    f"{step.action} {step.partition or ''}: {outcome}", style="dim"
                ),
            )


def _show_plan(plan: wire.RetentionPlan, names: Names) -> None:
    if plan.steps:
        Console().print(_steps(plan.steps))
    print(f"{shown_bytes(plan.bytes_to_come_back)} would be freed.")
    for held in plan.held:
        print_sentence(held_sentence(held, names))


def held_sentence(held: wire.HeldSpace, names: Names) -> str:
    """What must stay, how much of it comes back later, and because of whom."""
    keeps = f"{held.partition} keeps {shown_bytes(held.bytes)}"
    if held.reclaimable_bytes:
        keeps += f", {shown_bytes(held.reclaimable_bytes)} of it unused"
    who = ""
    if held.workspace_id:
        since = f" since {held.since:%Y-%m-%d %H:%M}" if held.since else ""
        until = f", until {held.until:%Y-%m-%d %H:%M} at the latest" if held.until else ""
        name = within(names.get(held.workspace_id, str(held.workspace_id)), NAME_CELLS)
        who = f"; most of it belongs to workspace {name}{since}{until}"
    return f"{keeps}: {held.why}{who}."


def _steps(steps: list[wire.PlanStep]) -> Table:
    # Names must not be truncated; the reason can wrap.
    action, partition = (Column(name, no_wrap=True) for name in ("step", "partition"))
    partition.min_width = max(len(step.partition or "") for step in steps)
    table = Table(action, partition, "rows", "frees", "reason", box=None, pad_edge=False)
    for step in steps:
        table.add_row(
            step.action,
            step.partition or "",
            str(step.rows or ""),
            shown_bytes(step.bytes),
            step.why,
        )
    return table


def _show_report(report: wire.SweepReport) -> None:
    console = Console()
    console.print(
        f"Deleted {report.acked} acknowledged and {report.expired} expired uploads; "
        f"{shown_bytes(report.bytes_back)} freed in {report.seconds:.2f} s."
    )
    others = [
        f"{count} {kind}"
        for kind, count in report.deleted.items()
        if count and kind not in {"acked", "expired"}
    ]
    if others:
        console.print(f"Also deleted: {', '.join(others)}.")
    for postponed in report.postponed:
        step = postponed.step
        console.print(
            f"Postponed to the next sweep: {step.action} {step.partition or ''}: {postponed.reason}"
        )
