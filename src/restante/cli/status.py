"""`restante status`: what takes space, what holds it, and how deliveries stand, in one screen."""

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
from restante.cli.sizes import shown_bytes, shown_seconds
from restante.settings import Settings

if TYPE_CHECKING:
    StatusFlags = Any
else:
    StatusFlags = flags_for("StatusFlags", DATABASE)

_SHOWN_WORKSPACES = 5
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
    Show what takes space, what holds it, and how deliveries stand.

    Example: restante status

    Parameters
    ----------
    json
        Print JSON.
    """
    space = asyncio.run(_look(settings_from(flags, dict(os.environ))))
    if json:
        print(msgspec.json.format(msgspec.json.encode(space), indent=2).decode())
    else:
        _show(Console(), space)


async def _look(settings: Settings) -> wire.SpaceView:
    from restante.server import wiring

    async with wiring.operator(settings) as operator:
        return await operator.space.look(now=datetime.now(UTC))


def _show(console: Console, space: wire.SpaceView) -> None:
    console.print(_headline(space))
    states = space.uploads
    console.print(
        f"Uploads: {states.never_fetched} never fetched, {states.fetched} fetched but not "
        f"acknowledged, {states.acked} acknowledged, {states.expired} expired. "
        f"Active workspaces: {space.workspaces_active}."
    )
    console.print(_tables(space))
    console.print(_partitions(space))
    if space.workspaces:
        console.print(_workspaces(space))
    for pin in space.pins:
        much = shown_bytes(pin.bytes) if pin.bytes else shown_seconds(pin.seconds)
        console.print(f"{pin.who} holds space back: {pin.what}, {much}. Way out: {pin.way_out}.")


def _headline(space: wire.SpaceView) -> str:
    growth = "growth not known yet"
    if space.growth_bytes_per_day is not None:
        growth = f"growing {shown_bytes(space.growth_bytes_per_day)} a day"
    free = "" if space.free_bytes is None else f", {shown_bytes(space.free_bytes)} free on its disk"
    full = ""
    if space.days_until_full is not None:
        full = f", full in {space.days_until_full:.0f} days at this rate"
    return (
        f"{shown_bytes(space.total_bytes)} in all: {shown_bytes(space.live_bytes)} of files that "
        f"live, {shown_bytes(space.dead_bytes)} to come back; {growth}{free}{full}."
    )


def _tables(space: wire.SpaceView) -> Table:
    table = Table("table", "size", "partitions", "dead rows", "ahead", box=None, pad_edge=False)
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
    table = Table("partition", "size", "lives", "to come back", box=None, pad_edge=False)
    for partition in space.partitions[:_SHOWN_PARTITIONS]:
        table.add_row(
            partition.name,
            shown_bytes(partition.bytes),
            "" if partition.live_bytes is None else shown_bytes(partition.live_bytes),
            "" if partition.dead_bytes is None else shown_bytes(partition.dead_bytes),
        )
    return table


def _workspaces(space: wire.SpaceView) -> Table:
    behind = {lag.workspace_id: lag.behind for lag in space.lags}
    columns = ("waiting", "never fetched", "fetched", "rows behind", "since")
    # The whole id, whatever the terminal's width: it is what the way out begins with.
    whole_id = Column("workspace", no_wrap=True, min_width=36)
    table = Table(whole_id, *columns, box=None, pad_edge=False, collapse_padding=True)
    for one in space.workspaces[:_SHOWN_WORKSPACES]:
        table.add_row(
            str(one.workspace_id),
            shown_bytes(one.waiting_bytes),
            str(one.uploads.never_fetched),
            str(one.uploads.fetched),
            str(behind.get(one.workspace_id, 0)),
            f"{one.waiting_since:%m-%d %H:%M}" if one.waiting_since else "",
        )
    return table
