"""Watchers of a workspace in the tests, by server-sent events and by WebSocket."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from aiohttp import ClientSession, WSMsgType
from callers import ADMIN, Caller, ask, bearer
from prometheus_client.parser import text_string_to_metric_families
from sites import Site
from waiting import until

from restante.feed.rules import NewActivity
from restante.ids import WorkspaceId

WAYS = ["events", "ws"]
# The paths that name no workspace.
ANYWHERE = {"events": "/events/stream", "ws": "/ws"}
GAUGES = {
    "events": "molecule_event_streams_active",
    "ws": "molecule_websocket_connections_active",
}
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


class Ended(Exception):
    """The server has ended the watch; for a WebSocket, with this code."""

    def __init__(self, code: int | None = None) -> None:
        super().__init__(code)
        self.code = code


class Watcher:
    """A watcher, by either way."""

    def __init__(self, read: Callable[[], Awaitable[str]], way: Any) -> None:
        self._read = read
        self.way = way  # the response or the WebSocket
        self.last_id = ""

    async def event(self) -> dict[str, Any]:
        """The next event; raises Ended."""
        while True:
            text = await self._read()
            if not text.startswith((":", "id:", "event:", "data:")):
                return json.loads(text)
            if found := self._parsed(text):
                return found

    def _parsed(self, block: str) -> dict[str, Any] | None:
        """Parse a block as a browser does: an id alone is remembered, and is no event."""
        fields: dict[str, list[str]] = {}
        for line in block.splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        (self.last_id,) = fields.get("id", [self.last_id])
        if "data" not in fields:
            return None
        event = json.loads("\n".join(fields["data"]))
        assert fields["event"] == [event["event"]]
        assert ("id" in fields) == (event["event"] == "ACTIVITY_LOGGED")
        return event

    async def row(self) -> dict[str, Any]:
        event = await self.event()
        assert event["event"] == "ACTIVITY_LOGGED"
        assert event["workspace_id"] == event["payload"]["workspace_id"]
        return event["payload"]

    async def summaries(self, count: int) -> list[str]:
        return [(await self.row())["summary"] for _ in range(count)]

    async def end(self) -> int | None:
        """Wait for the end; returns its code.  No event may come before it."""
        try:
            event = await self.event()
        except Ended as ended:
            return ended.code
        raise AssertionError(f"unexpected: {event}")


@asynccontextmanager
async def streaming(http: ClientSession, path: str, **options: Any) -> AsyncIterator[Watcher]:
    """At the path of a workspace, or at the one for all."""
    async with http.get(f"{path}/events" if path else ANYWHERE["events"], **options) as answer:
        assert answer.status == 200, await answer.text()
        assert answer.content_type == "text/event-stream"

        async def read() -> str:
            block = await answer.content.readuntil(b"\n\n")
            if not block:
                raise Ended
            return block.decode()

        yield Watcher(read, answer)


@asynccontextmanager
async def connected(http: ClientSession, path: str, **options: Any) -> AsyncIterator[Watcher]:
    """At the path of a workspace, or at the one for all."""
    async with http.ws_connect(f"{path}/ws" if path else ANYWHERE["ws"], **options) as ws:

        async def read() -> str:
            message = await ws.receive(20)
            if message.type is not WSMsgType.TEXT:
                raise Ended(ws.close_code)
            return message.data

        yield Watcher(read, ws)


def watch_any(site: Site, way: str, **options: Any) -> AbstractAsyncContextManager[Watcher]:
    """Watch what the token says."""
    return {"events": streaming, "ws": connected}[way](site.http, "", **options)


def watch(caller: Caller, way: str, **options: Any) -> AbstractAsyncContextManager[Watcher]:
    """Watch with the workspace's own token, unless other headers are given."""
    open_way = {"events": streaming, "ws": connected}[way]
    headers = options.pop("headers", {})
    return open_way(
        caller.site.http, caller.path, headers={**bearer(caller.token), **headers}, **options
    )


async def refused(site: Site, path: str, way: str, **options: Any) -> tuple[int, str]:
    """Try to watch: the status, and the code of the JSON problem."""
    headers = {**(UPGRADE if way == "ws" else {}), **options.pop("headers", {})}
    where = f"{path}/{way}" if path else ANYWHERE[way]
    answer = await ask(site, "GET", where, headers=headers, **options)
    return answer.status, answer.json["code"]


async def append(caller: Caller, summary: str, body: bytes = b"{}", *, count: int = 1) -> None:
    row = NewActivity("test", summary, body)
    for _ in range(count):
        await caller.site.state.feed.append(id_of(caller), row, now=datetime.now(UTC))


def id_of(caller: Caller) -> WorkspaceId:
    return WorkspaceId(UUID(caller.id))


async def gauge(site: Site, way: str) -> float:
    page = (await ask(site, "GET", "/metrics")).body.decode()
    (value,) = [
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == GAUGES[way]
    ]
    return value


async def is_count(site: Site, way: str, count: int) -> bool:
    return await gauge(site, way) == count


async def nobody_watches(site: Site) -> None:
    """Wait until no watcher is left."""

    async def gone() -> bool:
        counts = [await gauge(site, way) for way in WAYS]
        wakeups = site.state.wakeups
        return counts == [0, 0] and not wakeups._waiters and not wakeups._for_all

    await until(gone)


async def is_watched_by(site: Site, count: int) -> bool:
    wakeups = site.state.wakeups
    return sum(map(len, wakeups._waiters.values())) + len(wakeups._for_all) == count


async def revoke(workspace: Caller) -> None:
    path = f"/admin/workspaces/{workspace.id}/token"
    assert (await ask(workspace.site, "DELETE", path, headers=ADMIN)).status == 200


def names(logged: list[Any]) -> list[str]:
    return [line["event"] for line in logged]


def choose(site: Site, **chosen: Any) -> None:
    """Serve watchers of this site with other limits than the default ones."""
    site.state.watch_policy = replace(site.state.watch_policy, **chosen)
