"""A server whose disk is almost full: what it refuses, what it still does, and what it says."""

from typing import Any

import pytest
from callers import Answer, Caller, Part, ask, bearer, registered
from sites import Site, SiteFactory

pytestmark = pytest.mark.anyio

MORE_THAN_ANY_DISK = 1 << 62
MESSAGE = {"jsonrpc": "2.0", "method": "message/send", "params": {"text": "hello"}}


async def low_caller(run_site: SiteFactory) -> tuple[Caller, str]:
    """A workspace with a file from better times."""
    async with run_site() as site:
        caller = await registered(site)
        (file_id,) = await caller.staged(Part(b"hello"))
    return caller, file_id


def low_site(run_site: SiteFactory) -> Any:
    return run_site(disk_reserve_bytes=MORE_THAN_ANY_DISK)


def at(site: Site, caller: Caller) -> Caller:
    return Caller(site, caller.id, caller.token)


async def register(site: Site, caller: Caller, card: dict[str, str]) -> Answer:
    body = {"id": caller.id, "delivery_mode": "poll", "agent_card": {"name": "a", **card}}
    return await ask(site, "POST", "/registry/register", json=body, headers=bearer(caller.token))


async def test_what_is_new_is_refused_and_told_when_to_come_back(run_site: SiteFactory):
    before, _ = await low_caller(run_site)
    async with low_site(run_site) as site:
        caller = at(site, before)
        new = {"id": "00000000-0000-4000-8000-000000000001", "agent_card": {"name": "new"}}
        answers = [
            await caller.upload(Part()),
            await caller.ask("POST", "/a2a", json=MESSAGE),
            await ask(site, "POST", "/registry/register", json=new | {"delivery_mode": "poll"}),
            await register(site, caller, {"text": "x" * 5000}),
        ]

    assert {(answer.status, answer.json["code"]) for answer in answers} == {(507, "disk_low")}
    assert {answer.headers["Retry-After"] for answer in answers} == {"30"}


async def test_a_reader_goes_on(run_site: SiteFactory):
    """It comes back, fetches, acknowledges and reports: that frees the disk."""
    before, file_id = await low_caller(run_site)
    async with low_site(run_site) as site:
        caller = at(site, before)
        beat = {"workspace_id": caller.id, "active_tasks": 0, "current_task": ""}
        answers = [
            await register(site, caller, {}),
            await caller.read_feed(),
            await caller.ask("GET", f"/pending-uploads/{file_id}/content"),
            await caller.ask("POST", f"/pending-uploads/{file_id}/ack"),
            await caller.ask("POST", "/activity/ack", json={"acked_seq": 1}),
            await ask(site, "POST", "/registry/heartbeat", json=beat, headers=bearer(caller.token)),
        ]

    assert [answer.status for answer in answers] == [200] * 6
    assert answers[2].body == b"hello"


async def test_it_stays_ready_and_says_that_it_is_degraded(run_site: SiteFactory):
    """A load balancer must still send readers here."""
    async with low_site(run_site) as site:
        answer = await ask(site, "GET", "/ready")
        page = (await ask(site, "GET", "/metrics")).body.decode()

    assert (answer.status, answer.json) == (200, {"status": "ready", "degraded": "disk"})
    assert "molecule_disk_low " in page
