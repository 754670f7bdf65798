"""Ends a server of a test, and loses no connection that arrives at that moment."""

import asyncio


async def stop_listening(server: asyncio.Server) -> None:
    """
    Close a server; each connection that was accepted has reached its protocol.

    `Server.close` alone drops a connection that the system has accepted a moment before: asyncio
    makes its transport in a later step, finds the server closed, and forgets the socket.  Python
    then says so in whichever test runs next.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(3):
        await asyncio.sleep(0)
    server.close()
