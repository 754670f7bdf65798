"""`restante status`: disk usage, what prevents freeing it, and deliveries, on one screen."""

import asyncio
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter
from rich.table import Column, Table

from restante import wire
from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import Console, json_text, shown_bytes, shown_seconds

if TYPE_CHECKING:
    StatusFlags = Any
else:
    StatusFlags = flags_for("StatusFlags", DATABASE)

_SHOWN_WORKSPACES = 5
_SHOWN_WRITERS = 3
_SHOWN_PARTITIONS = 3
_SHOWN_TABLES = 6


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(status, group=group)


def status(
    *,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[StatusFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Show disk usage, what prevents freeing it, and the state of deliveries.

    Example: restante status

    Parameters
    ----------
    json
        Print JSON.
    """
    space = asyncio.run(_space(flags))
    if json:
        print(json_text(space, indent=2))
    else:
        _show(Console(), space)


async def _space(flags: Any) -> wire.SpaceView:
    async with operator_for(flags) as operator:
        return await operator.space.look(now=datetime.now(UTC))


def _show(console: Console, space: wire.SpaceView) -> None:
    console.print(_headline(space))
    if space.is_disk_low:
        console.print(_disk_low(space), style="bold red")
    states = space.uploads
    console.print(
        f"Uploads: {states.never_fetched} never fetched, {states.fetched} fetched but not "
        f"acknowledged, {states.acked} acknowledged, {states.expired} expired. "
        f"Active workspaces: {space.workspaces_active}."
    )
    console.print(
        f"Feeds: {shown_bytes(space.feed_bytes)} of at most {shown_bytes(space.max_feed_bytes)}."
    )
    console.print(_tables(space))
    console.print(_partitions(space))
    if space.workspaces:
        console.print(_workspaces(space))
    if space.writers:
        console.print(_writers(space))
    for pin in space.pins:
        amount = shown_bytes(pin.bytes) if pin.bytes else shown_seconds(pin.seconds)
        console.print(
            f"{pin.who} prevents freeing space: {pin.what}, {amount}. Fix: {pin.way_out}."
        )


def _headline(space: wire.SpaceView) -> str:
    growth = "growth unknown yet"
    if space.growth_bytes_per_day is not None:
        growth = f"growing {shown_bytes(space.growth_bytes_per_day)} per day"
    free = "" if space.free_bytes is None else f", {shown_bytes(space.free_bytes)} free on its disk"
    full = ""
    if space.days_until_full is not None:
        full = f", full in {space.days_until_full:.0f} days at this rate"
    return (
        f"{shown_bytes(space.total_bytes)} in total: {shown_bytes(space.live_bytes)} live, "
        f"{shown_bytes(space.dead_bytes)} reclaimable; {growth}{free}{full}."
    )


def _disk_low(space: wire.SpaceView) -> str:
    """What a full disk means, and what to do; the rest of the screen says what takes the space."""
    reserve = ""
    if space.reserve_bytes is not None and space.free_bytes is not None:
        reserve = f": {shown_bytes(space.reserve_bytes)} should be"
    return (
        f"The disk is almost full{reserve}. New files, messages and workspaces are refused; what "
        "waits can be fetched and acknowledged. Fix: free space on this disk, or enlarge it; "
        "`restante sweep --dry-run` shows what keeps the rest."
    )


def _tables(space: wire.SpaceView) -> Table:
    columns = ("table", "size", "partitions", "dead rows", "created ahead")
    table = Table(*columns, box=None, pad_edge=False)
    for one in space.tables[:_SHOWN_TABLES]:
        lead = space.lead_seconds.get(one.name)
        table.add_row(
            one.name,
            shown_bytes(one.bytes),
            str(one.partitions or ""),
            str(one.dead_rows),
            "" if lead is None else shown_seconds(lead),
        )
    return table


def _partitions(space: wire.SpaceView) -> Table:
    """The largest partitions."""
    table = Table("partition", "size", "live", "reclaimable", box=None, pad_edge=False)
    for partition in space.partitions[:_SHOWN_PARTITIONS]:
        table.add_row(
            partition.name,
            shown_bytes(partition.bytes),
            "" if partition.live_bytes is None else shown_bytes(partition.live_bytes),
            "" if partition.dead_bytes is None else shown_bytes(partition.dead_bytes),
        )
    return table


def _writers(space: wire.SpaceView) -> Table:
    """Where the bytes came from, also those that were aborted or acknowledged."""
    whole_id = Column("workspace", no_wrap=True, min_width=36)
    columns = ("written this hour", "in total", "in its feed")
    table = Table(whole_id, *columns, box=None, pad_edge=False)
    for one in space.writers[:_SHOWN_WRITERS]:
        sizes = (one.this_hour_bytes, one.total_bytes, one.feed_bytes)
        table.add_row(str(one.workspace_id), *map(shown_bytes, sizes))
    return table


def _workspaces(space: wire.SpaceView) -> Table:
    behind = {lag.workspace_id: lag.behind for lag in space.lags}
    columns = ("held", "waiting", "never fetched", "fetched", "rows behind", "since")
    # Never truncated: other commands take this id.
    whole_id = Column("workspace", no_wrap=True, min_width=36)
    table = Table(whole_id, *columns, box=None, pad_edge=False, collapse_padding=True)
    for one in space.workspaces[:_SHOWN_WORKSPACES]:
        table.add_row(
            str(one.workspace_id),
            shown_bytes(one.held_bytes),
            shown_bytes(one.waiting_bytes),
            str(one.uploads.never_fetched),
            str(one.uploads.fetched),
            str(behind.get(one.workspace_id, 0)),
            f"{one.waiting_since:%m-%d %H:%M}" if one.waiting_since else "",
        )
    return table
