"""`restante oplog peers`: the nodes that this one exchanges its op log with."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from cyclopts import App, Parameter
from cyclopts.validators import Number

from restante.cli.columns import print_sentence, wrapped
from restante.cli.flags import DATABASE, flags_for, operator_for, settings_from
from restante.cli.output import json_text
from restante.errors import BadRequest, PeerUnknown
from restante.text import printable
from restante.wire.oplog_peers import PeerAdded, PeerList, PeerView

if TYPE_CHECKING:
    from restante.database.pool import Database
    from restante.oplog.peers import Changes

    PeerFlags = Any
else:
    PeerFlags = flags_for("PeerFlags", (*DATABASE, "self_url"))

_INDENT = 2

Result = TypeVar("Result")
Url = Annotated[str, Parameter(help="The address of the other node, such as https://b.example.")]
Token = Annotated[
    str | None,
    Parameter(
        help="The token that this node shows to the peer, as the peer's node has printed it."
    ),
]
Invite = Annotated[
    str | None,
    Parameter(
        allow_leading_hyphen=True,
        help="The admin token of the other node: adds each node at the other. `-` reads it from "
        "standard input.",
    ),
]
Tables = Annotated[
    list[str] | None,
    Parameter(
        negative=(),
        help="The tables that the peer may see and send, repeated or separated by commas; `*`: "
        "all. [default: all]",
    ),
]
Relays = Annotated[
    list[str] | None,
    Parameter(
        negative=(),
        help="The hosts whose ops the peer may pass on, beside its own; `*`: any. [default: any]",
    ),
]
MaxOps = Annotated[
    int | None,
    Parameter(
        validator=Number(gte=1),
        help="How many ops are exchanged with the peer in a minute. [default: no limit]",
    ),
]
MaxBytes = Annotated[
    int | None,
    Parameter(validator=Number(gte=1), help="The same in bytes. [default: no limit]"),
]
EvictAfterDays = Annotated[
    float | None,
    Parameter(
        validator=Number(gte=0, lte=3650),
        help="If the peer reads nothing for so many days, ops go although it has not read them, "
        "and it takes a snapshot when it comes back; 0: never. [default: never]",
    ),
]
NewToken = Annotated[
    bool,
    Parameter(
        negative=(),
        show_default=False,
        help="Replace the token that the peer shows to this node, and print the new one.",
    ),
]
AsJson = Annotated[bool, Parameter(help="Print JSON.", negative=(), show_default=False)]
Flags = Annotated[PeerFlags | None, Parameter(name="*")]

STANDARD_INPUT = "-"


def register(app: App) -> None:
    """Add the commands to `restante oplog`."""
    about = (
        "Add, list and remove the nodes that this one exchanges its op log with.\n\n"
        "Example: restante oplog peers add https://b.example --invite ADMIN_TOKEN_OF_B"
    )
    peers = App(name="peers", help=about)
    peers.command(add)
    peers.command(list_, name="list")
    peers.command(remove)
    app.command(peers)


def add(
    url: Url,
    /,
    *,
    token: Token = None,
    invite: Invite = None,
    tables: Tables = None,
    relays: Relays = None,
    max_ops_per_minute: MaxOps = None,
    max_bytes_per_minute: MaxBytes = None,
    evict_after_days: EvictAfterDays = None,
    new_token: NewToken = False,
    json: AsJson = False,
    flags: Flags = None,
) -> None:
    """
    Add a peer, or change one; running servers follow at once.

    Prints the token that the peer must show to this node, once. A peer that is there keeps its
    token, and everything that is not given.

    Two nodes A and B are joined by one command on A, with the admin token of B:

    restante oplog peers add https://b.example --invite ADMIN_TOKEN_OF_B

    Both nodes must have RESTANTE_SELF_URL. The command can be repeated: it makes both tokens anew.

    Or by three commands, on A, on B with the token that A has printed, and on A again with the
    token that B has printed:

    restante oplog peers add https://b.example

    restante oplog peers add https://a.example --token TOKEN_FROM_A

    restante oplog peers add https://b.example --token TOKEN_FROM_B

    Example: restante oplog peers add https://b.example --tables pages
    """
    from restante.oplog.peers import Changes

    if invite is not None and (token is not None or new_token):
        raise BadRequest("--invite exchanges both tokens: leave --token and --new-token out.")
    changes = Changes(
        token=token,
        tables=_names(tables),
        relays=_names(relays),
        max_ops_per_minute=max_ops_per_minute,
        max_bytes_per_minute=max_bytes_per_minute,
        evict_after_days=evict_after_days,
        renews_token=new_token,
    )
    added = _run(flags, _adding(url, changes, invite))
    if json:
        print(json_text(added, indent=2))
    else:
        _print_added(added, is_joined=invite is not None)


def _adding(
    url: str, changes: "Changes", invite: str | None
) -> "Callable[[Database, str | None, datetime], Awaitable[PeerAdded]]":
    """How the peer is added: here alone, or at both nodes."""
    if invite is None:
        return lambda db, own, now: _added(db, own, url, changes, now)
    secret = sys.stdin.readline().strip() if invite == STANDARD_INPUT else invite
    return lambda db, own, now: _joined(db, own, url, secret, changes, now)


def list_(*, json: AsJson = False, flags: Flags = None) -> None:
    """
    List the peers.

    Example: restante oplog peers list
    """
    found = _run(flags, lambda db, _own, _now: _listed(db))
    if json:
        print(json_text(PeerList(found), indent=2))
    elif not found:
        print_sentence("There is no peer. Start with `restante oplog peers add URL`.")
    else:
        _print_peers(found)


def remove(url: Url, /, *, json: AsJson = False, flags: Flags = None) -> None:
    """
    Remove a peer: nothing more is exchanged with it, and its token stops working at once.

    What came from it stays.

    Example: restante oplog peers remove https://b.example
    """
    host = _run(flags, lambda db, _own, _now: _removed(db, url))
    print(
        json_text({"host": host}, indent=2) if json else f"{printable(host)} is no peer any more."
    )


async def _added(
    db: "Database", own_url: str | None, url: str, changes: "Changes", now: datetime
) -> PeerAdded:
    from restante.oplog import peers, tables

    own_hosts = [own_url] if own_url else []
    async with db.transaction() as tx:
        added = await peers.add(tx, url, changes, own_hosts=own_hosts, now=now)
        return PeerAdded(added.peer.host, added.token, own_url or await tables.own_host(tx))


async def _joined(  # noqa: PLR0917 - what the command was given
    db: "Database", own_url: str | None, url: str, secret: str, changes: "Changes", now: datetime
) -> PeerAdded:
    from restante.oplog import tables
    from restante.oplog.invite import Invitation, join
    from restante.oplog.remote import Remote

    if own_url is None:
        async with db.connection() as connection:
            own_url = await tables.own_host(connection)
    if not own_url.startswith("http"):
        raise BadRequest("Set RESTANTE_SELF_URL: the other node must know the address of this one.")
    async with Remote.opened(own_host=own_url, clock=lambda: datetime.now(UTC)) as remote:
        invitation = Invitation(url, secret)
        added = await join(db, remote, invitation, changes, own_url=own_url, now=now)
    return PeerAdded(added.peer.host, None, own_url)


async def _listed(db: "Database") -> list[PeerView]:
    from restante.oplog import peers

    async with db.connection() as connection:
        return [peers.view(peer) for peer in await peers.all_peers(connection)]


async def _removed(db: "Database", url: str) -> str:
    from restante.oplog import peers

    async with db.connection() as connection:
        if not await peers.remove(connection, url):
            raise PeerUnknown(f"There is no peer {printable(url)}.")
    return peers.normalised_host(url)


def _run(
    flags: Any, action: "Callable[[Database, str | None, datetime], Awaitable[Result]]"
) -> Result:
    """Run it with the database, the address of this node if one is set, and the time."""

    async def run() -> Result:
        from restante.oplog.peers import normalised

        url = settings_from(flags).self_url
        async with operator_for(flags) as operator:
            return await action(operator.db, normalised(url) if url else None, datetime.now(UTC))

    return asyncio.run(run())


def _names(given: Sequence[str] | None) -> list[str] | None:
    if given is None:
        return None
    return [name.strip() for one in given for name in one.split(",") if name.strip()]


def _print_added(added: PeerAdded, *, is_joined: bool) -> None:
    host = printable(added.host)
    if is_joined:
        print(f"{host} and this node are peers of each other now.")
    elif added.token is None:
        print(f"{host} is a peer; the token that it shows to this node is unchanged.")
    else:
        print(f"{host} is a peer. The token that it must show to this node, shown only now:")
        print(added.token)


def _print_peers(found: Sequence[PeerView]) -> None:
    for peer in found:
        print(printable(peer.host))
        for line in wrapped("; ".join(_facts(peer)), indent=_INDENT):
            print(" " * _INDENT + line)


def _facts(peer: PeerView) -> Sequence[str]:
    tokens = {
        (True, True): "both",
        (True, False): "its own only",
        (False, True): "ours only",
        (False, False): "none",
    }
    limits = [
        f"{limit} {what}"
        for limit, what in ((peer.max_ops_per_minute, "ops"), (peer.max_bytes_per_minute, "bytes"))
        if limit is not None
    ]
    return (
        f"tokens: {tokens[peer.has_token, peer.shows_token]}",
        f"tables: {'all' if peer.tables is None else printable(', '.join(peer.tables))}",
        f"relays: {'any' if peer.relays is None else printable(', '.join(peer.relays))}",
        f"limits a minute: {', '.join(limits) or 'none'}",
        f"evicted: {_eviction(peer)}",
    )


def _eviction(peer: PeerView) -> str:
    if peer.evicted_at is not None:
        return f"since {peer.evicted_at:%Y-%m-%d %H:%M} UTC"
    if peer.evict_after_days is None:
        return "never"
    return f"after {peer.evict_after_days:g} days without reading"
