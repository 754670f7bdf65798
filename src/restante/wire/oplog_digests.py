"""What two nodes tell each other to find out whether their tables are equal."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from restante.wire.oplog_status import Lag

TABLES_PATH = "/internal/oplog/digest/tables"
DIGEST_PATH = "/internal/oplog/digest"
RECORDS_PATH = "/internal/oplog/digest/records"

MAX_PARTS = 1000
MAX_RECORDS = 5000
MAX_COLUMNS = 1600  # of one table, in Postgres

Key = Annotated[str, Meta(min_length=2, max_length=1_048_576)]
Names = Annotated[list[str], Meta(min_length=1, max_length=MAX_COLUMNS)]

# `index`: the order of the primary key; `text`: the bytes of the key's JSON, for nodes on which the
# primary keys sort differently.
KeyOrder = Literal["index", "text"]


class ColumnDescription(Struct, frozen=True):
    """One column, as it may differ between nodes."""

    name: str
    type: str
    is_generated: bool = False


class TableDescription(Struct, frozen=True, kw_only=True):
    """A table that can be compared."""

    name: str
    state: str
    columns: list[ColumnDescription]
    key_columns: list[str]
    order: str  # equal on two nodes if their primary keys sort in the same way
    rows: Annotated[int, Meta(description="An estimate; 0 if it is not known.")]


class NodeDescription(Struct, frozen=True, kw_only=True):
    """What the asking node can compare here, and how far both have read."""

    host: str
    head: Annotated[str, Meta(description="The last position of its tables; empty: no op.")]
    cursor: Annotated[str, Meta(description="How far it has read the log of the asking node.")]
    tables: list[TableDescription]
    waiting: Annotated[
        Lag | None, Meta(description="What of its log the asking node has not confirmed.")
    ] = None


class KeyRange(Struct, frozen=True):
    """The keys after one and up to another; without one it is open."""

    after: Key | None = None
    through: Key | None = None


class DigestRequest(Struct, frozen=True, kw_only=True):
    """Ranges of a table, in order."""

    table: str
    columns: Names
    order: KeyOrder = "index"
    ranges: Annotated[list[KeyRange], Meta(min_length=1, max_length=MAX_PARTS)]


class RangeDigest(Struct, frozen=True):
    """How many records a range has, and a hash of all of them."""

    rows: int
    digest: str
    has_more: bool = False  # it has more records than were looked at


class DigestAnswer(Struct, frozen=True):
    """One digest per range, in the same order."""

    digests: list[RangeDigest]


class RecordsRequest(Struct, frozen=True, kw_only=True):
    """Records of one range, or those with the given keys."""

    table: str
    columns: Names
    order: KeyOrder = "index"
    range: KeyRange | None = None
    limit: Annotated[int, Meta(ge=1, le=MAX_RECORDS)] = MAX_RECORDS
    keys: Annotated[list[Key], Meta(max_length=MAX_RECORDS)] | None = None


class RecordDigest(Struct, frozen=True):
    """The key of a record, as a JSON array, and a hash of the record."""

    key: str
    digest: str


class RecordsAnswer(Struct, frozen=True):
    """The records in order; those with a given key that does not exist are left out."""

    records: list[RecordDigest]


Difference = Literal["missing_here", "missing_there", "different"]
TableOutcome = Literal["equal", "differs", "changing", "not_compared"]


class KeyDifference(Struct, frozen=True):
    """A key whose record is not the same on both nodes."""

    key: str
    what: Difference


class TableReport(Struct, frozen=True, kw_only=True):
    """What the comparison of one table found."""

    table: str
    outcome: TableOutcome
    rows_here: int = 0
    rows_there: int = 0
    keys: list[KeyDifference] = []
    more_ranges: int = 0  # ranges that differ, too, and whose keys are not listed
    schema: list[str] = []  # differences of the columns, as sentences
    reason: str = ""  # why it was not compared, or not to the end


class VerifyReport(Struct, frozen=True, kw_only=True):
    """What a comparison with a peer found."""

    peer: str
    is_equal: bool
    is_caught_up: bool  # both had read what the other had at the first look
    tables: list[TableReport]
    seconds: float


class UnrepairedKey(Struct, frozen=True):
    """A record that still differs after a resync."""

    key: str
    what: Literal["missing_here", "missing_there", "different"]
    reason: str


class ResyncReport(Struct, frozen=True, kw_only=True):
    """What a resync has achieved."""

    peer: str
    table: str
    status: Literal["complete", "incomplete"]
    keys: list[UnrepairedKey] = []  # that still differ
    more_ranges: int = 0  # ranges that differ, too, and whose keys are not listed
    refused: int = 0  # records of the peer that were refused meanwhile
    reason: str = ""  # why it could not be compared to the end
