"""The first SIGTERM or SIGINT shuts the server down gracefully."""

import asyncio
import signal
from collections.abc import Callable

from starlette.applications import Starlette

from restante.server import systemd
from restante.server.listener import HttpServer

_CLOSE_WEBSOCKETS_SECONDS = 0.1


def stop_serving(http: HttpServer, web: Starlette) -> None:
    """Let waiting requests answer with what there is, and accept no new ones."""
    systemd.notify("STOPPING=1")
    web.state.wakeups.stop()
    web.state.oplog.watcher.stop()
    # Uvicorn closes WebSockets with a code of its own; by then ours are closed with 1001.
    loop = asyncio.get_running_loop()
    loop.call_later(_CLOSE_WEBSOCKETS_SECONDS, setattr, http, "should_exit", True)  # noqa: FBT003 - setattr


class StopOnSignal:
    """A signal cancels the current task, or calls the action that was set since."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - we are called from a coroutine
        self.on_signal(task.cancel)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)

    def on_signal(self, action: Callable[[], object]) -> None:
        """Set what a signal does."""
        self._action = action

    def _stop(self) -> None:
        self._action()
