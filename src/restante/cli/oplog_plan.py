"""`restante oplog plan`: what would be removed from the op log, and who keeps the rest."""

import asyncio
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.table import Column, Table

from restante.cli.flags import DATABASE, OPS_LIMITS, flags_for, operator_for
from restante.cli.output import Console, json_text, shown_bytes
from restante.text import printable
from restante.wire.oplog_plan import Holder, OplogPlan, PlannedRemoval, PlannedTable

if TYPE_CHECKING:
    OplogPlanFlags = Any
else:
    OplogPlanFlags = flags_for("OplogPlanFlags", (*DATABASE, *OPS_LIMITS))

_CAUSES = {
    "retention": "older than its retention",
    "cap_age": "older than the cap",
    "cap_bytes": "above the cap in bytes",
    "dormant": "dormant",
    "empty": "empty",
}


def register(app: App) -> None:
    """Add the command to `restante oplog`."""
    app.command(plan)


def plan(
    *,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[OplogPlanFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Show what retention, caps and dormant cleanup would remove from the op log now.

    For each table: rows, bytes and partitions, up to when ops may go, and who keeps what is due.
    Nothing is changed. The server's limits apply unless one is given here.

    Example: restante oplog plan --ops-retention-days 30

    Parameters
    ----------
    json
        Print JSON.
    """
    found = asyncio.run(_plan(flags))
    if json:
        print(json_text(found, indent=2))
    else:
        show(Console(), found)


async def _plan(flags: Any) -> OplogPlan:
    from restante.oplog.trimming import plan

    async with operator_for(flags) as operator:
        now = await operator.sweep.now()
        async with operator.db.transaction(readonly=True) as tx:
            return await plan.look(tx, operator.log_limits, now=now)


def show(console: Console, found: OplogPlan) -> None:
    """Print it, within the width of the terminal."""
    if not found.tables:
        console.print("No table is tracked.")
        return
    console.print(_tables(found))
    for sentence in _remarks(found):
        console.print(sentence, markup=False, highlight=False)
    console.print(f"{shown_bytes(found.bytes_to_come_back)} would be freed.")


def _tables(found: OplogPlan) -> Table:
    table = Table(
        Column("table", overflow="fold"),
        Column("size", justify="right"),
        "kept for",
        "may go before",
        "dropped up to",
        Column("frees", justify="right"),
        box=None,
        pad_edge=False,
    )
    for one in found.tables:
        table.add_row(
            printable(one.name),
            shown_bytes(one.bytes),
            "ever" if one.retention_days is None else f"{one.retention_days:g} days",
            _moment(one.cut_off, "-"),
            _moment(one.floor_at, "never"),
            shown_bytes(sum(removal.bytes for removal in one.removals)),
        )
    return table


def _moment(moment: datetime | None, otherwise: str) -> str:
    return f"{moment:%Y-%m-%d %H:%M}" if moment else otherwise


def _remarks(found: OplogPlan) -> Iterator[str]:
    for table in found.tables:
        yield from (_removed(table, removal) for removal in table.removals)
        yield from (_held(table, holder) for holder in table.holders)
    for peer in found.peers:
        if peer.evicted_at is not None:
            yield (
                f"{printable(peer.host)} was evicted on {peer.evicted_at:%Y-%m-%d %H:%M}; it takes "
                "a snapshot when it comes back."
            )


def _removed(table: PlannedTable, removal: PlannedRemoval) -> str:
    parts = "1 partition" if removal.partitions == 1 else f"{removal.partitions} partitions"
    sentence = (
        f"{printable(table.name)}: {parts} with about {removal.rows} ops, "
        f"{shown_bytes(removal.bytes)}, {_CAUSES[removal.cause]}"
    )
    if removal.evicts:
        sentence += f"; evicts {', '.join(map(printable, removal.evicts))}"
    return f"{sentence}."


def _held(table: PlannedTable, holder: Holder) -> str:
    since = f" since {holder.since:%Y-%m-%d %H:%M}" if holder.since else ""
    return (
        f"{printable(table.name)}: {shown_bytes(holder.bytes)} stay because "
        f"{printable(holder.who)} {holder.why}{since}."
    )
