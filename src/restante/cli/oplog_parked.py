"""`restante oplog parked` and `conflicts`: changes of peers that wait, and changes that lost."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter
from cyclopts.validators import Number

from restante.cli.flags import DATABASE, flags_for, operator_for
from restante.cli.output import json_text
from restante.errors import BadRequest
from restante.text import printable

if TYPE_CHECKING:
    from restante.database.pool import Database
    from restante.oplog.applying.conflicts import Listed
    from restante.oplog.applying.parked import ParkedOp

    ParkedFlags = Any
else:
    ParkedFlags = flags_for("ParkedFlags", DATABASE)

Result = TypeVar("Result")
Id = Annotated[int, Parameter(help="The number that `list` shows.")]
All = Annotated[bool, Parameter(name="--all", negative=(), show_default=False)]
Limit = Annotated[int, Parameter(validator=Number(gte=1, lte=10_000))]
AsJson = Annotated[bool, Parameter(help="Print JSON.", negative=(), show_default=False)]
Flags = Annotated[ParkedFlags | None, Parameter(name="*")]

_SHOWN_DATA = 200


def register(app: App) -> None:
    """Add the commands to `restante oplog`."""
    about = (
        "List, retry or discard changes of peers that could not be applied.\n\n"
        "They are retried by themselves when there is reason to hope.\n\n"
        "Example: restante oplog parked list --reason foreign_key"
    )
    parked = App(name="parked", help=about)
    parked.default(list_)
    parked.command(list_, name="list")
    parked.command(retry)
    parked.command(discard)
    app.command(parked)
    app.command(conflicts)


def list_(
    *,
    table: str | None = None,
    reason: str | None = None,
    after: int = 0,
    limit: Limit = 50,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    List the changes that wait, oldest first.

    Example: restante oplog parked list --table articles

    Parameters
    ----------
    table
        Only changes of this table, under the name that peers use.
    reason
        Only changes that wait for this reason: foreign_key, unique, type, check, not_null,
        too_large, future, below_floor or other.
    after
        Continue after this number, the last one of the previous page.
    limit
        Maximum number of changes, up to 10000.
    """

    async def read(db: "Database") -> "list[ParkedOp]":
        from restante.oplog.applying import parked

        async with db.connection() as connection:
            return await parked.listed(
                connection, table=table, reason=reason, after=after, limit=limit
            )

    found = _run(flags, read)
    if json:
        print(json_text({"parked": found}, indent=2))
    else:
        _print_parked(found)


def retry(*ids: Id, every: All = False, json: AsJson = False, flags: Flags = None) -> None:
    """
    Try changes again now, also those below the floor.

    What Postgres refuses again stays. A change whose time has not come stays too. A number under
    which nothing is parked is named, and the others are tried.

    Example: restante oplog parked retry 17 18

    Parameters
    ----------
    every
        All of them.
    """
    chosen = _chosen(ids, every=every)

    async def run(db: "Database") -> Any:
        from restante.oplog.applying import parked

        async with db.connection() as connection:
            unknown = await parked.unknown(connection, ids)
        return await parked.retry(db, chosen, now=datetime.now(UTC)), unknown

    result, unknown = _run(flags, run)
    if json:
        print(json_text(result, indent=2))
    else:
        print(
            f"{result.applied} applied, {result.superseded} outdated, "
            f"{result.still_parked} still parked"
        )
    _refuse(unknown)


def discard(*ids: Id, every: All = False, json: AsJson = False, flags: Flags = None) -> None:
    """
    Forget changes for good; this node then differs from its peers.

    Example: restante oplog parked discard 17

    Parameters
    ----------
    every
        All of them.
    """
    chosen = _chosen(ids, every=every)

    async def run(db: "Database") -> tuple[int, list[int]]:
        from restante.oplog.applying import parked

        async with db.connection() as connection:
            unknown = await parked.unknown(connection, ids)
            return await parked.discard(connection, chosen), unknown

    count, unknown = _run(flags, run)
    print(json_text({"discarded": count}, indent=2) if json else f"{count} discarded")
    _refuse(unknown)


def conflicts(
    *,
    table: str | None = None,
    before: int | None = None,
    limit: Limit = 50,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    List changes that lost against one that they had not seen, newest first.

    The last 10000 of 30 days are kept, with both records; those above 64 KiB are not kept.

    Example: restante oplog conflicts --table articles

    Parameters
    ----------
    table
        Only conflicts in this table, under the name that peers use.
    before
        Continue before this number, the last one of the previous page.
    limit
        Maximum number of conflicts, up to 10000.
    """

    async def read(db: "Database") -> "list[Listed]":
        from restante.oplog.applying import conflicts

        async with db.connection() as connection:
            return await conflicts.listed(connection, table=table, before=before, limit=limit)

    found = _run(flags, read)
    if json:
        print(json_text({"conflicts": found}, indent=2))
    else:
        _print_conflicts(found)


def _chosen(ids: Sequence[int], *, every: bool) -> list[int] | None:
    if bool(ids) == every:
        raise BadRequest("Name the changes by their numbers, or say --all.")
    return None if every else list(ids)


def _refuse(unknown: Sequence[int]) -> None:
    """Name the numbers that the command could do nothing about."""
    if unknown:
        raise BadRequest(f"Nothing is parked under {', '.join(map(str, unknown))}.")


def _print_parked(found: "Sequence[ParkedOp]") -> None:
    if not found:
        print("Nothing is parked.")
    for one in found:
        key = one.key if one.key is not None else "with an unreadable key"
        print(
            f"{one.id}  {one.reason}: {one.action} of {printable(one.table)} "
            f"{printable(key, max_length=_SHOWN_DATA)}"
        )
        print(f"    {printable(one.sentence)}")
        since, tried = f"{one.parked_at:%Y-%m-%d %H:%M:%S}", f"{one.tried_at:%Y-%m-%d %H:%M:%S}"
        print(
            f"    made by {printable(one.host)}, from {printable(one.peer or 'a removed peer')}; "
            f"parked {since}, tried {one.tries} times, last {tried} (UTC)"
        )


def _print_conflicts(found: "Sequence[Listed]") -> None:
    if not found:
        print("There are no conflicts.")
    for one in found:
        print(
            f"{one.id}  {one.noticed_at:%Y-%m-%d %H:%M:%S} UTC  {one.reason}: "
            f"{printable(one.table)} {printable(one.key, max_length=_SHOWN_DATA)}"
        )
        kept = _data(one.kept, is_delete=one.kept_is_delete)
        lost = _data(one.lost, is_delete=one.lost_is_delete)
        print(f"    kept {one.kept_ulid} of {printable(one.kept_host)}: {kept}")
        print(f"    lost {one.lost_ulid} of {printable(one.lost_host)}: {lost}")


def _data(data: Any, *, is_delete: bool) -> str:
    if is_delete:
        return "deleted"
    if data is None:
        return "not kept"
    return printable(bytes(data).decode(errors="replace"), max_length=_SHOWN_DATA)


def _run(flags: Any, action: "Callable[[Database], Awaitable[Result]]") -> Result:
    async def run() -> Result:
        async with operator_for(flags) as operator:
            return await action(operator.db)

    return asyncio.run(run())
