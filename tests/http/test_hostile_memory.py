"""The memory of a real server under attack."""

import asyncio
from uuid import UUID

import asyncpg
import pytest
from attacks import DELIMITER, MIB, pour
from callers import FORM, Part, chunked, form, request_head, wire_to
from processes import Server, peak_kib, registered_at

from restante.client.aio import AsyncClient
from restante.client.poller import MessageItem
from restante.database.pool import SCHEMA

pytestmark = pytest.mark.anyio

TOO_MANY_BYTES = 429  # of messages in this minute
CUT_OFF = 0  # instead of a status: the connection ended while we were still sending


@pytest.mark.slow
async def test_concurrent_attacks_do_not_raise_the_memory_of_the_server(server: Server):
    """Four of each at once; the server still works afterwards."""
    server.start()
    workspace_id, token = registered_at(server)
    path = f"/workspaces/{workspace_id}/chat/uploads"
    form_type = f"Content-Type: {FORM}"
    lines = [form_type, "Transfer-Encoding: chunked"]
    head = request_head("POST", path, token=token, lines=lines)
    message = request_head("POST", f"/workspaces/{workspace_id}/a2a", token=token, lines=lines[1:])
    file = chunked(form(Part(b"x"), closed=False)[:-2])
    parts = form(*[Part(b"x", field="y")] * 10_000, closed=False)

    async def attack(start: bytes, piece: bytes, most: int) -> int:
        async with wire_to(server.address) as wire:
            await wire.send(start)
            answering = asyncio.create_task(wire.answer())
            pouring = asyncio.create_task(pour(wire, piece, most=most))
            try:
                return (await answering).status
            except (ConnectionError, asyncio.IncompleteReadError):
                return CUT_OFF
            finally:
                pouring.cancel()
                await asyncio.wait({pouring})

    async def accepted() -> int:
        async with wire_to(server.address) as wire:
            body = form(Part(bytes(25 * MIB)))
            head = request_head("POST", path, token=token, length=len(body), lines=[form_type])
            await wire.send(head + body)
            return (await wire.answer()).status

    assert await accepted() == 200
    before = peak_kib(server.pid)

    for start, piece, most, status in (
        (head + file, chunked(bytes(MIB)), 150 * MIB, 413),
        (head, chunked(parts), 4 * MIB, 400),
        (head + chunked(DELIMITER + b"\r\n"), chunked(b"X: " + b"y" * MIB), 4 * MIB, 400),
        (message, chunked(b"[" * 65_536), 4 * MIB, 413),
        (message, chunked(b" " * MIB), 40 * MIB, 413),
    ):
        async with asyncio.timeout(60):
            answers = await asyncio.gather(*(attack(start, piece, most) for _ in range(4)))
        assert set(answers) <= {status, CUT_OFF, TOO_MANY_BYTES}

    assert peak_kib(server.pid) - before < 64 * 1024
    assert await accepted() == 200


@pytest.mark.slow
async def test_many_large_messages_at_once_take_the_memory_of_a_few(server: Server):
    """Each is refused or stored, counted exactly, and can be read."""
    server.start()
    receivers = [registered_at(server) for _ in range(6)]
    # One character outside of Latin-1 makes the decoded text four times as large.
    text = "x" * (15 * MIB) + "\U0001f600"
    body = f'{{"message": {{"content": "{text}"}}}}'.encode()

    async def send(workspace_id: str, token: str) -> int:
        async with wire_to(server.address) as wire:
            path = f"/workspaces/{workspace_id}/a2a"
            await wire.send(request_head("POST", path, token=token, length=len(body)) + body)
            return (await wire.answer()).status

    before = peak_kib(server.pid)
    answers = await asyncio.gather(*(send(*receiver) for receiver in receivers))

    assert set(answers) <= {200, 429}
    assert answers.count(200) >= 4
    assert peak_kib(server.pid) - before < 384 * 1024
    connection = await asyncpg.connect(server.dsn, server_settings={"search_path": SCHEMA})
    counted = await connection.fetch(
        "select feed_bytes - octet_length(request_body::text) - octet_length(method)"
        " - octet_length(summary) as rest from feeds join feed using (workspace_id)"
    )
    await connection.close()
    assert {row["rest"] for row in counted} == {320}
    assert len(counted) == answers.count(200)

    receiver = receivers[answers.index(200)]
    async with AsyncClient(
        server.address, token=receiver[1], workspace_id=UUID(receiver[0])
    ) as client:
        (item,) = [item async for item in client.inbox(once=True)]
        assert isinstance(item, MessageItem)
        assert item.body["params"]["message"]["parts"] == [{"kind": "text", "text": text}]
    assert peak_kib(server.pid) - before < 384 * 1024
