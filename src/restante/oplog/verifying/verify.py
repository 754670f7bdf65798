"""
`oplog verify`: compares the tracked tables of this node with a peer's.

What both call by the same name is compared, in the columns that both have.  Differences of the
columns are named beside that.
"""

import time
from collections.abc import Collection, Iterator

from restante.errors import BadRequest, PeerUnreachable
from restante.oplog.peers import Peer
from restante.oplog.remote import Remote
from restante.oplog.verifying.comparison import Comparison, Here, Limits, Progress, Side
from restante.wire.oplog_digests import (
    DIGEST_PATH,
    RECORDS_PATH,
    TABLES_PATH,
    DigestAnswer,
    DigestRequest,
    NodeDescription,
    RangeDigest,
    RecordDigest,
    RecordsAnswer,
    RecordsRequest,
    TableDescription,
    TableReport,
    VerifyReport,
)


class There:
    """A peer, asked over HTTP."""

    def __init__(self, remote: Remote, peer: Peer) -> None:
        self._remote = remote
        self._peer = peer

    async def describe(self) -> NodeDescription:
        return await self._remote.asked(self._peer, TABLES_PATH, {}, NodeDescription)

    async def ranges(self, asked: DigestRequest) -> list[RangeDigest]:
        answer = await self._remote.asked(self._peer, DIGEST_PATH, asked, DigestAnswer)
        if len(answer.digests) != len(asked.ranges):
            raise PeerUnreachable("It answered with digests of other ranges.")
        return answer.digests

    async def records(self, asked: RecordsRequest) -> list[RecordDigest]:
        answer = await self._remote.asked(self._peer, RECORDS_PATH, asked, RecordsAnswer)
        return answer.records


async def verify(  # noqa: PLR0913 - what to compare, and how far
    here: Here,
    there: Side,
    peer: str,
    *,
    only: Collection[str] = (),
    after: str | None = None,
    limits: Limits,
    progress: Progress,
) -> VerifyReport:
    """
    Compare the tables, or only those with the given names; `after` a key of the one table.

    Raises BadRequest if this node has no such table.
    """
    started, is_caught_up = time.monotonic(), True
    ours, theirs = await here.describe(), await there.describe()
    reports = list[TableReport]()
    for mine, other in _pairs(ours, theirs, only):
        if (reason := _incomparable(mine, other)) or mine is None or other is None:
            name = (mine or other).name  # pyright: ignore[reportOptionalMemberAccess]
            reports.append(TableReport(table=name, outcome="not_compared", reason=reason))
            continue
        comparison = Comparison(
            here,
            there,
            await here.table(mine.name),
            common_columns(mine, other),
            "index" if mine.order == other.order else "text",
            limits,
            progress,
        )
        progress.begin(mine.name, mine.rows)
        reports.append(await comparison.run(schema_differences(mine, other), after=after))
        is_caught_up = is_caught_up and comparison.is_caught_up
    return VerifyReport(
        peer=peer,
        is_equal=all(one.outcome in {"equal", "not_compared"} for one in reports),
        is_caught_up=is_caught_up,
        tables=reports,
        seconds=round(time.monotonic() - started, 3),
    )


def _pairs(
    here: NodeDescription, there: NodeDescription, only: Collection[str]
) -> "Iterator[tuple[TableDescription | None, TableDescription | None]]":
    """The tables of either side by name; those with one of the names, if any is given."""
    ours, theirs = ({table.name: table for table in node.tables} for node in (here, there))
    for name in only:
        if name not in ours:
            raise BadRequest(
                f"This node has no tracked table {name}, or does not share it with the peer."
            )
    for name in sorted(only or ours.keys() | theirs):
        yield ours.get(name), theirs.get(name)


def _incomparable(here: TableDescription | None, there: TableDescription | None) -> str:
    """Why two tables cannot be compared; empty if they can."""
    if here is None:
        return "This node does not track it, or does not share it with the peer."
    if there is None:
        return "The peer does not track it, or does not share it with this node."
    if here.key_columns != there.key_columns:
        ours, theirs = (", ".join(one.key_columns) for one in (here, there))
        return f"The primary key is ({ours}) here and ({theirs}) there."
    return ""


def schema_differences(here: TableDescription, there: TableDescription) -> list[str]:
    """How the columns of a table differ, one sentence each."""
    ours, theirs = ({c.name: c for c in one.columns} for one in (here, there))
    only_here, only_there = sorted(ours.keys() - theirs), sorted(theirs.keys() - ours)
    others = [
        f"{name} is {ours[name].type} here and {theirs[name].type} there."
        for name in sorted(ours.keys() & theirs)
        if ours[name].type != theirs[name].type
    ]
    return [
        *(f"Only this node has the column {name}." for name in only_here),
        *(f"Only the peer has the column {name}." for name in only_there),
        *others,
    ]


def common_columns(here: TableDescription, there: TableDescription) -> list[str]:
    """The columns that both have; generated ones follow from the others."""
    ours, theirs = (
        {column.name for column in one.columns if not column.is_generated} for one in (here, there)
    )
    return sorted(ours & theirs)
