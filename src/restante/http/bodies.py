"""
Refuses a request whose body is still arriving, so that its sender sees the refusal.

Code that reads a body sets `request.state.body_has_begun` first.
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from restante.errors import RestanteError, UploadTooSlow
from restante.http.problems import on_restante_error

_DRAIN_SECONDS = 5.0


async def refused(request: Request, refusal: RestanteError, *, max_bytes: int) -> Response:
    """The answer to a refusal; the connection is closed if the body is too slow or does not end."""
    answer = await on_restante_error(request, refusal)
    if isinstance(refusal, UploadTooSlow) or not await drain(request, max_bytes=max_bytes):
        answer.headers["Connection"] = "close"
    return answer


async def drain(request: Request, *, max_bytes: int) -> bool:
    """
    Read the rest of the body, within limits of size and time; returns whether it has ended.

    A client that is cut off while it sends never sees the answer.
    """
    if _waits_for_continue(request):
        return False
    read = 0
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            async for piece in request.stream():  # resumes where reading stopped
                read += len(piece)
                if read > max_bytes:
                    return False
    except TimeoutError:
        return False
    except RuntimeError:  # raised by a stream that has ended before
        return True
    return True


def _waits_for_continue(request: Request) -> bool:
    """Whether the client waits for `100 Continue`, which the first read would send."""
    expected = request.headers.get("expect", "").lower() == "100-continue"
    return expected and not getattr(request.state, "body_has_begun", False)
