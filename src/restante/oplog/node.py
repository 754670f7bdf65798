"""This node of the op log, as handlers and loops find it in `app.state.oplog`."""

from dataclasses import dataclass, field

from restante.database.pool import Database
from restante.http.body_room import BodyRoom
from restante.http.networks import AddressRanges
from restante.oplog.callbacks import Callbacks
from restante.oplog.pulling.outbox import Outbox
from restante.oplog.serving.log import Limits
from restante.oplog.serving.rates import PeerRates
from restante.oplog.serving.readers import OpenEnds
from restante.oplog.serving.watch import Watcher

# Records that are larger than a piece of a page, of all readers together.
LARGE_RECORDS_BYTES = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What the parts of the op log share."""

    db: Database
    watcher: Watcher
    outbox: Outbox
    callbacks: Callbacks = field(default_factory=Callbacks)
    own_url: str | None = None  # under which peers know us, normalised
    open_to: AddressRanges = field(default_factory=AddressRanges)
    page_limits: Limits = field(default_factory=Limits)
    rates: PeerRates = field(default_factory=PeerRates)
    open_ends: OpenEnds = field(default_factory=OpenEnds)
    room: BodyRoom = field(default_factory=lambda: BodyRoom(LARGE_RECORDS_BYTES))
