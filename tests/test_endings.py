"""A server of a test ends at the moment in which somebody connects."""

import asyncio
import gc
import socket
import warnings

import pytest
from endings import stop_listening

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("steps", range(4))
async def test_a_connection_that_arrives_at_the_end_is_not_lost(steps: int):
    """Whichever step of the loop its connection has come to."""
    accepted: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: accepted.append(writer), "127.0.0.1", 0)
    loop = asyncio.get_running_loop()

    with socket.create_connection(server.sockets[0].getsockname()), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(steps):
            await asyncio.sleep(0)
        await stop_listening(server)
        for writer in accepted:
            writer.transport.abort()
        await loop.run_in_executor(None, lambda: None)
        gc.collect()

    assert not server.is_serving()
