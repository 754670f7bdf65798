"""Which tables can be tracked, and what to know about one before.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from restante.database import sql
from restante.database.sessions import SCHEMA
from restante.oplog.tables import TrackedTable

_NOT_TABLES = {
    "v": "a view: track the tables that it reads",
    "m": "a materialized view: track the tables that it reads",
    "f": "a foreign table: track it in the database that has it",
    "S": "a sequence",
    "c": "a type",
    "i": "an index",
    "I": "an index",
    "t": "a TOAST table",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A relation as the catalogue describes it."""

    oid: int
    schema_name: str
    table_name: str
    kind: str = "r"
    persistence: str = "p"
    is_system: bool = False
    is_partition_of: str | None = None
    inherits: bool = False
    owner: str = ""
    is_ours: bool = True  # our role may act as the owner
    role: str = ""
    other_owner: str | None = None  # of it or of a partition, who may not act as our role
    hides_rows: bool = False  # row-level security applies to our role
    key_columns: Sequence[str] | None = None
    key_numbers: Sequence[int] = ()
    is_key_deferrable: bool = False
    counted_keys: Sequence[str] = ()  # key columns from a sequence or identity
    is_key_exact: bool = False  # values that are equal have the same text
    loose_keys: Sequence[str] = ()  # key columns whose equal values may have different texts
    unique_indexes: Sequence[str] = ()
    untracked_references: Sequence[str] = ()
    generated_columns: Sequence[str] = ()
    is_subscribed: bool = False
    has_hash: bool = True
    shape: int = 0

    @property
    def shown(self) -> str:
        return f"{self.schema_name}.{self.table_name}"

    @property
    def relation(self) -> str:
        """Its schema and name, quoted for a statement."""
        return f"{sql.quoted(self.schema_name)}.{sql.quoted(self.table_name)}"


def refusal(facts: Facts, *, forced: bool) -> str | None:
    """Why this relation cannot be tracked, and the way out; None if it can."""
    return (
        _wrong_relation(facts)
        or _wrong_rights(facts)
        or _wrong_owner(facts, forced=forced)
        or _wrong_key(facts, forced=forced)
    )


def _wrong_relation(facts: Facts) -> str | None:
    name = facts.shown
    if what := _NOT_TABLES.get(facts.kind):
        return f"{name} is {what}."
    if facts.is_system or facts.schema_name == SCHEMA:
        return (
            f"{name} belongs to Postgres or to Restante itself; only your own tables are tracked."
        )
    return _wrong_storage(facts)


def _wrong_storage(facts: Facts) -> str | None:
    name = facts.shown
    if facts.persistence == "t":
        return f"{name} is a temporary table, which ends with its session."
    if facts.persistence == "u":
        return (
            f"{name} is unlogged: a crash would empty it on this node alone. "
            f"Run ALTER TABLE {name} SET LOGGED first."
        )
    if facts.is_partition_of:
        return f"{name} is a partition: track {facts.is_partition_of}, with all its partitions."
    if facts.inherits:
        return (
            f"{name} inherits from a table, or others inherit from it, so some of its changes "
            "would be missed. Use partitions instead."
        )
    return None


def _wrong_rights(facts: Facts) -> str | None:
    name = facts.shown
    if not facts.is_ours:
        return (
            f"{name} belongs to {facts.owner}, and only the owner can create its triggers. "
            f"Run ALTER TABLE {name} OWNER TO {facts.role}; or, if {facts.owner} is trusted with "
            f"all that Restante knows, GRANT {facts.owner} TO {facts.role}, and use --force."
        )
    if facts.hides_rows:
        return (
            f"Row-level security of {name} applies to {facts.role}, so rows would be hidden. "
            f"Run ALTER ROLE {facts.role} BYPASSRLS, "
            f"or ALTER TABLE {name} NO FORCE ROW LEVEL SECURITY."
        )
    return None


def _wrong_owner(facts: Facts, *, forced: bool) -> str | None:
    """Triggers, types and casts of the owner run with our rights, in capture and when we apply."""
    if facts.other_owner is None or forced:
        return None
    return (
        f"{facts.shown} or a partition of it belongs to {facts.other_owner}. {_power(facts)} Run "
        f"ALTER TABLE ... OWNER TO {facts.role}; or use --force, if {facts.other_owner} is trusted."
    )


def _power(facts: Facts) -> str:
    return (
        "Triggers and types of a tracked table run with the rights of "
        f"{facts.role}, so its owner could read the tokens of peers; and everything, if "
        f"{facts.role} is a superuser."
    )


def _wrong_key(facts: Facts, *, forced: bool) -> str | None:
    name = facts.shown
    if not facts.key_columns:
        return (
            f"{name} has no primary key, so its records cannot be told apart. "
            f"Run ALTER TABLE {name} ADD PRIMARY KEY (...)."
        )
    if facts.is_key_deferrable:
        return (
            f"The primary key of {name} is deferrable, and such a key cannot be used to insert "
            "records. Create it again as NOT DEFERRABLE."
        )
    if facts.counted_keys and not forced:
        return (
            f"The key of {name} comes from a sequence ({', '.join(facts.counted_keys)}): two nodes "
            "would give the same number to different records, and one of them would be lost. Use a "
            "UUID as key, or give each node numbers of its own (INCREMENT BY) and use --force."
        )
    return None


def warnings(facts: Facts) -> list[str]:
    """What an operator should know about a table that can be tracked."""
    found: list[str] = []
    if facts.other_owner:
        found.append(f"It belongs to {facts.other_owner}. {_power(facts)}")
    if facts.counted_keys:
        found.append(
            f"The key comes from a sequence ({', '.join(facts.counted_keys)}): each node needs "
            "numbers of its own, or records are lost."
        )
    if facts.unique_indexes:
        found.append(
            f"It has other unique keys ({', '.join(facts.unique_indexes)}): if two nodes use the "
            "same value, the later change is parked until one of them is changed."
        )
    if facts.untracked_references:
        found.append(
            "It refers to tables that are not tracked "
            f"({', '.join(facts.untracked_references)}): a record whose referenced record is "
            "missing on a peer is parked there. Track them too."
        )
    if facts.generated_columns:
        found.append(
            f"Its generated columns ({', '.join(facts.generated_columns)}) are computed on each "
            "node, not copied."
        )
    if facts.loose_keys:
        found.append(
            f"Equal values of its key ({', '.join(facts.loose_keys)}) may be written in different "
            "ways, such as 1.0 and 1.00, or 1 day and 24:00: always write them in the same way, or "
            "peers have two records for one."
        )
    if facts.is_subscribed:
        found.append(
            "It is filled by a subscription, whose changes fire no statement triggers: they are "
            "not captured."
        )
    return found


def gone(table: TrackedTable) -> str:
    """About a table that is tracked and does not exist."""
    return (
        f"{table.schema_name}.{table.table_name} was dropped, or it was renamed and has lost the "
        f"triggers of the op log. Run `restante oplog untrack {table.name}`."
    )


def key_problem(table: TrackedTable, facts: Facts, numbers: Sequence[int]) -> str | None:
    """
    Whether the table has another key than the one that is tracked; its columns may have new names.

    `numbers` are the positions of the columns that were its key.
    """
    if not facts.key_columns:
        return (
            f"{facts.shown} has no primary key any more. Add the one that it had, or run "
            f"`restante oplog untrack {table.name}`."
        )
    if tuple(facts.key_columns) == table.key_columns or list(numbers) == list(facts.key_numbers):
        return None
    return (
        f"The primary key of {facts.shown} was ({', '.join(table.key_columns)}) and is "
        f"({', '.join(facts.key_columns)}) now. Run `restante oplog untrack {table.name}`, and "
        "`restante oplog track` again."
    )
