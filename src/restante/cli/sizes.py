"""Bytes and times as people read them."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown_bytes(size: float) -> str:
    """A number of bytes in the unit that fits."""
    for unit in _UNITS:
        if abs(size) < 1024 or unit == _UNITS[-1]:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def shown_seconds(seconds: float) -> str:
    """A stretch of time in the unit that fits."""
    for limit, length, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.1f} days"
