"""`restante sweep`: run one pass of the sweep, or show what it would do."""

import asyncio
import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter
from rich.console import Console
from rich.table import Column, Table

from restante import wire
from restante.cli.flags import DATABASE, flags_for, settings_from
from restante.cli.sizes import shown_bytes
from restante.settings import Settings

if TYPE_CHECKING:
    SweepFlags = Any
else:
    SweepFlags = flags_for(
        "SweepFlags", (*DATABASE, "ack_retention_seconds", "feed_retention_days")
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
    Delete what is due and give the disk space back, once, now.

    A running server does this by itself every few minutes.

    Example: restante sweep --dry-run

    Parameters
    ----------
    dry_run
        Show the plan: rows, partitions, bytes to come back, and what is held by whom. Changes nothing.
    json
        Print JSON.
    """
    settings = settings_from(flags, dict(os.environ))
    done = asyncio.run(_plan(settings) if dry_run else _sweep(settings, quiet=json))
    if json:
        print(msgspec.json.format(msgspec.json.encode(done), indent=2).decode())
    elif isinstance(done, wire.RetentionPlan):
        _show_plan(done)
    else:
        _show_report(done)


async def _plan(settings: Settings) -> wire.RetentionPlan:
    from restante.server import wiring

    async with wiring.operator(settings) as operator:
        return await operator.sweep.plan(now=datetime.now(UTC))


async def _sweep(settings: Settings, *, quiet: bool) -> wire.SweepReport:
    from restante.server import wiring

    console = Console(stderr=True, quiet=quiet)
    async with wiring.operator(settings) as operator:
        with console.status("sweeping"):
            return await operator.sweep.run(
                now=datetime.now(UTC),
                on_step=lambda step, outcome: console.print(
                    f"{step.action} {step.partition or ''}: {outcome}", style="dim"
                ),
            )


def _show_plan(plan: wire.RetentionPlan) -> None:
    console = Console()
    if plan.steps:
        console.print(_steps(plan.steps))
    console.print(f"{shown_bytes(plan.bytes_to_come_back)} would come back.")
    for held in plan.held:
        since = f" since {held.since:%Y-%m-%d %H:%M}" if held.since else ""
        until = f", at the latest until {held.until:%Y-%m-%d %H:%M}" if held.until else ""
        who = f"; most of it is workspace {held.workspace_id}'s{since}{until}"
        console.print(
            f"{held.partition} keeps {shown_bytes(held.bytes)}: {held.why}"
            f"{who if held.workspace_id else ''}."
        )


def _steps(steps: list[wire.PlanStep]) -> Table:
    # A name is worth nothing with its end cut off; the reason can be wrapped.
    action, partition = (Column(name, no_wrap=True) for name in ("step", "partition"))
    partition.min_width = max(len(step.partition or "") for step in steps)
    table = Table(action, partition, "rows", "comes back", "why", box=None, pad_edge=False)
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
        f"{shown_bytes(report.bytes_back)} came back in {report.seconds:.2f} s."
    )
    for postponed in report.postponed:
        console.print(
            f"Left for the next pass: {postponed.step.action} {postponed.step.partition or ''}: "
            f"{postponed.reason}"
        )
