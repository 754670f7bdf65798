"""
Receives notifications on a connection of its own, and notices when nothing would come any more.

A connection can be open and silent: a NAT has dropped it, or a proxy holds it.  So a notification
is sent to ourselves through it every few seconds, and must come back.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from restante.database import sql
from restante.database.sessions import Session, dedicated

queries = sql.load("restante.database")

_CHECK_SECONDS = 5.0


class Listener:
    """One connection at a time that listens."""

    def __init__(self, dsn: str, *, check_seconds: float = _CHECK_SECONDS) -> None:
        self._dsn = dsn
        self._check_seconds = check_seconds
        self._heard_at = time.monotonic()
        # A channel of our own: the others need not hear that we are alive.
        self._life_channel = f"restante_life_{secrets.token_hex(8)}"

    def silent_seconds(self) -> float:
        """Time since the connection was last known to work."""
        return time.monotonic() - self._heard_at

    @asynccontextmanager
    async def listening(
        self, channel: str, on_payload: Callable[[str], None]
    ) -> AsyncIterator[asyncio.Event]:
        """Call `on_payload` for each notification; the event is set when none would come."""
        lost, heard = asyncio.Event(), asyncio.Event()

        def on_notification(_connection: object, _pid: int, _channel: str, payload: object) -> None:
            on_payload(str(payload))

        def on_life(*_: object) -> None:
            heard.set()

        async with dedicated(self._dsn, statement_timeout_seconds=30) as connection:
            connection.add_termination_listener(lambda _: lost.set())
            await connection.add_listener(channel, on_notification)
            await connection.add_listener(self._life_channel, on_life)
            self._heard_at = time.monotonic()
            checking = asyncio.create_task(self._check_until_silent(connection, heard))
            checking.add_done_callback(lambda _: lost.set())
            try:
                yield lost
            finally:
                checking.cancel()
                await asyncio.gather(checking, return_exceptions=True)

    async def _check_until_silent(self, connection: Session, heard: asyncio.Event) -> None:
        """Send notifications to ourselves; raises when one does not come back in time."""
        while True:
            await asyncio.sleep(self._check_seconds)
            heard.clear()
            async with asyncio.timeout(self._check_seconds):
                await connection.execute(queries.notify, self._life_channel, "")
                await heard.wait()
            self._heard_at = time.monotonic()
