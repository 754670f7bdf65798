"""Callers get turns in rotation, however many requests one of them has."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, strategies as st
from waiting import until

from restante.database import shares
from restante.http import turns as module
from restante.http.turns import Turn, Turns

pytestmark = pytest.mark.anyio


class Requests:
    """Requests that work until they are told to end."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.begun: list[str] = []

    def ask(self, caller: str, name: str = "") -> "asyncio.Task[None]":
        async def begin() -> None:
            await self._turns.begin(caller)
            self.begun.append(name or caller)

        return asyncio.create_task(begin())


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_caller_with_many_requests_leaves_turns_for_others():
    requests = Requests(turns := Turns(at_once=4, per_caller=2))

    hostile = [requests.ask("hostile") for _ in range(100)]
    await settle()
    quiet = requests.ask("quiet")
    await settle()

    assert quiet.done()
    assert Counter(requests.begun) == {"hostile": 2, "quiet": 1}
    for _ in range(100):
        turns.end("hostile")
        await settle()
    assert all(request.done() for request in hostile)
    turns.end("quiet")
    assert len(turns) == 0


async def test_those_who_wait_are_served_in_rotation_and_each_in_order():
    requests = Requests(turns := Turns(at_once=1, per_caller=1))

    for caller, name in [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")]:
        requests.ask(caller, name)
        await settle()
    for _ in range(5):
        turns.end(requests.begun[-1][0])
        await settle()

    assert requests.begun == ["a1", "b1", "c1", "a2", "a3"]
    assert len(turns) == 0


async def test_a_cancelled_request_does_not_take_the_turn_of_a_caller_that_came_back():
    """Between its cancellation and its end, the caller can be forgotten and come back."""
    turns = Turns(at_once=1, per_caller=1)
    for _ in range(3):
        await turns.begin("a")
        cancelled = Requests(turns).ask("a")
        await settle()
        cancelled.cancel()
        turns.end("a")
        await turns.begin("a")
        await settle()
        turns.end("a")

    async with asyncio.timeout(1):
        await turns.begin("b")
    turns.end("b")
    assert len(turns) == 0


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_request_that_is_cancelled_gives_its_turn_to_the_next(is_given: bool):
    requests = Requests(turns := Turns(at_once=1, per_caller=1))
    requests.ask("first")
    await settle()
    cancelled, last = requests.ask("cancelled"), requests.ask("last")
    await settle()

    if is_given:
        turns.end("first")  # gives it to the one that is cancelled in the same moment
    cancelled.cancel()
    await settle()
    if not is_given:
        turns.end("first")
    await settle()

    assert last.done()
    assert requests.begun == ["first", "last"]
    turns.end("last")
    assert len(turns) == 0


@pytest.fixture
def workspace() -> Iterator[str]:
    """Who the work of the test is done for."""
    before = shares.caller.set("a workspace")
    yield "a workspace"
    shares.caller.reset(before)


@pytest.mark.usefixtures("workspace")
async def test_those_who_only_wait_keep_nobody_back():
    """A client that sends its body a byte at a time has no turn in between."""
    turns = Turns(at_once=1, per_caller=1)

    async def waiting(end: asyncio.Event) -> None:
        with module.one_request(turns):
            await module.resume()
            module.pause()
            await end.wait()
            await module.resume()

    end = asyncio.Event()
    requests = [asyncio.create_task(waiting(end)) for _ in range(100)]
    await settle()
    with module.one_request(turns):
        await asyncio.wait_for(module.resume(), 10)
    end.set()
    await asyncio.gather(*requests)
    await settle()

    assert len(turns) == 0


@pytest.mark.usefixtures("workspace")
async def test_a_turn_ends_when_its_request_takes_long(monkeypatch: pytest.MonkeyPatch):
    """A long poll keeps nobody back; its next piece of work waits for a turn again."""
    monkeypatch.setattr(module, "_MAX_SECONDS", 0)
    turns = Turns(at_once=1, per_caller=1)
    waiting, other = Turn(turns), Turn(turns)

    await waiting.take()
    await other.take()
    again = asyncio.create_task(waiting.take())
    await until(again.done)
    for turn in (waiting, other):
        turn.end()
        turn.end()
    await settle()

    assert len(turns) == 0


@pytest.mark.usefixtures("workspace")
async def test_a_request_has_one_turn_at_a_time():
    turns = Turns(at_once=1, per_caller=1)
    turn = Turn(turns)

    await turn.take()
    await turn.take()
    turn.end()
    await settle()

    assert len(turns) == 0


async def test_the_operator_never_waits():
    turns = Turns(at_once=1, per_caller=1)
    await turns.begin("a workspace")

    shares.caller.set(None)
    await Turn(turns).take()

    turns.end("a workspace")
    assert len(turns) == 0


async def test_requests_that_never_wait_do_not_all_run_before_others():
    """Each takes and ends its turn in one step of the event loop."""
    turns, done = Turns(), list[str]()

    async def request(caller: str) -> None:
        shares.caller.set(caller)
        with module.one_request(turns):
            await module.resume()
            done.append(caller)

    flood = [asyncio.create_task(request("hostile")) for _ in range(300)]
    quiet = asyncio.create_task(request("quiet"))
    await asyncio.gather(*flood, quiet)
    await settle()

    assert done.index("quiet") < 20
    assert len(turns) == 0


CALLERS = st.sampled_from("abc")
STEPS = st.tuples(st.sampled_from(["begin", "begin", "end", "cancel"]), CALLERS)


@given(steps=st.lists(STEPS, max_size=60), at_once=st.integers(1, 4), per_caller=st.integers(1, 3))
def test_no_turn_is_lost_and_none_is_given_twice(
    steps: Sequence[tuple[str, str]], at_once: int, per_caller: int
):
    asyncio.run(_run(steps, at_once, per_caller))


async def _run(steps: Sequence[tuple[str, str]], at_once: int, per_caller: int) -> None:
    turns = Turns(at_once=at_once, per_caller=per_caller)
    tasks: dict[str, list[asyncio.Task[None]]] = {caller: [] for caller in "abc"}
    for step, caller in steps:
        of_caller = tasks[caller]
        running = [task for task in of_caller if task.done()]
        waiting = [task for task in of_caller if not task.done()]
        if step == "begin":
            of_caller.append(asyncio.create_task(turns.begin(caller)))
        elif step == "end" and running:
            of_caller.remove(running[0])
            turns.end(caller)
        elif step == "cancel" and waiting:
            of_caller.remove(waiting[0])
            waiting[0].cancel()
        await settle()
        check(tasks, at_once, per_caller)
    await end_all(turns, tasks)
    assert len(turns) == 0


def check(tasks: dict[str, list[asyncio.Task[None]]], at_once: int, per_caller: int) -> None:
    running = {caller: sum(task.done() for task in found) for caller, found in tasks.items()}
    assert sum(running.values()) <= at_once
    assert max(running.values()) <= per_caller
    for caller, found in tasks.items():
        waits = any(not task.done() for task in found)
        has_all_it_may = running[caller] == per_caller or sum(running.values()) == at_once
        assert has_all_it_may or not waits


async def end_all(turns: Turns, tasks: dict[str, list[asyncio.Task[None]]]) -> None:
    left = [(caller, task) for caller, found in tasks.items() for task in found]
    while left:
        caller, task = next(one for one in left if one[1].done())
        left.remove((caller, task))
        turns.end(caller)
        await settle()
