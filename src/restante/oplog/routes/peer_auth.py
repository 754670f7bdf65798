"""
Which peer is asking, and how what only peers ask for is described.

A token is accepted as bearer, or as the password of Basic with any name: that is how the existing
program sends what its peer's address contains.  Each request looks the token up, so that a peer
that was removed is refused at once.
"""

from collections.abc import Callable

import msgspec
from starlette.requests import HTTPConnection

from restante.database.pool import Database
from restante.errors import BadRequest, NotAuthenticated, RestanteError
from restante.http.networks import AddressRanges, network_of
from restante.http.operations import BODY_REFUSALS, Handler, operation
from restante.oplog import peers
from restante.oplog.peers import Peer, Reader
from restante.workspaces import auth

_REFUSED = (
    "Send the token of this peer as `Authorization: Bearer <token>`, or as the password of Basic."
)


def asked_by_peers(
    summary: str,
    body: type[msgspec.Struct],
    answer: type[msgspec.Struct],
    *refusals: type[RestanteError],
    details: str = "",
) -> Callable[[Handler], Handler]:
    """Describe a handler that only peers call, with JSON in both directions."""
    return operation(
        summary=summary,
        details=details,
        caller="peer",
        body=body,
        answers={200: answer},
        refusals=(BadRequest, NotAuthenticated, *BODY_REFUSALS, *refusals),
    )


async def authenticated(request: HTTPConnection) -> Peer:
    """The peer whose token was sent; raises NotAuthenticated, and TooManyAtOnce."""
    token = auth.presented_token(request)
    found = await _find(request, token) if token else None
    if found is None:
        raise NotAuthenticated(_REFUSED)
    return found


async def reader(request: HTTPConnection) -> Reader:
    """
    Who reads the log: a peer, or somebody without a token who may do so from this address.

    Raises NotAuthenticated; a wrong token is refused from any address.
    """
    if "authorization" in request.headers:
        return Reader(await authenticated(request), is_authenticated=True)
    host = request.client.host if request.client else ""
    if not _open_to(request).includes(host):
        raise NotAuthenticated(_REFUSED)
    network = network_of(host)
    auth.account(request).charge(("reader", network))
    return Reader(await _named(request), is_authenticated=False, network=network)


async def _find(request: HTTPConnection, token: str) -> Peer | None:
    async with _db(request).connection() as connection:
        found = await peers.find_by_token(connection, token)
    if found is not None:
        who = ("peer", found.id)
        auth.access(request).recent_tokens.note(token, who)
        auth.account(request).charge(who)
    return found


async def _named(request: HTTPConnection) -> Peer | None:
    """The peer that a User-Agent like `mediorum https://node.example` names; it proves nothing."""
    _, _, host = request.headers.get("user-agent", "").partition(" ")
    if not host:
        return None
    async with _db(request).connection() as connection:
        return await peers.find(connection, host)


def _db(request: HTTPConnection) -> Database:
    return request.app.state.db


def _open_to(request: HTTPConnection) -> AddressRanges:
    return request.app.state.oplog.open_to
