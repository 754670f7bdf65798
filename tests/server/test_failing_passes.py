"""How a loop logs a failed pass and continues."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
import structlog

from restante.errors import DatabaseUnavailable
from restante.server.loops import Loop, Loops

pytestmark = pytest.mark.anyio


class Outcomes:
    """Records how each pass ended."""

    def __init__(self) -> None:
        self.recorded: asyncio.Queue[str] = asyncio.Queue()

    def pass_ended(self, loop: str, outcome: str, seconds: float) -> None:
        self.recorded.put_nowait(outcome)

    def loop_restarted(self, loop: str) -> None:
        self.recorded.put_nowait(f"{loop} restarted")

    async def next(self) -> str:
        return await self.recorded.get()


def first_raises(errors: Iterator[BaseException]) -> Callable[[], Awaitable[None]]:
    async def one_pass() -> None:
        for error in errors:
            raise error

    return one_pass


async def outcomes_after(error: BaseException) -> tuple[str, str]:
    """The outcome of a pass that raises, and of the next one."""
    outcomes = Outcomes()
    one_pass = first_raises(iter([error]))
    loop = Loop("test", one_pass, interval_seconds=0, deadline_seconds=5)
    async with Loops([loop], outcomes):
        return await outcomes.next(), await outcomes.next()


async def test_an_unavailable_database_is_logged_without_a_traceback():
    """During an outage, a traceback per pass would bury everything else."""
    with structlog.testing.capture_logs() as logged:
        ended = await outcomes_after(DatabaseUnavailable("The database does not answer."))

    assert ended == ("error", "ok")
    assert logged == [
        {
            "event": "pass_failed",
            "log_level": "warning",
            "loop": "test",
            "code": "database_unavailable",
            "reason": "The database does not answer.",
        }
    ]


async def test_a_bug_is_logged_with_its_traceback():
    bug = ZeroDivisionError("a bug")

    with structlog.testing.capture_logs() as logged:
        ended = await outcomes_after(bug)

    assert ended == ("error", "ok")
    assert [(event["log_level"], event["exc_info"]) for event in logged] == [("error", bug)]


async def test_a_pass_that_cancels_itself_does_not_end_the_loop():
    """It happens when a pass awaits a task that was cancelled."""
    assert await outcomes_after(asyncio.CancelledError()) == ("error", "ok")
