"""Work ends with the client, and the client is not waited for once the work is done."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Message

from restante.http.disconnect import disconnected, while_connected

pytestmark = pytest.mark.anyio


@dataclass(slots=True)
class Step:
    """A coroutine that ends when the test says so, and records how it ended."""

    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    error: Exception | None = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)
    was_cancelled: bool = False

    async def run(self) -> str:
        self.has_begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error:
            raise self.error
        return "done"

    async def run_without_result(self) -> None:
        await self.run()


@asynccontextmanager
async def begun(work: Step, gone: Step) -> AsyncIterator["asyncio.Task[str]"]:
    """Both have begun; the task is `while_connected`."""
    task = asyncio.create_task(while_connected(work.run(), gone.run_without_result()))
    await work.has_begun.wait()
    await gone.has_begun.wait()
    yield task
    assert task.done()


async def test_work_that_is_done_is_returned_and_the_client_is_no_longer_watched():
    work, gone = Step(), Step()
    async with begun(work, gone) as task:
        work.may_end.set()

        assert await task == "done"

    assert (work.was_cancelled, gone.was_cancelled) == (False, True)


async def test_work_is_cancelled_when_the_client_is_gone():
    work, gone = Step(), Step()
    async with begun(work, gone) as task:
        gone.may_end.set()

        with pytest.raises(ClientDisconnect):
            await task

    assert (work.was_cancelled, gone.was_cancelled) == (True, False)


async def test_an_error_of_the_work_is_raised_and_the_client_is_no_longer_watched():
    work, gone = Step(error=ZeroDivisionError()), Step()
    async with begun(work, gone) as task:
        work.may_end.set()

        with pytest.raises(ZeroDivisionError):
            await task

    assert gone.was_cancelled


async def test_an_error_while_watching_the_client_is_raised_and_the_work_is_cancelled():
    """A body that is too large is noticed there."""
    work, gone = Step(), Step(error=ZeroDivisionError())
    async with begun(work, gone) as task:
        gone.may_end.set()

        with pytest.raises(ZeroDivisionError):
            await task

    assert work.was_cancelled


@pytest.mark.parametrize("error", [None, ZeroDivisionError()])
@pytest.mark.parametrize("first", ["work", "gone"])
async def test_work_that_ends_together_with_the_client_counts_as_done(
    first: str, error: Exception | None
):
    """What it did is committed; the error of a client that left would hide that."""
    work, gone = Step(), Step(error=error)
    async with begun(work, gone) as task:
        for step in (work, gone) if first == "work" else (gone, work):
            step.may_end.set()

        assert await task == "done"

    assert (work.was_cancelled, gone.was_cancelled) == (False, False)


async def test_an_error_of_work_that_ends_together_with_the_client_is_raised():
    work, gone = Step(error=ZeroDivisionError()), Step()
    async with begun(work, gone) as task:
        gone.may_end.set()
        work.may_end.set()

        with pytest.raises(ZeroDivisionError):
            await task


async def test_a_cancelled_caller_cancels_both():
    """The shutdown of the server cancels requests."""
    work, gone = Step(), Step()
    async with begun(work, gone) as task:
        task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await task

    assert (work.was_cancelled, gone.was_cancelled) == (True, True)


async def test_what_the_client_still_sends_is_ignored_until_it_is_gone():
    messages: list[Message] = [
        {"type": "http.request", "body": b"more", "more_body": True},
        {"type": "http.request", "body": b"", "more_body": False},
        {"type": "http.disconnect"},
    ]
    received = iter(messages)

    async def receive() -> Message:
        return next(received)

    await disconnected(receive)

    assert list(received) == []
