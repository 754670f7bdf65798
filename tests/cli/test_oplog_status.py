"""`restante oplog status` fits on one screen, and names what is wrong."""

from datetime import UTC, datetime, timedelta
from io import StringIO

import pytest
from server import oplog_looks as looks

from restante.cli.oplog_status import show
from restante.cli.output import Console
from restante.wire.oplog_status import (
    HorizonHolder,
    Kept,
    Lag,
    LogTable,
    OplogStatus,
    PeerStatus,
    SnapshotStatus,
)

NOW = datetime(2026, 11, 17, 12, tzinfo=UTC)


def table(name: str, state: str = "tracked") -> LogTable:
    return LogTable(
        name=name,
        state=state,
        ops=1_234_567,
        bytes=987_654_321,
        floor="01KA0000000000000000000000",
        floor_at=NOW - timedelta(days=3),
        partitions=4,
        ahead_seconds=86_400,
    )


def peer(host: str, **changed: object) -> PeerStatus:
    usual: dict[str, object] = {
        "protocol": "restante",
        "cursor": "",
        "cursor_problem": None,
        "pulled_at": NOW - timedelta(seconds=3),
        "failing_since": None,
        "failure": None,
        "behind": Lag(),
        "skew_seconds": 0.01,
        "applied": 0,
        "superseded": 0,
        "parked": 0,
        "refused": 0,
        "conflicts": 0,
        "gaps": 0,
        "confirmed": "x",
        "confirmed_at": NOW,
        "waiting": Lag(),
        "schema_differences": [],
    }
    return PeerStatus(host=host, **(usual | changed))  # pyright: ignore[reportArgumentType]


def status(**changed: object) -> OplogStatus:
    usual: dict[str, object] = {
        "host": "https://a.example",
        "clock_ahead_seconds": 0.0,
        "tables": [table("pages")],
        "peers": [peer("https://b.example")],
        "snapshots": [],
        "parked": {},
        "conflicts": 0,
        "conflicts_since": None,
        "horizon": None,
    }
    return OplogStatus(**(usual | changed))  # pyright: ignore[reportArgumentType]


def shown(found: OplogStatus, width: int = 80) -> str:
    console = Console(file=StringIO(), width=width)
    show(console, found, now=NOW)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


BAD = status(
    clock_ahead_seconds=240.0,
    tables=[table(f"table_number_{n}", "paused" if n == 1 else "tracked") for n in range(10)]
    + [table("gone", "missing")],
    peers=[
        peer(
            "https://b.example",
            failing_since=NOW - timedelta(hours=2),
            failure="It answered with status 401: Send the token of this peer.",
            behind=Lag(10_000, 50_000_000, 9000, is_more=True),
            waiting=Lag(12, 3400, 65),
            skew_seconds=-421.0,
            refused=3,
            refused_by={"time": 2, "table": 1},
            gaps=1,
            schema_differences=["pages: Only the peer has the column c."],
        ),
        peer("https://c.example", behind=None, confirmed="", pulled_at=None),
    ],
    snapshots=[
        SnapshotStatus(
            peer="https://b.example",
            table="pages",
            phase="records",
            records=12_000,
            started_at=NOW,
            progressed_at=NOW,
        )
    ],
    parked={"foreign_key": 2, "future": 1},
    conflicts=4,
    conflicts_since=NOW - timedelta(days=2),
    horizon=HorizonHolder(
        pid=4711,
        who="app nightly",
        state="idle in transaction",
        seconds=900.0,
        query_started_at=NOW - timedelta(seconds=800),
    ),
)


@pytest.mark.parametrize("width", [60, 80])
def test_everything_fits_on_one_screen(width: int):
    lines = shown(BAD, width).splitlines()

    assert max(map(len, lines)) <= width
    assert len(lines) <= 60


def test_what_is_wrong_is_named_with_the_way_out():
    text = " ".join(shown(BAD).split())

    for part in (
        "And 3 more tables",
        "Capture is paused: table_number_1.",
        "https://b.example fails for 2 h: It answered with status 401",
        "more than 10000 ops",
        "The clock of https://b.example is 7 min behind.",
        "Of https://b.example so far: 3 refused, 1 gap.",
        "Of https://b.example, 2 changes were refused because their time is more than a day",
        "pages: Only the peer has the column c.",
        "A snapshot of pages is being taken from https://b.example: 12000 records",
        "Parked: 2 foreign_key, 1 future.",
        "Conflicts since 2026-11-15: 4.",
        "Newer changes wait for a transaction of 15 min: pid 4711, app nightly, idle in",
        "The clock of the log is 4 min ahead",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("seconds", "effect"),
    [
        (240.0, "a wrong clock, or had. "),
        (3600.0, "Peers park the changes of this node until their time has come."),
        (90_000.0, "Peers refuse the changes of this node."),
    ],
)
def test_what_peers_do_with_a_clock_that_is_ahead_is_said(seconds: float, effect: str):
    text = " ".join([*shown(status(clock_ahead_seconds=seconds)).split(), ""])

    assert effect in text
    assert ("A clock that was far ahead" in text) == (seconds > 300)


def test_a_node_without_problems_has_no_remarks():
    lines = shown(status()).splitlines()

    assert len(lines) == 5
    assert lines[-1].split() == ["https://b.example", "3", "s", "ago", "nothing", "nothing"]


def test_a_node_without_tables_is_told_how_to_begin():
    assert "restante oplog track TABLE" in shown(status(tables=[], peers=[]))


def test_control_characters_of_others_do_not_reach_the_terminal():
    found = status(
        tables=[table("a\x1b[2Jb")],
        peers=[peer("https://b.example", failing_since=NOW, failure="x\x1b[31m")],
    )

    assert "\x1b" not in shown(found)


def test_a_peer_that_keeps_the_log_is_named_with_its_bytes_and_two_ways_out():
    found = status(peers=[], plan=looks.PLAN)

    text = " ".join(shown(found).split())

    assert "7 days" in text
    assert (
        "https://b.example keeps 5.7 MiB that are due since 2026-11-08 00:00: it has not read it. "
        "Two ways out: let it read; or do without it, at once with `restante oplog peers remove "
        "https://b.example`, or when it has been away for a week with `restante oplog peers add "
        "https://b.example --evict-after-days 7`."
    ) in text
    assert "The next sweep drops 976.6 KiB of the log." in text


def test_an_evicted_peer_is_named_with_what_it_has_lost():
    text = " ".join(shown(status(peers=[looks.PEER])).split())

    assert (
        "https://b.example was evicted on 2026-11-16 22:00: about 1000 ops of pages, 4.8 MiB, went "
        "because the log was above its cap in bytes. It takes a snapshot when it comes back."
    ) in text


def test_what_is_kept_beside_the_log_is_one_sentence():
    kept = Kept(
        parked=3,
        parked_bytes=65536,
        conflicts=4,
        snapshots_taken=1,
        snapshots_served=2,
        unsettled_deletes=5,
        hosts=6,
    )

    text = " ".join(shown(status(kept=kept)).split())

    assert (
        "Beside the log: 3 parked changes (64.0 KiB), 4 conflicts, 1 snapshot being taken, 2 "
        "being served, 5 deletes to settle, 6 hosts."
    ) in text
