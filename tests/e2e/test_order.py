"""
A reader that follows its cursor sees every row once, in commit order.

Eight concurrent senders send files and messages to one server process, or to two on one database.
The reader waits for rows, or polls.
"""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from processes import Server
from senders import File, Mailbox, Request, followed, registered, session_with

pytestmark = pytest.mark.anyio

SENDERS = 8
ROWS = 250
LONG_POLL = "20"
PLAIN_POLL = "0"
LAST = "the last one"


@pytest.fixture
def servers(dsn: str, tmp_path: Path) -> Iterator[Sequence[Server]]:
    """Two processes that share nothing but a database."""
    with ExitStack() as stack:
        flags = ("--database-url", dsn, "--messages-per-minute", "1000000")
        pair = [Server(tmp_path / name, *flags) for name in ("one", "other")]
        for server in pair:
            stack.enter_context(server).begin()
        yield [server.until_ready() for server in pair]


@pytest.fixture
async def mailboxes(servers: Sequence[Server]) -> AsyncIterator[Sequence[Mailbox]]:
    """One workspace, at each of the servers."""
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(session_with(server)) for server in servers]
        mailbox = await registered(sessions[0])
        yield [mailbox.at(session) for session in sessions]


def row_count() -> int:
    """With `SOAK_RUNS`, twenty rows for each run."""
    return int(os.environ.get("SOAK_RUNS") or 0) * 20 or ROWS


async def send_mixed(mailbox: Mailbox, chance: random.Random, names: "Names") -> None:
    """Send files, one or several at once, and messages, until there are enough."""
    while not names.enough:
        if chance.random() < 0.5:
            await mailbox.send_message(names.new())
            continue
        files = [
            File(names.new(), chance.randbytes(chance.choice([1, 5000, 400_000])))
            for _ in range(chance.randint(1, 3))
        ]
        request = await mailbox.send(Request(files, key=chance.choice([None, str(uuid4())])))
        assert request.is_confirmed, request.status


class Names:
    """Gives each row a unique name."""

    def __init__(self, count: int) -> None:
        self._numbers = itertools.count()
        self._count = count
        self.given: set[str] = set()

    @property
    def enough(self) -> bool:
        return len(self.given) >= self._count

    def new(self) -> str:
        name = f"row-{next(self._numbers)}"
        self.given.add(name)
        return name


def name_of(row: dict[str, Any]) -> str:
    body = row["request_body"]
    return body["name"] if "name" in body else body["params"]["message"]["parts"][0]["text"]


async def send_from_all(mailboxes: Sequence[Mailbox], names: Names) -> None:
    """Eight senders, spread over the servers; then the last row."""
    async with asyncio.TaskGroup() as group:
        for number, mailbox in zip(range(SENDERS), itertools.cycle(mailboxes)):
            group.create_task(send_mixed(mailbox, random.Random(number), names))
    await mailboxes[-1].send_message(LAST)


@pytest.mark.soak
@pytest.mark.parametrize("wait", [LONG_POLL, PLAIN_POLL])
@pytest.mark.parametrize("count", [1, 2], ids=["one_server", "two_servers"])
async def test_a_reader_misses_no_row_and_sees_none_twice(
    mailboxes: Sequence[Mailbox], count: int, wait: str
):
    reader, names = mailboxes[0], Names(row_count())
    await reader.send_message("the first one")
    first = (await reader.rows())[0]

    async with asyncio.TaskGroup() as group:
        reading = group.create_task(
            followed(reader, first["id"], lambda row: name_of(row) == LAST, wait=wait)
        )
        group.create_task(send_from_all(mailboxes[:count], names))

    rows = reading.result()
    assert [row["seq"] for row in [first, *rows]] == list(range(1, len(rows) + 2))
    assert len({row["id"] for row in rows}) == len(rows)
    assert sorted(name_of(row) for row in rows) == sorted([*names.given, LAST])


async def test_a_reader_at_one_server_is_woken_by_a_message_to_another(
    mailboxes: Sequence[Mailbox],
):
    """The wait ends because of the row, before its own time is over."""
    here, there = mailboxes
    await here.send_message("the first one")
    first = (await here.rows())[0]
    reading = asyncio.create_task(here.rows(since_id=first["id"], wait="60"))

    await there.send_message("from the other server")

    async with asyncio.timeout(40):
        rows = await reading
    assert [name_of(row) for row in rows] == ["from the other server"]
