"""`restante oplog status`: tables, peers and what holds the op log up, on one screen."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.table import Column, Table

from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import Console, json_text, shown_bytes, shown_seconds
from restante.text import number_of, printable
from restante.wire.oplog_plan import Holder, OplogPlan, PeerMark
from restante.wire.oplog_status import Lag, OplogStatus, PeerStatus

if TYPE_CHECKING:
    OplogStatusFlags = Any
else:
    OplogStatusFlags = flags_for("OplogStatusFlags", DATABASE)

_WHY_EVICTED = {
    "cap_age": "because they were older than the cap",
    "cap_bytes": "because the log was above its cap in bytes",
    "retention": "because it was away for longer than it may be",
    "dormant": "because it was away for longer than it may be",
    "reset": "because the log was reset",
}
# The others end by themselves.
_LASTING = frozenset({"behind", "missing", "unreadable", "implausible"})
_SHOWN_TABLES = 8
_SHOWN_PEERS = 8
_SHOWN_DIFFERENCES = 5
_MAX_FAILURE = 160
# Below this nobody needs to know.
_SHOWN_SKEW_SECONDS = 1.0
_SHOWN_HORIZON_SECONDS = 5.0
_SHOWN_CLOCK_SECONDS = 1.0
# What peers do with changes that are further ahead.
_PARKED_AHEAD_SECONDS = 300.0
_REFUSED_AHEAD_SECONDS = 86_400.0
_STEPS = '"A clock that was far ahead" in docs/operations.md has the steps.'


def register(app: App) -> None:
    """Add the command to `restante oplog`."""
    app.command(status)


def status(
    *,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[OplogStatusFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Show the tracked tables, the lag of each peer in both directions, and what holds them up.

    Example: restante oplog status

    Parameters
    ----------
    json
        Print JSON.
    """
    found = asyncio.run(_status(flags))
    if json:
        print(json_text(found, indent=2))
    else:
        show(Console(), found, now=datetime.now(UTC))


async def _status(flags: Any) -> OplogStatus:
    from restante.oplog import status
    from restante.oplog.trimming import plan

    async with operator_for(flags) as operator:
        found = await status.look(operator.db, now=datetime.now(UTC))
        now = await operator.sweep.now()
        async with operator.db.transaction(readonly=True) as tx:
            planned = await plan.look(tx, operator.log_limits, now=now)
    return msgspec.structs.replace(found, plan=planned)


def show(console: Console, found: OplogStatus, *, now: datetime) -> None:
    """Print it, within the width of the terminal."""
    console.print(f"This node is {found.host}.", markup=False, highlight=False)
    if found.tables:
        console.print(_tables(found))
    else:
        console.print("No table is tracked. Begin with `restante oplog track TABLE`.")
    if found.peers:
        console.print(_peers(found, now=now))
    elif found.tables:
        console.print("There are no peers. Begin with `restante oplog peers add URL`.")
    for sentence in _remarks(found, now=now):
        console.print(sentence, markup=False, highlight=False)


def _tables(found: OplogStatus) -> Table:
    table = Table(
        Column("table", overflow="fold"),
        "state",
        Column("ops", justify="right"),
        Column("size", justify="right"),
        "kept for",
        "dropped up to",
        "ahead",
        box=None,
        pad_edge=False,
    )
    days = {one.name: one.retention_days for one in found.plan.tables} if found.plan else {}
    for one in found.tables[:_SHOWN_TABLES]:
        kept = days.get(one.name)
        table.add_row(
            printable(one.name),
            one.state,
            str(one.ops),
            shown_bytes(one.bytes),
            "ever" if kept is None else f"{kept:g} days",
            "never" if one.floor_at is None else f"{one.floor_at:%m-%d %H:%M}",
            "none" if one.ahead_seconds is None else shown_seconds(max(one.ahead_seconds, 0)),
        )
    return table


def _peers(found: OplogStatus, *, now: datetime) -> Table:
    table = Table(
        Column("peer", overflow="fold"),
        Column("read from it", overflow="fold"),
        Column("we are behind", overflow="fold"),
        Column("it is behind", overflow="fold"),
        box=None,
        pad_edge=False,
    )
    for one in found.peers[:_SHOWN_PEERS]:
        table.add_row(
            one.host,
            _ago(one.pulled_at, now=now),
            "not known" if one.behind is None else _lag(one.behind),
            _lag(one.waiting) if one.confirmed else f"never read; {_lag(one.waiting)}",
        )
    return table


def _ago(moment: datetime | None, *, now: datetime) -> str:
    if moment is None:
        return "never"
    return f"{shown_seconds(max((now - moment).total_seconds(), 0))} ago"


def _lag(lag: Lag) -> str:
    if not lag.ops:
        return "nothing"
    count = f"more than {lag.ops}" if lag.is_more else str(lag.ops)
    unit = "op" if lag.ops == 1 else "ops"
    return f"{count} {unit}, {shown_bytes(lag.bytes)}, {shown_seconds(lag.seconds)}"


def _remarks(found: OplogStatus, *, now: datetime) -> Iterator[str]:
    """What is not as it should be, one sentence each."""
    yield from _of_tables(found)
    for peer in found.peers:
        yield from _of_peer(peer, now=now)
        yield from _of_eviction(peer)
    if found.plan:
        yield from _of_plan(found.plan)
    for one in found.snapshots:
        yield (
            f"A snapshot of {one.table} is being taken from {one.peer}: {one.records} records, "
            f"last progress {_ago(one.progressed_at, now=now)}."
        )
    if found.parked:
        reasons = ", ".join(f"{count} {reason}" for reason, count in found.parked.items())
        yield f"Parked: {reasons}. `restante oplog parked list` shows them."
    if found.conflicts:
        since = f" since {found.conflicts_since:%Y-%m-%d}" if found.conflicts_since else ""
        yield f"Conflicts{since}: {found.conflicts}. `restante oplog conflicts` shows them."
    yield from _of_node(found)


def _of_node(found: OplogStatus) -> Iterator[str]:
    """What delays the log, and what is kept beside it."""
    if (holder := found.horizon) and holder.seconds > _SHOWN_HORIZON_SECONDS:
        who = f"prepared transaction {holder.prepared}" if holder.prepared else f"pid {holder.pid}"
        began = (
            f", query began {holder.query_started_at:%H:%M:%S}Z" if holder.query_started_at else ""
        )
        yield (
            f"Newer changes wait for a transaction of {shown_seconds(holder.seconds)}: {who}, "
            f"{printable(holder.who)}, {holder.state}{began}."
        )
    if kept := found.kept:
        yield (
            f"Beside the log: {number_of(kept.parked, 'parked change')} "
            f"({shown_bytes(kept.parked_bytes)}), {number_of(kept.conflicts, 'conflict')}, "
            f"{number_of(kept.snapshots_taken, 'snapshot')} being taken, "
            f"{kept.snapshots_served} being served, "
            f"{number_of(kept.unsettled_deletes, 'delete')} to settle, "
            f"{number_of(kept.hosts, 'host')}."
        )
    yield from _of_clock(found.clock_ahead_seconds)


def _of_clock(ahead_seconds: float) -> Iterator[str]:
    if ahead_seconds <= _SHOWN_CLOCK_SECONDS:
        return
    effect = ""
    if ahead_seconds > _REFUSED_AHEAD_SECONDS:
        effect = f" Peers refuse the changes of this node. {_STEPS}"
    elif ahead_seconds > _PARKED_AHEAD_SECONDS:
        effect = f" Peers park the changes of this node until their time has come. {_STEPS}"
    yield (
        f"The clock of the log is {shown_seconds(ahead_seconds)} ahead: a node has "
        f"a wrong clock, or had.{effect}"
    )


def _of_tables(found: OplogStatus) -> Iterator[str]:
    hidden = len(found.tables) - _SHOWN_TABLES
    if hidden > 0:
        yield f"And {hidden} more tables; --json shows all."
    paused = [printable(one.name) for one in found.tables if one.state == "paused"]
    if paused:
        yield f"Capture is paused: {', '.join(paused)}. `restante oplog resume TABLE` ends that."
    missing = [printable(one.name) for one in found.tables if one.state == "missing"]
    if missing:
        names = ", ".join(missing)
        yield f"Dropped or renamed: {names}. `restante oplog untrack TABLE` forgets it."


def _of_peer(peer: PeerStatus, *, now: datetime) -> Iterator[str]:
    if peer.failing_since:
        seconds = max((now - peer.failing_since).total_seconds(), 0)
        reason = printable(peer.failure or "", max_length=_MAX_FAILURE)
        yield f"{peer.host} fails for {shown_seconds(seconds)}: {reason}"
    if peer.cursor_problem:
        yield f"{peer.host}: {printable(peer.cursor_problem)}"
    if abs(peer.skew_seconds or 0) > _SHOWN_SKEW_SECONDS:
        skew = peer.skew_seconds or 0
        side = "ahead" if skew > 0 else "behind"
        yield f"The clock of {peer.host} is {shown_seconds(abs(skew))} {side}."
    gaps = "gap" if peer.gaps == 1 else "gaps"
    counts = {"refused": peer.refused, "parked": peer.parked, gaps: peer.gaps}
    if any(counts.values()):
        listed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        yield f"Of {peer.host} so far: {listed}."
    if refused := peer.refused_by.get("time"):
        yield (
            f"Of {peer.host}, {refused} changes were refused because their time is more than a day "
            f"ahead, or before 2024: a clock is wrong, or was. {_STEPS}"
        )
    for sentence in peer.schema_differences[:_SHOWN_DIFFERENCES]:
        yield f"{peer.host}: {printable(sentence)}"


def _of_eviction(peer: PeerStatus) -> Iterator[str]:
    if peer.evicted_at is None:
        return
    sentence = f"{peer.host} was evicted on {peer.evicted_at:%Y-%m-%d %H:%M}"
    if lost := peer.eviction:
        sentence += (
            f": about {lost.ops} ops of {printable(lost.table)}, {shown_bytes(lost.bytes)}, went "
            f"{_WHY_EVICTED.get(lost.cause, lost.cause)}"
        )
    yield f"{sentence}. It takes a snapshot when it comes back."


def _of_plan(plan: OplogPlan) -> Iterator[str]:
    """Who keeps the log, and what the next sweep does to it."""
    holders = [one for table in plan.tables for one in table.holders if one.reason in _LASTING]
    for peer in plan.peers:
        if own := [one for one in holders if one.who == peer.host]:
            yield _kept_by(peer, own)
    evicted = sorted(
        {host for table in plan.tables for one in table.removals for host in one.evicts}
    )
    if evicted:
        names = ", ".join(map(printable, evicted))
        yield f"The next sweep evicts {names}; `restante oplog plan` says why."
    if plan.bytes_to_come_back:
        yield f"The next sweep drops {shown_bytes(plan.bytes_to_come_back)} of the log."


def _kept_by(peer: PeerMark, holders: Sequence[Holder]) -> str:
    """What a peer keeps, why and since when, and the two ways out."""
    held = max(holders, key=lambda one: one.bytes)
    host, since = printable(peer.host), held.since or peer.behind_since
    when = f" since {since:%Y-%m-%d %H:%M}" if since else ""
    return (
        f"{host} keeps {shown_bytes(peer.held_bytes)} that are due{when}: it {held.why}. Two ways "
        f"out: let it read; or do without it, at once with `restante oplog peers remove {host}`, "
        f"or when it has been away for a week with `restante oplog peers add {host} "
        "--evict-after-days 7`."
    )
