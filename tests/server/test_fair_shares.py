"""Whose share of the database each request uses: nobody gets more of them by making up tokens."""

import asyncio
import secrets
from collections.abc import Hashable
from contextlib import AbstractAsyncContextManager
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import ADMIN, Answer, ask, bearer, registered
from sites import ADMIN_TOKEN, Site, SiteFactory
from waiting import until
from watchers import connected, streaming

from restante.database import migrate
from restante.database.shares import Shares, caller
from restante.http import refusal_delays
from restante.ids import WorkspaceId
from restante.workspaces import store
from restante.workspaces.auth import RecentTokens
from restante.workspaces.rules import new_token

pytestmark = pytest.mark.anyio

FLOOD = 60
HERE = "127.0.0.1"


class StuckLookUps:
    """Look-ups of one workspace keep their connections until they are told to end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.workspace_id = uuid4()
        self.running = 0
        self.end = asyncio.Event()
        self._get = store.get
        monkeypatch.setattr(store, "get", self.get)

    async def get(self, connection: Any, workspace_id: WorkspaceId) -> Any:
        found = await self._get(connection, workspace_id)
        if workspace_id == self.workspace_id:
            self.running += 1
            await self.end.wait()
        return found

    def ask(self, site: Site) -> "asyncio.Task[Answer]":
        """Ask with a token that nobody has."""
        headers = bearer(secrets.token_urlsafe(32))
        path = f"/workspaces/{self.workspace_id}/activity"
        return asyncio.create_task(ask(site, "GET", path, headers=headers))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> StuckLookUps:
    return StuckLookUps(monkeypatch)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """Whose share each connection was taken from, without those of the server itself."""
    seen: list[Hashable] = []
    one = Shares.one

    def noted(self: Shares, *, timeout_seconds: float) -> AbstractAsyncContextManager[None]:
        if caller.get() is not None:
            seen.append(caller.get())
        return one(self, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(Shares, "one", noted)
    return seen


def users(site: Site, who: Hashable) -> int:
    share = site.state.db._shares._shares.get(who)
    return share.users if share else 0


async def test_made_up_tokens_of_one_address_have_one_share(
    run_site: SiteFactory, stuck: StuckLookUps
):
    """Others at the same address, and probes, do not wait for them."""
    async with run_site(pool_size=16, acquire_timeout_seconds=20) as site:
        known = await registered(site)
        assert (await known.ask("GET", "/activity")).status == 200

        flood = [stuck.ask(site) for _ in range(FLOOD)]
        await until(lambda: users(site, HERE) == FLOOD)
        await until(lambda: stuck.running >= 2)
        answers = [
            await known.ask("GET", "/activity"),
            await ask(site, "GET", f"{known.path}/activity", headers=ADMIN),
            *[await ask(site, "GET", path) for path in ("/ready", "/health", "/metrics")],
        ]

        assert [answer.status for answer in answers] == [200] * 5
        assert stuck.running == 2
        stuck.end.set()
        assert {answer.status for answer in await asyncio.gather(*flood)} == {401}
        assert len(site.state.db._shares) == 0


async def test_a_workspace_uses_its_own_share_once_its_token_is_verified(
    site: Site, used: list[Hashable]
):
    workspace = await registered(site)
    own = UUID(workspace.id)
    used.clear()

    await workspace.ask("GET", "/activity")
    assert used[0] == HERE
    assert set(used[1:]) == {own}

    used.clear()
    await workspace.ask("GET", "/activity")
    await workspace.message(
        {"method": "message/send", "params": {"message": {"parts": []}}}, to=workspace
    )
    assert set(used) == {own}


async def test_a_sender_uses_its_own_share_and_not_that_of_the_recipient(
    site: Site, used: list[Hashable]
):
    sender, recipient = await registered(site), await registered(site)
    used.clear()

    await sender.message(
        {"method": "message/send", "params": {"message": {"parts": []}}}, to=recipient
    )

    assert used[0] == HERE
    assert set(used[1:]) == {UUID(sender.id)}


@pytest.mark.parametrize("way", ["parameter", "subprotocol"])
async def test_a_watcher_that_cannot_set_headers_uses_the_same_share(
    site: Site, used: list[Hashable], way: str
):
    workspace = await registered(site)
    await workspace.ask("GET", "/activity")
    used.clear()

    if way == "parameter":
        params = {"access_token": workspace.token}
        watching = streaming(site.http, workspace.path, params=params)
    else:
        protocols = ("bearer", workspace.token)
        watching = connected(site.http, workspace.path, protocols=protocols)
    async with watching:
        assert set(used) == {UUID(workspace.id)}


async def test_the_operator_has_no_limit(site: Site, used: list[Hashable]):
    workspace = await registered(site)
    used.clear()

    await ask(site, "GET", f"{workspace.path}/activity", headers=ADMIN)
    async with streaming(site.http, workspace.path, params={"access_token": ADMIN_TOKEN}):
        assert used == []


async def test_a_token_that_was_valid_once_authenticates_nobody(site: Site):
    workspace, token = await registered(site), new_token()
    site.state.access.recent_tokens.note(token, UUID(workspace.id))

    answer = await ask(site, "GET", f"{workspace.path}/activity", headers=bearer(token))

    assert answer.status == 401


def test_a_bounded_number_of_tokens_is_remembered():
    recent, tokens = RecentTokens(2), [new_token() for _ in range(3)]
    for number, token in enumerate(tokens):
        recent.note(tokens[0], WorkspaceId(UUID(int=9)))
        recent.note(token, WorkspaceId(UUID(int=number)))

    assert recent.owner_of(tokens[0]) == UUID(int=9)
    assert recent.owner_of(tokens[1]) is None
    assert recent.owner_of(tokens[2]) == UUID(int=2)


async def test_probes_at_the_same_time_cost_one_look_up(
    site: Site, monkeypatch: pytest.MonkeyPatch
):
    looked_up = 0
    schema_state = migrate.schema_state

    async def counted(connection: Any) -> Any:
        nonlocal looked_up
        looked_up += 1
        return await schema_state(connection)

    monkeypatch.setattr(migrate, "schema_state", counted)
    readiness = site.state.readiness
    await asyncio.gather(*(readiness.probe() for _ in range(50)))
    assert looked_up == 1

    assert (await ask(site, "GET", "/ready")).status == 200
    assert looked_up == 2


async def test_repeated_refusals_are_delayed_and_nobody_else_waits(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    """Refusals that come at once let a client without a token keep the event loop busy."""
    monkeypatch.setattr(refusal_delays, "_AT_ONCE", 0)
    monkeypatch.setattr(refusal_delays, "_PER_SECOND", 0.01)
    monkeypatch.setattr(refusal_delays, "_MAX_SECONDS", 100)
    async with run_site() as site:
        known = await registered(site)
        assert (await known.ask("GET", "/activity")).status == 200

        refused = asyncio.create_task(ask(site, "GET", "/nowhere"))
        done = (await known.ask("GET", "/activity"), await ask(site, "GET", "/health"))
        by_operator = await ask(site, "GET", "/nowhere", headers=ADMIN)

        assert [answer.status for answer in done] == [200, 200]
        assert by_operator.status == 404
        assert not refused.done()
        refused.cancel()
        await asyncio.gather(refused, return_exceptions=True)
