"""`restante status`: disk usage, what prevents freeing it, and deliveries, on one screen."""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any
from uuid import UUID

from cyclopts import App, Group, Parameter

from restante import wire
from restante.cli.columns import NAME_CELLS, Names, print_labelled, print_table, within
from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import json_text, shown_bytes, shown_seconds
from restante.cli.sweep import held_sentence
from restante.text import printable

if TYPE_CHECKING:
    StatusFlags = Any
else:
    StatusFlags = flags_for("StatusFlags", DATABASE)

_SHOWN_WORKSPACES = 5
_SHOWN_WRITERS = 3
_SHOWN_PARTITIONS = 3
_SHOWN_TABLES = 6
_SHOWN_HELD = 3


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
    space, names = asyncio.run(_space(flags))
    if json:
        print(json_text(space, indent=2))
    else:
        show(space, names)


async def _space(flags: Any) -> tuple[wire.SpaceView, Names]:
    from restante.retention.space import status

    async with operator_for(flags) as operator:
        found = await status(operator.space, operator.sweep)
        return found, await operator.workspaces.labels(_named_in(found))


def _named_in(space: wire.SpaceView) -> set[UUID | None]:
    """The workspaces that are shown."""
    return {
        *(one.workspace_id for one in space.workspaces[:_SHOWN_WORKSPACES]),
        *(one.workspace_id for one in space.writers[:_SHOWN_WRITERS]),
        *(pin.workspace_id for pin in space.pins),
        *(held.workspace_id for held in (space.plan.held if space.plan else ())),
    }


def show(space: wire.SpaceView, names: Names) -> None:
    """Print it, within the width of the terminal."""
    print_labelled(
        [
            ("Disk", _disk(space)),
            *([("", _disk_low(space))] if space.is_disk_low else []),
            ("Next sweep", _next_sweep(space.plan)),
            *(("", held_sentence(one, names)) for one in _largest_held(space.plan)),
            ("Files", _files(space)),
            (
                "Feeds",
                f"{shown_bytes(space.feed_bytes)} of at most {shown_bytes(space.max_feed_bytes)}",
            ),
            ("Workspaces", f"{space.workspaces_active} active"),
            *(("Held up by", _pinned(pin, names)) for pin in space.pins),
        ]
    )
    _print_tables(space)
    _print_partitions(space)
    _print_workspaces(space, names)
    _print_writers(space, names)


def _disk(space: wire.SpaceView) -> str:
    growth = "growth unknown yet"
    if space.growth_bytes_per_day is not None:
        growth = f"growing {shown_bytes(space.growth_bytes_per_day)} per day"
    free = "" if space.free_bytes is None else f"; {shown_bytes(space.free_bytes)} free"
    full = ""
    if space.days_until_full is not None:
        full = f", full in {space.days_until_full:.0f} days at this rate"
    return f"{shown_bytes(space.total_bytes)} in tables, {growth}{free}{full}"


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


def _next_sweep(plan: wire.RetentionPlan | None) -> str:
    if plan is None:
        return "not known"
    frees = f"frees {shown_bytes(plan.bytes_to_come_back)}"
    later = sum(held.reclaimable_bytes for held in plan.held)
    if later:
        frees += f"; {shown_bytes(later)} that nothing uses come back later"
    rows = sum(step.rows for step in plan.steps if not step.partition)
    steps = f", in {len(plan.steps)} steps with {rows} rows" if plan.steps else ""
    return f"{frees}{steps}; `sweep --dry-run` shows all"


def _largest_held(plan: wire.RetentionPlan | None) -> list[wire.HeldSpace]:
    """What comes back later, and what is kept altogether, by size."""
    held = plan.held if plan else []
    return sorted(held, key=lambda one: (-one.reclaimable_bytes, -one.bytes))[:_SHOWN_HELD]


def _files(space: wire.SpaceView) -> str:
    states = space.uploads
    return (
        f"{states.never_fetched} never fetched, {states.fetched} fetched but not acknowledged, "
        f"{states.acked} acknowledged, {states.expired} expired; {shown_bytes(space.live_bytes)}"
    )


def _pinned(pin: wire.PinView, names: Names) -> str:
    who, what = pin.who, pin.what
    if pin.workspace_id:
        text = str(pin.workspace_id)
        name = within(names[pin.workspace_id], NAME_CELLS)
        who, what = who.replace(text, name), what.replace(text, name)
    amount = shown_bytes(pin.bytes) if pin.bytes else shown_seconds(pin.seconds)
    return f"{printable(who)}: {what}, {amount}. Fix: {pin.way_out}."


def _print_tables(space: wire.SpaceView) -> None:
    rows = [
        (
            shown_bytes(one.bytes),
            str(one.partitions or "-"),
            str(one.dead_rows),
            "-" if (lead := space.lead_seconds.get(one.name)) is None else shown_seconds(lead),
            one.name,
        )
        for one in space.tables[:_SHOWN_TABLES]
    ]
    _print_section("Tables", ("size", "partitions", "dead rows", "ahead", "table"), rows)


def _print_partitions(space: wire.SpaceView) -> None:
    """The largest partitions."""
    rows = [
        (
            shown_bytes(one.bytes),
            "-" if one.live_bytes is None else shown_bytes(one.live_bytes),
            "-" if one.dead_bytes is None else shown_bytes(one.dead_bytes),
            one.name,
        )
        for one in space.partitions[:_SHOWN_PARTITIONS]
    ]
    _print_section("Largest partitions", ("size", "live", "unused", "partition"), rows)


def _print_workspaces(space: wire.SpaceView, names: Names) -> None:
    """Those for which most is kept."""
    behind = {lag.workspace_id: lag.behind for lag in space.lags}
    rows = [
        (
            shown_bytes(one.held_bytes),
            shown_bytes(one.waiting_bytes),
            str(one.uploads.never_fetched + one.uploads.fetched),
            str(behind.get(one.workspace_id, 0)),
            f"{one.waiting_since:%m-%d %H:%M}" if one.waiting_since else "-",
            names[one.workspace_id],
        )
        for one in space.workspaces[:_SHOWN_WORKSPACES]
    ]
    head = ("held", "waiting", "files", "unread", "since", "workspace")
    _print_section("Most is kept for", head, rows)


def _print_writers(space: wire.SpaceView, names: Names) -> None:
    """Where the bytes came from, also those that were aborted or acknowledged."""
    rows = [
        (
            *map(shown_bytes, (one.this_hour_bytes, one.total_bytes, one.feed_bytes)),
            names[one.workspace_id],
        )
        for one in space.writers[:_SHOWN_WRITERS]
    ]
    _print_section("Most was written for", ("this hour", "in all", "in feed", "workspace"), rows)


def _print_section(label: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print(label)
        print_table(head, rows, right=range(len(head) - 1), indent=2)
