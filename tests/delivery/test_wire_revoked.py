"""A transfer whose token is revoked, or whose workspace is removed, does not end well."""

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import pytest
from callers import (
    ADMIN,
    Caller,
    Part,
    ask,
    everything,
    form,
    pattern,
    request_head,
    upload_head,
    wire_to,
)
from sites import Site
from waiting import until

from restante.delivery.rules import MIB
from restante.workspaces import auth

pytestmark = pytest.mark.anyio

End = Callable[[Caller], Awaitable[None]]


async def revoke(caller: Caller) -> None:
    path = f"/admin/workspaces/{caller.id}/token"
    assert (await ask(caller.site, "DELETE", path, headers=ADMIN)).status == 200


async def remove(caller: Caller) -> None:
    path = f"{caller.path}?confirm=true"
    assert (await ask(caller.site, "DELETE", path, headers=ADMIN)).status == 200


@pytest.fixture(autouse=True)
def always_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "TRUSTED_SECONDS", 0.0)


@pytest.mark.parametrize("end", [revoke, remove])
async def test_an_upload_is_refused(site: Site, caller: Caller, connection: Any, end: End):
    body = form(Part(b"x" * 1000))

    async def has_begun() -> bool:
        return site.app.state.receiver.server.uploads_of(UUID(caller.id)) == 1

    async with wire_to(site) as wire:
        await wire.send(upload_head(caller, len(body)) + body[:500])
        await until(has_begun)
        await end(caller)
        await wire.send(body[500:])
        answer = await wire.answer()

    assert (answer.status, answer.json["code"]) == (401, "not_authenticated")
    assert not (await everything(connection, caller.id))["uploads"]


async def test_an_upload_of_a_token_that_is_still_valid_is_accepted(caller: Caller):
    assert len(await caller.staged(Part(pattern(3 * MIB)))) == 1


@pytest.mark.parametrize("end", [revoke, remove])
async def test_a_download_is_cut_off(site: Site, caller: Caller, end: End):
    size = 16 * MIB  # more than sockets hold
    (file_id,) = await caller.staged(Part(pattern(size)))
    path = f"{caller.path}/pending-uploads/{file_id}/content"
    async with wire_to(site) as wire:
        await wire.send(request_head("GET", path, token=caller.token))
        head = await wire.head()
        await end(caller)
        rest = await wire.rest()

    assert (head.status, head.headers["Content-Length"]) == (200, str(size))
    assert len(rest) < size


async def test_a_download_of_a_token_that_is_still_valid_is_complete(caller: Caller):
    content = pattern(3 * MIB)
    (file_id,) = await caller.staged(Part(content))

    assert (await caller.fetch(file_id)).body == content
