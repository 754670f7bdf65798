"""Reads the body of a request piece by piece, and does not wait for its sender for ever."""

import asyncio
from collections.abc import AsyncIterator, Callable

from starlette.requests import Request

from restante.errors import UploadTooSlow
from restante.http import turns


def declared_length(request: Request) -> int | None:
    """The Content-Length; None if it is missing or is not a number."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else None


async def pieces(
    request: Request, *, within_seconds: Callable[[int], float], idle_seconds: float
) -> AsyncIterator[bytes]:
    """
    The body as it arrives; raises UploadTooSlow if it stands still or takes too long.

    `within_seconds` is how long it may take in all, of how many bytes have arrived.
    """
    loop, stream = asyncio.get_running_loop(), aiter(request.stream())
    began_at, arrived = loop.time(), 0
    while True:
        within = within_seconds(arrived)
        seconds = min(began_at + within - loop.time(), idle_seconds)
        turns.pause()
        try:
            # Only the wait for the sender counts as idle, not what the caller does with a piece.
            async with asyncio.timeout(seconds):
                piece = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise _too_slow(seconds, within, idle_seconds) from error
        arrived += len(piece)
        await turns.resume()
        yield piece


def _too_slow(seconds: float, within_seconds: float, idle_seconds: float) -> UploadTooSlow:
    if seconds < idle_seconds:
        sentence = f"The body did not arrive within {within_seconds:.0f} s."
        return UploadTooSlow(sentence, seconds=round(within_seconds))
    return UploadTooSlow(
        f"No more of the body arrived for {idle_seconds:.0f} s.", seconds=round(idle_seconds)
    )
