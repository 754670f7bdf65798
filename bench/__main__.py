"""`make bench` runs every benchmark; `python -m bench delivery polls` runs some."""

import asyncio
import sys

import uvloop

from bench import (
    connect,
    delivery,
    neighbours,
    oplog,
    oplog_apply,
    oplog_pages,
    oplog_partitions,
    oplog_trimming,
    oplog_verify,
    polls,
    sweeping,
)
from bench.server import running

MEASUREMENTS = {
    "connect": connect.measure,
    "delivery": delivery.measure,
    "neighbours": neighbours.measure,
    "oplog": oplog.measure,
    "oplog_apply": oplog_apply.measure,
    "oplog_pages": oplog_pages.measure,
    "oplog_partitions": oplog_partitions.measure,
    "oplog_trimming": oplog_trimming.measure,
    "oplog_verify": oplog_verify.measure,
    "polls": polls.measure,
    "sweeping": sweeping.measure,
}


def main() -> None:
    wanted = sys.argv[1:] or list(MEASUREMENTS)
    with running() as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for name in wanted:
            runner.run(MEASUREMENTS[name](server))


main()
