"""
What has to be done so that every partition has every index of the table that it belongs to.

Pure: it reads a `Tree`.  An index of a partitioned table holds no rows.  It is valid once each
partition has an index that is attached to it, and that is valid.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from restante.oplog.indexing.catalogue import Index, Table, Tree, shape_of
from restante.oplog.tables import OPS

# What the statements of the op log need.
REQUIRED: Final = {
    "ops_by_position": "btree (era, xid, ulid, n)",
    "ops_by_ulid": "btree (ulid)",
    "ops_by_key": "btree (key_hash, ulid)",
}

Optional = Literal["arrival"]

# What an operator may add.  Ops are stored in the order of their arrival, so a BRIN is enough to
# find a range of time.  It takes 32 KiB for 300,000 ops and is built without sorting; a btree would
# have an entry for each op.
OPTIONAL: Final[Mapping[Optional, str]] = {
    "arrival": "brin (arrived_at) WITH (pages_per_range='32', autosummarize='on')"
}

MARGIN: Final = 1.2

_MAX_NAME = 63
_PAGE = 8192
_SMALLEST_ROW = 100  # no op takes less
_UNKNOWN_WIDTH = 32
_TUPLE_OVERHEAD = 12  # its header and its pointer
_FILLED = 0.85  # of all pages; 0.9 of each leaf page, and there are others
_PAGES_PER_RANGE = 32
_RANGE_BYTES = 40
_COLUMNS = re.compile(r"^\w+ \(([^()]*)\)")


class Action(StrEnum):
    """One kind of step."""

    DECLARE = "declare"  # an index of a partitioned table, without rows
    BUILD = "build"
    REPLACE = "replace"  # drop an INVALID leftover, and build
    REBUILD = "rebuild"  # one that is attached already, and INVALID
    ATTACH = "attach"  # a valid one is there
    VALIDATE = "validate"  # every partition has it, and it is marked INVALID
    LEAVE = "leave alone"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Estimate:
    """The bytes that a build takes."""

    index_bytes: int = 0
    sort_bytes: int = 0  # temporary files, until the build ends


@dataclass(frozen=True, slots=True)
class Step:
    """One step, for one index of one table."""

    action: Action
    table: str
    index: str
    definition: str
    is_unique: bool = False
    parent_index: str | None = None
    leftovers: tuple[str, ...] = ()
    estimate: Estimate = Estimate()
    why: str = ""

    @property
    def key(self) -> tuple[Action, str, str]:
        """What is tried once in a run."""
        return self.action, self.table, self.definition


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which optional indexes, and of which logs; None: of all."""

    add: tuple[Optional, ...] = ()
    logs: tuple[str, ...] | None = None


def planned(tree: Tree, wanted: Wanted) -> list[Step]:
    """
    Every step, parents first, then the smallest partitions first.

    So that a lack of rights or of room is noticed before hours have passed.
    """
    planner = _Planner(tree, wanted)
    planner.plan()
    sizes = {name: table.bytes for name, table in tree.tables.items()}
    return sorted(
        planner.steps,
        key=lambda step: (step.action is not Action.DECLARE, sizes[step.table], step.table),
    )


def bytes_for(steps: Iterable[Step]) -> int:
    """All indexes, and the temporary files of the largest."""
    estimates = [step.estimate for step in steps]
    sorting = max((one.sort_bytes for one in estimates), default=0)
    return sum(one.index_bytes for one in estimates) + sorting


def needed(estimated_bytes: int) -> int:
    """How much must be free."""
    return math.ceil(MARGIN * estimated_bytes)


def estimate(definition: str, table: Table, widths: Mapping[str, int]) -> Estimate:
    """From the number of rows and the width of the key; rather too much than too little."""
    if definition.startswith("brin"):
        ranges = table.bytes / _PAGE / _PAGES_PER_RANGE
        return Estimate(round(3 * _PAGE + ranges * _RANGE_BYTES))
    row = _key_width(definition, widths) + _TUPLE_OVERHEAD
    entries = rows_of(table) * row
    return Estimate(round(2 * _PAGE + entries / _FILLED), round(entries))


def rows_of(table: Table) -> float:
    """By the density when it was last looked at; of a table that never was, as many as fit."""
    if table.rows < 0 or not table.pages:
        return table.bytes / _SMALLEST_ROW
    return table.rows / table.pages * table.bytes / _PAGE


def _key_width(definition: str, widths: Mapping[str, int]) -> int:
    found = _COLUMNS.match(definition)
    columns = [column.split()[0] for column in found[1].split(", ")] if found else [""]
    width = sum(widths.get(column, _UNKNOWN_WIDTH) for column in columns)
    return math.ceil(width / 8) * 8


@dataclass(frozen=True, slots=True)
class _Parent:
    """What the partitions of a table must have; the index itself may have to be declared yet."""

    table: str
    index: Index | None
    definition: str
    suffix: str
    is_unique: bool = False


@dataclass(slots=True)
class _Planner:
    tree: Tree
    wanted: Wanted
    steps: list[Step] = field(default_factory=list[Step])
    _used: set[str] = field(default_factory=set[str])
    _names: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self._names = {index.name for index in self.tree.indexes}

    def plan(self) -> None:
        """The indexes of the whole log, then those that only the log of one table has."""
        for name, definition in (REQUIRED | self._added_to_all()).items():
            self._root(OPS.name, name, definition)
        for index in self.tree.indexes_of(OPS.name):
            self._tree_of(index)
        for log in self._logs():
            for name in self.wanted.add:
                if not self._is_of_all(OPTIONAL[name]):
                    self._root(log.name, f"{log.name}_by_{name}", OPTIONAL[name])
            for index in self.tree.indexes_of(log.name):
                if index.parent is None:
                    self._tree_of(index)

    def _added_to_all(self) -> dict[str, str]:
        """An optional index of some logs is none of the whole log, nor of logs to come."""
        if self.wanted.logs is not None:
            return {}
        return {f"ops_by_{name}": OPTIONAL[name] for name in self.wanted.add}

    def _is_of_all(self, definition: str) -> bool:
        """Whether the whole log has it, or is to have it."""
        of_all = {index.shape for index in self.tree.indexes_of(OPS.name)}
        added = {(shape_of(one), False) for one in self._added_to_all().values()}
        return (shape_of(definition), False) in of_all | added

    def _logs(self) -> list[Table]:
        return [log for log in self.tree.partitions_of(OPS.name) if self._is_meant(log)]

    def _is_meant(self, table: Table) -> bool:
        logs = self.wanted.logs
        return logs is None or table.parent != OPS.name or table.name in logs

    def _root(self, table: str, name: str, definition: str) -> None:
        """An index that must be there, whether or not it is."""
        shape = (shape_of(definition), False)
        index = next((one for one in self.tree.indexes_of(table) if one.shape == shape), None)
        if index is not None:
            self._tree_of(index)
            return
        name = self._free_name(name)
        self._add(Action.DECLARE, self.tree.tables[table], name, definition)
        self._below(_Parent(table, None, definition, _suffix(table, name)))

    def _tree_of(self, index: Index) -> None:
        if index.name not in self._used:
            suffix = _suffix(index.table, index.name)
            self._keep(self.tree.tables[index.table], index, suffix)

    def _keep(self, table: Table, index: Index, suffix: str) -> None:
        """An index that is where it should be."""
        self._used.add(index.name)
        if not table.is_partitioned:
            if not index.is_valid:
                self._again(table, index)
            return
        known = len(self.steps)
        parent = _Parent(table.name, index, index.definition, suffix, index.is_unique)
        self._below(parent)
        if len(self.steps) == known and not index.is_valid and self._is_complete(index):
            first = self.tree.partitions_of(index.table)[0]
            child = self.tree.attached(first.name, index.name)
            assert child is not None  # noqa: S101 - it is complete
            self._add(Action.VALIDATE, first, child.name, index.definition, parent=parent)

    def _again(self, table: Table, index: Index) -> None:
        """An attached index cannot be dropped."""
        if not self._left_alone(table, index.name, index.definition):
            owner = next((one for one in self.tree.indexes if one.name == index.parent), None)
            parent = _Parent(table.parent or "", owner, index.definition, "", index.is_unique)
            self._add(Action.REBUILD, table, index.name, index.definition, parent=parent)

    def _is_complete(self, index: Index) -> bool:
        partitions = self.tree.partitions_of(index.table)
        found = [self.tree.attached(one.name, index.name) for one in partitions]
        return bool(found) and all(one is not None and one.is_valid for one in found)

    def _below(self, parent: _Parent) -> None:
        for table in self.tree.partitions_of(parent.table):
            if self._is_meant(table):
                self._partition(table, parent)

    def _partition(self, table: Table, parent: _Parent) -> None:
        attached = parent.index and self.tree.attached(table.name, parent.index.name)
        if attached:
            self._keep(table, attached, parent.suffix)
        elif table.is_partitioned:
            self._log(table, parent)
        else:
            self._rows(table, parent)

    def _log(self, table: Table, parent: _Parent) -> None:
        """The log of one table has no such index that is attached."""
        same = self._unattached(table, parent)
        if same:
            # Its own partitions follow with its name, or wait until it is attached.
            self._add(Action.ATTACH, table, same[0].name, parent.definition, parent=parent)
            self._keep(table, same[0], parent.suffix)
            return
        name = self._free_name(f"{table.name}_{parent.suffix}")
        self._add(Action.DECLARE, table, name, parent.definition, parent=parent)
        self._below(_Parent(table.name, None, parent.definition, parent.suffix, parent.is_unique))

    def _rows(self, table: Table, parent: _Parent) -> None:
        """A partition with rows has no such index that is attached."""
        same = self._unattached(table, parent)
        valid = [index for index in same if index.is_valid]
        if valid:
            self._used.add(valid[0].name)
            self._add(Action.ATTACH, table, valid[0].name, parent.definition, parent=parent)
            return
        leftovers = tuple(index.name for index in same)
        name = f"{table.name}_{parent.suffix}"
        if self._left_alone(table, leftovers[0] if leftovers else name, parent.definition):
            return
        self._used.update(leftovers)
        self._names.difference_update(leftovers)
        action = Action.REPLACE if leftovers else Action.BUILD
        self._add(
            action,
            table,
            self._free_name(name),
            parent.definition,
            parent=parent,
            leftovers=leftovers,
        )

    def _unattached(self, table: Table, parent: _Parent) -> list[Index]:
        shape = (shape_of(parent.definition), parent.is_unique)
        return [
            index
            for index in self.tree.indexes_of(table.name)
            if index.parent is None and index.shape == shape and index.name not in self._used
        ]

    def _left_alone(self, table: Table, index: str, definition: str) -> bool:
        """Whether somebody else works on the partition; then that is the step."""
        if table.built_by is not None:
            why = f"process {table.built_by} is building an index of {table.name}"
        elif table.is_sealed:
            why = f"{table.name} is about to be dropped"
        else:
            return False
        self.steps.append(Step(Action.LEAVE, table.name, index, definition, why=why))
        return True

    def _add(  # noqa: PLR0913 - each argument is one fact, named by its caller
        self,
        action: Action,
        table: Table,
        name: str,
        definition: str,
        *,
        parent: _Parent | None = None,
        leftovers: tuple[str, ...] = (),
    ) -> None:
        builds = action in {Action.BUILD, Action.REPLACE, Action.REBUILD}
        self.steps.append(
            Step(
                action,
                table.name,
                name,
                definition,
                parent.is_unique if parent else False,
                parent.index.name if parent and parent.index else None,
                leftovers,
                estimate(definition, table, self.tree.widths) if builds else Estimate(),
            )
        )

    def _free_name(self, name: str) -> str:
        base, number = name[:_MAX_NAME], 1
        while name[:_MAX_NAME] in self._names:
            number += 1
            name = f"{base[: _MAX_NAME - 4]}_{number}"
        self._names.add(name[:_MAX_NAME])
        return name[:_MAX_NAME]


def _suffix(table: str, index: str) -> str:
    return index.removeprefix(f"{table}_")


def optional_indexes(tree: Tree, name: Optional, logs: Collection[str] | None) -> list[Index]:
    """
    An optional index as it is to be dropped: what is attached to another one goes with that.

    Of some logs only, it may be attached; then it cannot be dropped there.
    """
    same = [index for index in tree.indexes if index.shape == (shape_of(OPTIONAL[name]), False)]
    if logs is not None:
        return [one for one in same if one.table in logs] + [
            one for one in same if one.parent is None and tree.tables[one.table].parent in logs
        ]
    return [one for one in same if one.parent is None]
