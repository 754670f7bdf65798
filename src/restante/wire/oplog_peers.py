"""The peers of a node, and what a node tells its peers about itself."""

from typing import Annotated

from msgspec import Meta, Struct

from restante.wire.common import Moment

PEERS_PATH = "/admin/oplog/peers"
STATUS_PATH = "/internal/oplog/status"

_Names = list[Annotated[str, Meta(min_length=1, max_length=255)]]
_Limit = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_Bytes = Annotated[int, Meta(ge=1, le=2**62)]


class PeerChanges(Struct, frozen=True, kw_only=True):
    """A peer to add, or what is to change of one; what is not sent keeps its value."""

    url: Annotated[
        str, Meta(min_length=1, max_length=2048, description="The address of the other node.")
    ]
    token: Annotated[str | None, Meta(description="The token that we show to it.")] = None
    tables: Annotated[
        _Names | None, Meta(description="The tables that it may see and send; `*`: all.")
    ] = None
    relays: Annotated[
        _Names | None,
        Meta(description="The hosts whose ops it may pass on beside its own; `*`: any."),
    ] = None
    max_ops_per_minute: _Limit | None = None
    max_bytes_per_minute: _Bytes | None = None
    evict_after_days: Annotated[
        Annotated[float, Meta(ge=0, le=3650)] | None,
        Meta(
            description="If it reads nothing for so long, ops go although it has not read them; "
            "0: never."
        ),
    ] = None
    new_token: Annotated[
        bool, Meta(description="Replace the token that it shows to us, and answer with it.")
    ] = False


class PeerAdded(Struct, frozen=True):
    """A peer was added or changed."""

    host: Annotated[str, Meta(description="Its address, in the one spelling that is used.")]
    token: Annotated[
        str | None,
        Meta(description="What it shows to us; shown once. Null: it has one and keeps it."),
    ]
    node: Annotated[str, Meta(description="The name of this node.")]


class PeerView(Struct, frozen=True):
    """A peer, without its tokens."""

    host: str
    has_token: Annotated[bool, Meta(description="It has a token to show to us.")]
    shows_token: Annotated[bool, Meta(description="We have a token to show to it.")]
    tables: Annotated[list[str] | None, Meta(description="What it may see and send; null: all.")]
    relays: Annotated[
        list[str] | None, Meta(description="Whose ops it may pass on beside its own; null: any.")
    ]
    max_ops_per_minute: int | None
    max_bytes_per_minute: int | None
    protocol: Annotated[
        str | None,
        Meta(description="`restante`, or `ulid` for the existing program; null: not known yet."),
    ]
    added_at: Moment | None
    evict_after_days: Annotated[
        float | None, Meta(description="For so long it may be away; null: for ever.")
    ] = None
    evicted_at: Annotated[
        Moment | None,
        Meta(description="Since then ops go although it has not read them; null: they do not."),
    ] = None


class PeerList(Struct, frozen=True):
    """All peers, by address."""

    peers: list[PeerView]


class ColumnView(Struct, frozen=True):
    """A column of a tracked table."""

    name: str
    type: str


class TableView(Struct, frozen=True):
    """A table that the peer may see."""

    name: str
    state: str
    columns: list[ColumnView]
    schema_hash: Annotated[str, Meta(description="Equal if names, types and key are equal.")]
    floor: Annotated[str, Meta(description="The largest ULID that was dropped from its log.")]
    trimmed: Annotated[str, Meta(description="The last position that was dropped; empty: none.")]


class NodeStatus(Struct, frozen=True):
    """What a node tells its peers."""

    host: str
    version: str
    time: Annotated[int, Meta(description="Unix milliseconds.")]
    era: int
    horizon: Annotated[int, Meta(description="Transactions from this one on may be in flight.")]
    head: Annotated[str, Meta(description="The position of the last op that can be read.")]
    tables: list[TableView]
