"""A full disk under a real server: nothing new is stored, and what waits leaves and frees it."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from aiohttp import AddrInfoType, ClientSession, ClientTimeout, TCPConnector
from disks import MIB, OtherProgram, free_bytes, small_disk
from processes import Server, alive, restante, wait_until
from senders import File, Mailbox, Request, registered
from waiting import until

from restante.delivery.subject import Buckets

pytestmark = [pytest.mark.anyio, pytest.mark.soak, pytest.mark.slow]

FILE = 4 * MIB
RESERVE = 24 * MIB


@pytest.fixture
def disk(place: Path) -> Iterator[Path]:
    with small_disk(place, 256) as disk:
        yield disk


@pytest.fixture
def other(disk: Path) -> OtherProgram:
    return OtherProgram(disk)


# Buckets are soon past, and acknowledged files are due at once.
SETTINGS = {
    "RESTANTE_DISK_RESERVE_BYTES": str(RESERVE),
    "RESTANTE_BUCKET_SECONDS": "2",
    "RESTANTE_ACK_RETENTION_SECONDS": "0",
    "RESTANTE_SWEEP_INTERVAL_SECONDS": "3600",
}


@pytest.fixture
def running(disk: Path) -> Iterator[Server]:
    with Server(disk / "data", "--log-level=warning", **SETTINGS) as server:
        yield server.started_once().start()


@pytest.fixture
def keeping(disk: Path) -> Iterator[Server]:
    """Sweeps nothing that was acknowledged; only a command with other settings does."""
    settings = SETTINGS | {"RESTANTE_ACK_RETENTION_SECONDS": "3600"}
    with Server(disk / "data", "--log-level=warning", **settings) as server:
        yield server.started_once().start()


@asynccontextmanager
async def session_with(server: Server) -> AsyncIterator[ClientSession]:
    """A client whose connections are all closed at the end, also those of refused uploads."""
    opened: list[socket.socket] = []

    def open_socket(address: AddrInfoType) -> socket.socket:
        opened.append(socket.socket(*address[:3]))
        opened[-1].setblocking(False)
        return opened[-1]

    connector = TCPConnector(force_close=True, socket_factory=open_socket)
    timeout = ClientTimeout(total=60)
    async with ClientSession(server.address, connector=connector, timeout=timeout) as http:
        yield http
    await until(lambda: all(one.fileno() < 0 for one in opened))


def some_file(number: int) -> File:
    return File(f"{number}.bin", hashlib.shake_256(f"{number}".encode()).digest(FILE))


def ready(server: Server) -> Any:
    status, body = server.get("/ready")
    return json.loads(body) if status == 200 else status


async def is_degraded(server: Server) -> bool:
    return await asyncio.to_thread(ready, server) == {"status": "ready", "degraded": "disk"}


async def is_well(server: Server) -> bool:
    return await asyncio.to_thread(ready, server) == {"status": "ready"}


async def fill(mailbox: Mailbox, server: Server) -> dict[str, File]:
    """Send files until the disk has no room for more; what was confirmed, by its id."""
    confirmed: dict[str, File] = {}
    number = 0
    while not await is_degraded(server):
        file = some_file(number)
        sent = await mailbox.send(Request([file], key=None))
        assert sent.status in {200, 507}, sent.status
        for answer in sent.answer:
            confirmed[id_in(answer)] = file
        number += 1
    assert len(confirmed) > 3
    return confirmed


def id_in(answer: dict[str, Any]) -> str:
    return answer["uri"].rpartition("/")[2]


async def answer_of(http: ClientSession, path: str, **request: Any) -> tuple[int, Any]:
    async with http.post(path, **request) as answer:
        return answer.status, await answer.json()


async def ack(mailbox: Mailbox, file_id: str) -> int:
    path = f"{mailbox.path}/pending-uploads/{file_id}/ack"
    return (await answer_of(mailbox.http, path, headers=mailbox.headers))[0]


async def is_sendable(mailbox: Mailbox) -> bool:
    return (await mailbox.send(Request([some_file(10_000)], key=None))).is_confirmed


@pytest.mark.timeout(120)
async def test_a_full_disk_takes_nothing_new_and_empties_itself(
    running: Server, disk: Path, other: OtherProgram
):
    """Another program takes even the reserve; readers go on, and the space comes back."""
    async with session_with(running) as http:
        mailbox = await registered(http)
        confirmed = await fill(mailbox, running)
        (live, kept), *delivered = confirmed.items()
        left_free = free_bytes(disk)
        other.take_all()
        await until(lambda: is_degraded(running))
        refusals = await refused(mailbox)
        other.take_all()

        acks = [await ack(mailbox, file_id) for file_id, _ in delivered]
        beats = await readers_write(mailbox)
        digest = await mailbox.sha256_of(live)
        await until(lambda: is_sendable(mailbox), seconds=60)

        assert left_free > 0
        assert refusals == {(507, "disk_low")}
        assert set(acks) == {200}
        assert beats == [200, 200]
        assert digest == kept.sha256
        left = {file["file_id"] for file in await mailbox.waiting()}
        assert live in left
        assert len(left) == 2
    assert metric(running, "molecule_disk_ballast_released_bytes_total") > 0
    assert "disk_almost_full" in running.said
    await until(lambda: "disk_recovered" in running.said)


async def refused(mailbox: Mailbox) -> set[tuple[int, str]]:
    """What a sender, a messenger and a new workspace are told."""
    message = {"message": {"content": "x" * 1000}}
    card = {"id": str(uuid4()), "delivery_mode": "poll", "agent_card": {"name": "new"}}
    http, headers = mailbox.http, mailbox.headers
    answers = [
        await answer_of(http, f"{mailbox.path}/a2a", json=message, headers=headers),
        await answer_of(http, "/registry/register", json=card),
        await answer_of(
            http,
            f"{mailbox.path}/chat/uploads",
            headers=headers | {"Content-Type": "multipart/form-data; boundary=b"},
            data=b'--b\r\nContent-Disposition: form-data; name="files"; filename="a"\r\n\r\n'
            b"a\r\n--b--\r\n",
        ),
    ]
    assert all(str(RESERVE) not in body["error"] for _, body in answers)
    return {(status, body["code"]) for status, body in answers}


async def readers_write(mailbox: Mailbox) -> list[int]:
    """What a workspace writes that has no file to acknowledge."""
    beat = {"workspace_id": mailbox.id, "active_tasks": 1, "current_task": "x"}
    return [
        (await answer_of(mailbox.http, path, json=body, headers=mailbox.headers))[0]
        for path, body in (
            ("/registry/heartbeat", beat),
            (f"{mailbox.path}/activity/ack", {"acked_seq": 1}),
        )
    ]


def metric(server: Server, name: str) -> float:
    lines = server.get("/metrics")[1].decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


@pytest.mark.timeout(120)
async def test_a_postgres_that_is_killed_on_a_full_disk_starts_again(
    running: Server, disk: Path, other: OtherProgram
):
    """Recovery writes too; the ballast makes room for it, and what was confirmed is there."""
    async with session_with(running) as http:
        mailbox = await registered(http)
        confirmed = await fill(mailbox, running)
        other.take_all()
        postgres = running.postgres_pid()

        os.kill(postgres, signal.SIGKILL)
        wait_until(lambda: not alive(postgres), seconds=60, what="the end of Postgres")
        await until(lambda: is_degraded(running), seconds=60)

        found = {file_id: await mailbox.sha256_of(file_id) for file_id in confirmed}
        assert found == {file_id: file.sha256 for file_id, file in confirmed.items()}
        assert {await ack(mailbox, file_id) for file_id in confirmed} == {200}
        await until(lambda: is_sendable(mailbox), seconds=60)


def bucket_is_over(*, settled: bool = False) -> Callable[[], bool]:
    """Whether a later bucket takes the next file; and whether a sweep may drop this one."""
    seconds = int(SETTINGS["RESTANTE_BUCKET_SECONDS"])
    over_at = (time.time() // seconds + 1) * seconds
    if settled:
        over_at += Buckets.settling.total_seconds()
    return lambda: time.time() >= over_at


def ballast_bytes(disk: Path) -> int:
    return sum(piece.stat().st_size for piece in disk.rglob("ballast.*"))


@pytest.mark.timeout(120)
async def test_a_server_starts_and_a_command_sweeps_on_a_full_disk(
    keeping: Server, disk: Path, other: OtherProgram
):
    """The operator's way out: everything was killed, and nothing is free."""
    async with session_with(keeping) as http:
        mailbox = await registered(http)
        kept = some_file(10_000)
        live = id_in((await mailbox.send(Request([kept], key=None))).answer[0])
        await until(bucket_is_over())
        delivered = await fill(mailbox, keeping)
        assert {await ack(mailbox, file_id) for file_id in delivered} == {200}
        await until(bucket_is_over(settled=True))
    keeping.kill()
    other.take_all()

    shown = restante("status", f"--data-dir={keeping.data_dir}", seconds=60, **SETTINGS)
    other.take_all()
    swept = restante("sweep", f"--data-dir={keeping.data_dir}", seconds=60, **SETTINGS)
    freed = free_bytes(disk) + ballast_bytes(disk)
    other.take_all()
    keeping.start()

    assert shown.code == 0, shown.stderr
    assert "The disk is almost full" in shown.stdout
    assert swept.code == 0, swept.stderr
    assert "the disk is full" not in swept.stdout
    assert freed > len(delivered) // 2 * FILE, swept.stdout
    async with session_with(keeping) as http:
        assert await mailbox.at(http).sha256_of(live) == kept.sha256
        assert await ack(mailbox.at(http), live) == 200
        other.leave()
        await until(lambda: is_sendable(mailbox.at(http)), seconds=60)
