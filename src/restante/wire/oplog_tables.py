"""The tracked tables, as the operator's commands print them."""

from datetime import datetime
from typing import Literal

from msgspec import Struct


class TrackedTableView(Struct, frozen=True):
    """A tracked table and the size of its log."""

    name: str  # what peers call it
    table: str
    key: list[str]
    state: Literal["tracked", "paused"]
    key_map: dict[str, str]
    log_bytes: int
    floor: str | None = None  # the largest ULID that was ever dropped from its log
    floor_at: datetime | None = None
    problem: str | None = None
    warnings: list[str] = []
    retention_days: float | None = None  # None: as the server is set, 0: for ever
    cap_days: float | None = None
    cap_bytes: int | None = None
