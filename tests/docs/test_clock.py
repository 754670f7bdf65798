"""The clock is read at the edges only; everything else gets `now` as an argument."""

import re
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src/restante"

# Handlers, entry points, and programs of their own.
EDGES = (
    "*/web.py",
    "oplog/routes/*.py",
    "feed/messages.py",
    "feed/notifications.py",
    "feed/events.py",
    "delivery/multipart.py",
    "delivery/download.py",
    "server/*.py",
    "cli/*.py",
    "client/*.py",
    "postgres/*.py",
)
READS_CLOCK = re.compile(r"\bdatetime\.(now|utcnow|today)\b|\bdate\.today\b|\btime\.time\b")


def test_only_the_edges_read_the_clock():
    """Rules, stores and services can then be tested at any moment."""
    readers = {path for path in SOURCES.rglob("*.py") if READS_CLOCK.search(path.read_text())}
    edges = {path for pattern in EDGES for path in SOURCES.glob(pattern)}

    assert sorted(str(path.relative_to(SOURCES)) for path in readers - edges) == []
