"""
Joins two nodes with one command: each gets the other as a peer, and both tokens are exchanged.

The other node is asked first, with its admin token.  If anything fails after that, the command can
be repeated: both tokens are new each time, and nothing else changes.
"""

from dataclasses import dataclass, replace
from datetime import datetime

from restante.database.pool import Database
from restante.errors import PeerUnreachable
from restante.oplog import peers
from restante.oplog.peers import Added, Changes
from restante.oplog.remote import Remote
from restante.wire import oplog_peers as wire


@dataclass(frozen=True, slots=True)
class Invitation:
    """The other node, and its admin token."""

    host: str
    token: str


async def join(  # noqa: PLR0913 - both nodes, and what is agreed between them
    db: Database,
    remote: Remote,
    invitation: Invitation,
    changes: Changes,
    *,
    own_url: str,
    now: datetime,
) -> Added:
    """
    Add each node as a peer of the other.

    `changes` are for the peer that is added here.  Raises BadRequest and PeerUnreachable.
    """
    other = replace(invitation, host=peers.normalised(invitation.host))
    async with db.connection() as connection:
        await peers.refuse_self(connection, other.host, [own_url])
    shown = peers.new_token()
    request = wire.PeerChanges(url=own_url, token=shown, new_token=True)
    answer = await remote.asked(other, wire.PEERS_PATH, request, wire.PeerAdded)
    if answer.token is None:
        raise PeerUnreachable("It did not answer with a token.")
    changes = replace(changes, token=answer.token, shown_token=shown)
    async with db.connection() as connection:
        return await peers.add(connection, other.host, changes, own_hosts=[own_url], now=now)
