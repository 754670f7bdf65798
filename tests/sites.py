"""The whole application on a real socket and a real database, in the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from aiohttp import ClientSession, ClientTimeout
from endings import stop_listening
from starlette.applications import Starlette
from starlette.datastructures import State

from restante.server import jobs, wiring
from restante.server.listener import HttpServer, address_of, listen
from restante.server.loops import Loop
from restante.settings import Settings

ADMIN_TOKEN = "the-admin-token-of-the-tests"

# A test that waits longer than this for an answer waits for ever.
_ANSWER_SECONDS = 20
# How long handlers may go on after their test has ended; tests end what they began.
_GRACE_SECONDS = 1


@dataclass(frozen=True, slots=True)
class Site:
    """A running server: ask it over HTTP, or look inside."""

    url: str
    http: ClientSession  # paths are relative to the server: site.http.get("/health")
    app: Starlette
    state: State  # the services, under the names of `server.app.Services`
    settings: Settings


SiteFactory: TypeAlias = Callable[..., AbstractAsyncContextManager[Site]]


def settings_for(dsn: str, data_dir: Path, **chosen: Any) -> Settings:
    """The defaults on this database, and what a test chose."""
    given: dict[str, Any] = {
        "database_url": dsn,
        "data_dir": str(data_dir),
        "admin_token": ADMIN_TOKEN,
    }
    return Settings(**(given | chosen))


@asynccontextmanager
async def running_site(
    settings: Settings, *, port: int = 0, with_jobs: bool = True
) -> AsyncIterator[Site]:
    """Serve on a loopback port, by default a free one; at the end nothing of it is left."""
    application = wiring.application if with_jobs else _application_without_jobs
    async with application(settings) as (app, _):
        ready = asyncio.Event()
        http = wiring.http_server(settings, app, on_ready=ready.set)
        with listen("127.0.0.1", port) as listening:
            serving = asyncio.create_task(http.serve(sockets=[listening]))
            await ready.wait()
            url = address_of(listening, "127.0.0.1")
            timeout = ClientTimeout(total=_ANSWER_SECONDS)
            try:
                async with ClientSession(url, timeout=timeout) as session:
                    yield Site(url, session, app, app.state, settings)
            finally:
                await _close(http, serving)


@asynccontextmanager
async def _application_without_jobs(
    settings: Settings,
) -> AsyncIterator[tuple[Starlette, Path | None]]:
    """Their first passes, on ten connections at once, take as long as all else in a short test."""
    async with AsyncExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jobs, "loops", _no_loops)
            started = await stack.enter_async_context(wiring.application(settings))
        yield started


def _no_loops(*_: object) -> list[Loop]:
    return []


async def _close(http: HttpServer, serving: "asyncio.Task[None]") -> None:
    """What uvicorn does at its end, without the tenths of a second that it sleeps in between."""
    for server in http.servers:
        await stop_listening(server)
    for connection in list(http.server_state.connections):
        connection.shutdown()
    serving.cancel()
    handlers = set(http.server_state.tasks)
    if handlers:
        await asyncio.wait(handlers, timeout=_GRACE_SECONDS)
    for handler in handlers:
        handler.cancel()
    await asyncio.wait({serving, *handlers})
