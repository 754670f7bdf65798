"""Long polls: memory per waiting client, and wake-up latency."""

import asyncio
import random
import statistics
import time

from bench import http
from bench.report import Bound, show
from bench.server import Running, Workspace

WAITING = 2000
WAKES = 300


async def measure(server: Running) -> None:
    """2,000 clients poll, each its own workspace; some are woken, one at a time."""
    workspaces = [server.register() for _ in range(WAITING)]
    before = server.memory_mib()
    waiting = [await _wait(server, workspace) for workspace in workspaces]
    await _all_are_waiting(server)
    each_kib = (server.memory_mib() - before) * 1024 / WAITING
    show(Bound("Memory of a waiting client", "KiB", each_kib, 100, f"{WAITING} clients wait"))
    sender = await http.Connection.open(server.port)
    chosen = random.sample(range(WAITING), WAKES)
    latencies = [await _wake(sender, waiting[i], workspaces[i]) for i in chosen]
    p50 = statistics.median(latencies)
    p99 = statistics.quantiles(latencies, n=100)[98]
    detail = f"p50 {p50:.1f} ms, from sending the message to the answer's first byte, {WAKES} wakes"
    show(Bound("Wake-up p99", "ms", p99, 50, detail))
    for connection in [sender, *waiting]:
        connection.close()


async def _wait(server: Running, workspace: Workspace) -> http.Connection:
    connection = await http.Connection.open(server.port)
    path = f"/workspaces/{workspace.id}/activity?wait=60"
    connection.writer.write(http.request("GET", path, workspace.token))
    await connection.writer.drain()
    return connection


async def _all_are_waiting(server: Running) -> None:
    """The server accepts connections in order, so an answer to a later request is enough."""
    probe = await http.Connection.open(server.port)
    for _ in range(20):
        await probe.ask(http.request("GET", "/ready", ""))
    probe.close()
    await asyncio.sleep(1)


async def _wake(sender: http.Connection, waiting: http.Connection, workspace: Workspace) -> float:
    request = http.request(
        "POST", f"/workspaces/{workspace.id}/a2a", workspace.token, http.message()
    )
    started = time.monotonic()
    sent = asyncio.create_task(sender.ask(request))
    status, length = await waiting.head()
    latency = (time.monotonic() - started) * 1000
    assert status == 200
    await waiting.skip(length)
    await sent
    return latency
