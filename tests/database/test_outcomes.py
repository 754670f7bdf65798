"""A commit whose reply is lost is found out, and the caller is told the truth."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from callers import (
    ADMIN,
    Answer,
    Caller,
    Part,
    ask,
    bearer,
    everything,
    register,
    registered,
    waits_for_a_lock,
)
from links import Line, Link
from sites import Site, running_site, settings_for
from waiting import until

from restante.database import outcomes
from restante.feed.wakeups import CHANNEL
from restante.server import wiring
from restante.server.listener import HttpServer, address_of, listen
from restante.settings import Settings

pytestmark = pytest.mark.anyio

CONTENT = b"sent with the parameters of the statement"
LOCK_FEEDS = "begin; select from feeds for update"


@pytest.fixture
async def link(dsn: str) -> AsyncIterator[Link]:
    async with Link(dsn).listening() as link:
        yield link


@pytest.fixture
async def site(link: Link, tmp_path: Path) -> AsyncIterator[Site]:
    """A server whose database is at the other end of the link."""
    async with running_site(settings_for(link.dsn, tmp_path)) as site:
        yield site


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


async def acked_file(caller: Caller) -> str:
    (file_id,) = await caller.staged()
    assert (await caller.ack(file_id)).status == 200
    return file_id


@dataclass(frozen=True, slots=True)
class Write:
    """A request that writes: its statement, when it commits, and whether it has had its effect."""

    statement: bytes  # its text, or one of its parameters
    ask: Callable[[Caller], Awaitable[Callable[[], Awaitable[Answer]]]]
    has_happened: Callable[[Caller, Answer], Awaitable[bool]]
    after: int = 1  # messages until the one that commits: parameters, COMMIT


async def _upload(caller: Caller) -> Any:
    return lambda: caller.upload(Part(CONTENT))


async def _upload_with_key(caller: Caller) -> Any:
    return lambda: caller.upload(Part(CONTENT), Idempotency_Key="a key")


async def _message(caller: Caller) -> Any:
    return lambda: caller.message({"method": "greet"}, to=caller)


async def _message_with_id(caller: Caller) -> Any:
    said = {"messageId": "m", "parts": []}
    return lambda: caller.message({"message": said}, to=caller)


async def _ack(caller: Caller) -> Any:
    (file_id,) = await caller.staged()
    return lambda: caller.ack(file_id)


async def _reopen(caller: Caller) -> Any:
    file_id = await acked_file(caller)
    return lambda: caller.ask("POST", f"/pending-uploads/{file_id}/reopen")


async def _register(caller: Caller) -> Any:
    card = {"name": CONTENT.decode()}
    return lambda: register(caller.site, agent_card=card)


async def _reissue(caller: Caller) -> Any:
    return lambda: ask(caller.site, "POST", f"/admin/workspaces/{caller.id}/token", headers=ADMIN)


async def _revoke(caller: Caller) -> Any:
    return lambda: ask(caller.site, "DELETE", f"/admin/workspaces/{caller.id}/token", headers=ADMIN)


async def _remove(caller: Caller) -> Any:
    return lambda: caller.ask("DELETE", "?confirm=true")


async def _change(caller: Caller) -> Any:
    body = {"name": "renamed"}
    return lambda: ask(caller.site, "PATCH", caller.path, json=body, headers=ADMIN)


async def _mark(caller: Caller) -> Any:
    await caller.staged()
    return lambda: caller.ask("POST", "/activity/ack", json={"acked_seq": 1})


async def has_one_row(caller: Caller, _answer: Answer) -> bool:
    return len(await caller.feed()) == 1


async def has_two_rows(caller: Caller, _answer: Answer) -> bool:
    return len(await caller.feed()) == 2


async def has_nothing_waiting(caller: Caller, _answer: Answer) -> bool:
    return (await caller.waiting()).json["uploads"] == []


async def is_token(caller: Caller, answer: Answer) -> bool:
    token = answer.json["auth_token"]
    found = await ask(caller.site, "POST", "/registry/heartbeat", headers=bearer(token), json={})
    return found.status != 401


async def is_refused(caller: Caller, _answer: Answer) -> bool:
    return (await caller.read_feed()).status == 401


async def is_renamed(caller: Caller, _answer: Answer) -> bool:
    path = f"/admin/workspaces/{caller.id}"
    return (await ask(caller.site, "GET", path, headers=ADMIN)).json["name"] == "renamed"


async def is_marked(caller: Caller, answer: Answer) -> bool:
    return answer.json["acked_seq"] == 1


WRITES = {
    "upload": Write(CONTENT, _upload, has_one_row, after=0),
    "upload_with_key": Write(CONTENT, _upload_with_key, has_one_row),
    "message": Write(b"insert into feed (id", _message, has_one_row),
    "message_with_id": Write(b"insert into feed (id", _message_with_id, has_one_row),
    "ack": Write(b"with seen as", _ack, has_nothing_waiting),
    "reopen": Write(b"first_acked_at = coalesce", _reopen, has_two_rows),
    "register": Write(CONTENT, _register, is_token, after=0),
    "reissue": Write(b"set token_hash", _reissue, is_token, after=2),
    "revoke": Write(b"set token_hash", _revoke, is_refused),
    "remove": Write(b"set status = 'removed'", _remove, is_refused),
    "change": Write(b"set name = $2", _change, is_renamed, after=2),
    "mark": Write(b"set acked_seq", _mark, is_marked),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
async def test_a_write_whose_reply_is_lost_is_answered_as_done(
    link: Link, caller: Caller, write: Write
):
    """A sender that is told otherwise sends again, and a new token would be lost for ever."""
    request = await write.ask(caller)
    caught = link.catch(write.statement, after=write.after)

    asking = asyncio.ensure_future(request())
    line = await sent(asking, caught)
    await line.replied.wait()
    line.cut()
    answer = await asking

    assert answer.status == 200, answer.body
    assert await write.has_happened(caller, answer)


async def begun(link: Link, caller: Caller) -> "tuple[asyncio.Task[Answer], Line]":
    """An upload whose statement is on its way, on a line whose replies are held."""
    caught = link.catch(CONTENT)
    asking = asyncio.create_task(caller.upload(Part(CONTENT)))
    return asking, await sent(asking, caught)


async def sent(asking: "asyncio.Future[Answer]", caught: "asyncio.Future[Line]") -> Line:
    """The line with the statement of a request."""
    await asyncio.wait({asking, caught}, return_when=asyncio.FIRST_COMPLETED)
    assert caught.done(), f"answered without the statement: {asking.result()}"
    return caught.result()


async def test_a_backend_that_has_noticed_nothing_is_ended_before_the_look(
    link: Link, caller: Caller, connections: Callable[[], Any]
):
    """A statement on its way to it could otherwise be committed after the answer."""
    asking, line = await begun(link, caller)
    await line.replied.wait()

    line.half_cut()
    answer = await asking

    assert answer.status == 200, answer.body
    assert len(await caller.feed()) == 1


async def test_nobody_looks_before_the_lost_backend_is_over(
    link: Link, caller: Caller, connections: Callable[[], Any]
):
    """It waits for a lock when its connection is cut, and commits later."""
    other, observer = await connections(), await connections()
    await other.execute(LOCK_FEEDS)
    asking, line = await begun(link, caller)
    await until(lambda: waits_for_a_lock(observer))

    line.half_cut()
    await until(lambda: has_looked(observer))
    assert (await everything(observer))["uploads"] == []
    await other.execute("rollback")
    answer = await asking

    assert answer.status == 200, answer.body
    assert len(await caller.feed()) == 1


async def has_looked(observer: Any) -> bool:
    return await observer.fetchval(
        "select exists (select from pg_stat_activity where datname = current_database()"
        " and query like '%with lost as%' and pid <> pg_backend_pid())"
    )


async def test_a_write_that_was_lost_before_its_commit_is_refused(
    link: Link, caller: Caller, connections: Callable[[], Any]
):
    """The backend notices that its client has gone, and rolls back."""
    other, observer = await connections(), await connections()
    await other.execute(LOCK_FEEDS)
    asking, line = await begun(link, caller)
    await until(lambda: waits_for_a_lock(observer))

    line.cut()
    answer = await asking
    await other.execute("rollback")

    assert (answer.status, answer.json["code"]) == (503, "database_unavailable")
    assert await caller.feed() == []


async def test_an_unknown_outcome_has_a_code_of_its_own_and_the_key_resolves_it(
    link: Link, caller: Caller, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(outcomes, "_LOOK_SECONDS", 0.2)
    caught = link.catch(CONTENT, after=1)
    asking = asyncio.create_task(caller.upload(Part(CONTENT), Idempotency_Key="a key"))
    line = await sent(asking, caught)
    await line.replied.wait()
    link.is_open = False

    for each in list(link.lines):
        each.cut()
    answer = await asking
    link.is_open = True
    again = await caller.upload(Part(CONTENT), Idempotency_Key="a key")

    assert (answer.status, answer.json["code"]) == (503, "outcome_unknown")
    assert answer.headers["Retry-After"] == "5"
    assert again.status == 200
    assert len(await caller.feed()) == 1


async def test_a_commit_under_way_when_the_server_stops_is_answered_and_announced(
    dsn: str, tmp_path: Path, connections: Callable[[], Any]
):
    """The shutdown grace is over while the statement waits for a lock."""
    other, observer = await connections(), await connections()
    async with stoppable_site(settings_for(dsn, tmp_path, shutdown_grace_seconds=0.05)) as (
        site,
        http,
    ):
        caller = await registered(site)
        await other.execute(LOCK_FEEDS)
        asking = asyncio.create_task(caller.upload(Part(CONTENT)))
        await until(lambda: waits_for_a_lock(observer))

        http.should_exit = True
        await until(lambda: is_cancelled(http))
        notified = await notifications(observer)
        await other.execute("rollback")
        answer = await asking

    assert answer.status == 200, answer.body
    async with asyncio.timeout(30):
        while caller.id not in await notified.get():
            pass


def is_cancelled(http: HttpServer) -> bool:
    return any(task.cancelling() for task in http.server_state.tasks)


async def notifications(observer: Any) -> "asyncio.Queue[str]":
    received = asyncio.Queue[str]()

    def on_notification(_connection: object, _pid: int, _channel: str, payload: str) -> None:
        received.put_nowait(payload)

    await observer.add_listener(CHANNEL, on_notification)
    return received


@asynccontextmanager
async def stoppable_site(settings: Settings) -> AsyncIterator[tuple[Site, HttpServer]]:
    """A server that goes through its own shutdown, with hardly any grace."""
    async with wiring.application(settings) as (app, _):
        ready = asyncio.Event()
        http = wiring.http_server(settings, app, on_ready=ready.set)
        with listen("127.0.0.1", 0) as listening:
            serving = asyncio.create_task(http.serve(sockets=[listening]))
            await ready.wait()
            url = address_of(listening, "127.0.0.1")
            async with ClientSession(url) as session:
                yield Site(url, session, app, app.state, settings), http
            await serving
