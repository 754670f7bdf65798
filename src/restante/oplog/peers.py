"""
The other nodes: their addresses, their tokens, and what each may see, send and pass on.

Two tokens belong to a peer.  The one that it shows to us is stored as a hash, and tells us who is
asking.  The one that we show to it is stored as it is.
"""

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from urllib.parse import urlsplit

from restante.database import sql
from restante.database.pool import Connection, Row
from restante.errors import BadRequest
from restante.text import MAX_QUOTED, printable
from restante.wire.oplog_peers import PeerView

queries = sql.load("restante.oplog", "peers")

ALL = "*"

_MAX_HOST = 255
_MAX_TOKEN = 4096
_MAX_NAMES = 1000
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NAME = re.compile(r"[a-z0-9_]([a-z0-9._-]*[a-z0-9_])?", re.ASCII)
# Printable, and nothing that a header or a URL would need to have escaped.
_TOKEN = re.compile(r"[!-~]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Peer:
    """Another node, and what we let it do."""

    id: int
    host: str  # its address, normalised
    tables: frozenset[str] | None = None  # it may see and send these; None: all
    shown_later: frozenset[int] = frozenset()  # tables that it has not read, because it might not
    relays: frozenset[str] | None = None  # hosts whose ops it may pass on; None: any
    token: str | None = None  # what we show to it
    has_token: bool = False  # whether it has one to show to us
    protocol: str | None = None  # "restante" or "ulid"; None: not known yet
    cursor: str = ""  # how far we have read its log
    max_ops_per_minute: int | None = None
    max_bytes_per_minute: int | None = None
    added_at: datetime | None = None
    evict_after_days: float | None = None  # for so long it may be away
    evicted_at: datetime | None = None

    def may_see(self, table: str) -> bool:
        """Whether it may read and send ops of this table."""
        return self.tables is None or table in self.tables

    def may_relay(self, origin: str) -> bool:
        """Whether it may pass on ops of this host; its own are always its to send."""
        return self.relays is None or origin == self.host or origin in self.relays


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads our log; without a peer it is somebody of an address range that may."""

    peer: Peer | None
    is_authenticated: bool
    network: str = ""  # from where it asks, if it has no token

    def may_see(self, table: str) -> bool:
        """Whether ops of this table are for it."""
        return self.peer is None or self.peer.may_see(table)


@dataclass(frozen=True, slots=True)
class Changes:
    """What is known of a peer that is added; None keeps what is stored, or the default."""

    token: str | None = None  # what we show to it
    tables: Sequence[str] | None = None  # ALL alone, or none: all
    relays: Sequence[str] | None = None
    max_ops_per_minute: int | None = None
    max_bytes_per_minute: int | None = None
    evict_after_days: float | None = None  # 0: it may be away for ever
    shown_token: str | None = None  # what it is to show to us, if somebody has chosen it already
    renews_token: bool = False  # the token that it shows to us is replaced


@dataclass(frozen=True, slots=True)
class Added:
    """A peer that was added or changed."""

    peer: Peer
    token: str | None  # what it shows to us; None if it has one already


def normalised(url: str) -> str:
    """
    The one spelling of a node's address: lower case, without default port and final slash.

    Raises BadRequest if it is none.
    """
    spelt = normalised_host(url)
    try:
        parts = urlsplit(spelt)
        is_address = parts.scheme in _DEFAULT_PORTS and _is_host(parts.hostname or "")
        is_bare = not (parts.query or parts.fragment or parts.port == 0 or "@" in parts.netloc)
    except ValueError:
        is_address = is_bare = False
    if not is_address or not is_bare or not url.strip().isprintable() or " " in spelt:
        shown = printable(url, max_length=MAX_QUOTED)
        raise BadRequest(
            f"{shown} is not the address of a node. Write it like https://node.example, without "
            "name, token, query or fragment."
        )
    if len(spelt) > _MAX_HOST:
        raise BadRequest(f"The address of a node may have {_MAX_HOST} characters.")
    return spelt


def normalised_host(text: str) -> str:
    """The same for the host of an op, which may be any name; what is no address is only lowered."""
    lowered = text.strip().lower().rstrip("/")
    try:
        parts = urlsplit(lowered)
        host, port = parts.hostname, parts.port
    except ValueError:
        return lowered
    if parts.scheme not in _DEFAULT_PORTS or not host or "@" in parts.netloc:
        return lowered
    authority = _spelt(host) + (f":{port}" if _is_needed(parts.scheme, port) else "")
    query = f"?{parts.query}" if parts.query else ""
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    return f"{parts.scheme}://{authority}{parts.path.rstrip('/')}{query}{fragment}"


def _is_needed(scheme: str, port: int | None) -> bool:
    return port is not None and port != _DEFAULT_PORTS[scheme]


def _spelt(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.rstrip(".")
    return f"[{address}]" if address.version == 6 else str(address)


def _is_host(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return _NAME.fullmatch(host) is not None
    return True


def is_same_node(host: str, other: str) -> bool:
    """Whether two addresses are spellings of one node; http and https are."""
    return _without_scheme(host) == _without_scheme(other)


def _without_scheme(host: str) -> str:
    scheme, separator, rest = normalised_host(host).partition("://")
    return rest if separator and scheme in _DEFAULT_PORTS else scheme + separator + rest


def new_token() -> str:
    """
    A random token; it is shown once and stored only as a hash.

    Hexadecimal, because nodes of the existing program lower-case the address that has it.
    """
    return secrets.token_hex(32)


def token_hash(token: str) -> bytes:
    """How a token is stored and looked up.  It is long and random, so a plain hash is enough."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


async def all_peers(connection: Connection) -> list[Peer]:
    """Every peer, by address; never this node itself."""
    return [_peer(row) for row in await connection.fetch(queries.peers)]


async def find(connection: Connection, url: str) -> Peer | None:
    """The peer with this address, however it is spelt."""
    row = await connection.fetchrow(queries.peer_by_host, normalised_host(url))
    return _peer(row) if row else None


async def read_from(connection: Connection, peer_id: int) -> str:
    """How far the log of a peer was read, of all tables; empty if nothing was."""
    return await connection.fetchval(queries.read_from, peer_id) or ""


async def find_by_token(connection: Connection, token: str) -> Peer | None:
    """The peer that shows this token."""
    row = await connection.fetchrow(queries.peer_by_token, token_hash(token))
    return _peer(row) if row else None


async def add(
    connection: Connection,
    url: str,
    changes: Changes,
    *,
    own_hosts: Collection[str] = (),
    now: datetime,
) -> Added:
    """
    Add a peer, or change what is given of one that is there.

    A new one gets a token to show to us.  One that is there keeps it: then the result has none.
    Raises BadRequest for an address that is this node's own, in any spelling.
    """
    host = normalised(url)
    await refuse_self(connection, host, own_hosts)
    _check(changes)
    token = changes.shown_token or new_token()
    is_new = await connection.fetchval(
        queries.add_peer,
        host,
        token_hash(token),
        changes.token,
        _names(changes.tables),
        _hosts(changes.relays),
        changes.max_ops_per_minute,
        changes.max_bytes_per_minute,
        now,
        changes.renews_token or changes.shown_token is not None,
        changes.evict_after_days,
    )
    peer = await find(connection, host)
    assert peer is not None  # noqa: S101 - it was just written
    return Added(peer, token if is_new else None)


async def remove(connection: Connection, url: str) -> bool:
    """
    Forget a peer: its token stops working, and so do the snapshots between it and us.

    Ops that came from it stay.  False if there is no such peer.
    """
    return bool(await connection.fetchval(queries.remove_peer, normalised_host(url)))


async def refuse_self(connection: Connection, host: str, own_hosts: Collection[str]) -> None:
    """Raise BadRequest if an address is this node's own, in any spelling."""
    stored = await connection.fetchval(queries.own_host)
    ours = {*own_hosts, *([stored] if stored else [])}
    if any(is_same_node(host, own) for own in ours):
        raise BadRequest(f"{host} is this node itself: a peer is another node.")


def _check(changes: Changes) -> None:
    if changes.token is not None:
        _check_token(changes.token)
    if changes.shown_token is not None:
        _check_token(changes.shown_token)
        if changes.shown_token != changes.shown_token.lower():
            raise BadRequest("The token that a peer shows must be in lower case.")
    for names in (changes.tables, changes.relays):
        if len(names or ()) > _MAX_NAMES:
            raise BadRequest(f"Name at most {_MAX_NAMES} tables or hosts, or {ALL} for all.")
        if any(not 0 < len(name) <= _MAX_HOST or "\0" in name for name in names or ()):
            raise BadRequest(f"A name has 1 to {_MAX_HOST} characters.")


def _check_token(token: str) -> None:
    if not _TOKEN.fullmatch(token) or len(token) > _MAX_TOKEN:
        raise BadRequest("A token has printable ASCII characters only, and no spaces.")


def _names(given: Sequence[str] | None) -> list[str] | None:
    """As the statement takes them: null keeps, an empty array means all."""
    if given is None:
        return None
    return [] if ALL in given else sorted(set(given))


def _hosts(given: Sequence[str] | None) -> list[str] | None:
    return _names(None if given is None else [normalised_host(host) for host in given])


def _peer(row: Row) -> Peer:
    peer = Peer(**dict(row))
    return replace(
        peer,
        tables=None if peer.tables is None else frozenset(peer.tables),
        shown_later=frozenset(peer.shown_later),
        relays=None if peer.relays is None else frozenset(peer.relays),
    )


def view(peer: Peer) -> PeerView:
    """A peer as the operator sees it."""
    return PeerView(
        host=peer.host,
        has_token=peer.has_token,
        shows_token=peer.token is not None,
        tables=None if peer.tables is None else sorted(peer.tables),
        relays=None if peer.relays is None else sorted(peer.relays),
        max_ops_per_minute=peer.max_ops_per_minute,
        max_bytes_per_minute=peer.max_bytes_per_minute,
        protocol=peer.protocol,
        added_at=peer.added_at,
        evict_after_days=peer.evict_after_days,
        evicted_at=peer.evicted_at,
    )


async def may_pull(session: Connection, peer_id: int) -> bool:
    """Whether this session is the one that pulls from a peer now, until it ends or `stop_pull`."""
    return await session.fetchval(queries.try_lock_pull, peer_id)


async def stop_pull(session: Connection, peer_id: int) -> None:
    """Let another session pull from the peer."""
    await session.fetchval(queries.unlock_pull, peer_id)
