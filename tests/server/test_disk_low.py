"""A server whose disk is almost full: what it refuses, what it still does, and what it says."""

from collections.abc import Iterator
from typing import Any

import pytest
from callers import ADMIN, Answer, Caller, Part, ask, bearer, everything, registered
from routes import TABLE, Call, Victim, make, victim_on
from sites import Site, SiteFactory

pytestmark = pytest.mark.anyio

MORE_THAN_ANY_DISK = 1 << 62
MESSAGE = {"jsonrpc": "2.0", "method": "message/send", "params": {"message": {"content": "hello"}}}


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


def calls() -> Iterator[tuple[str, str, Call]]:
    return ((method, path, call) for (method, path), call in TABLE.items())


async def made(site: Site, method: str, path: str, call: Call, victim: Victim) -> Answer:
    """The call, by somebody who may make it."""
    headers = bearer(victim.caller.token) if "own" in call.may else ADMIN
    return await make(
        site,
        method,
        path,
        call,
        workspace_id=victim.caller.id,
        headers=headers,
        file_id=victim.file_for(call),
    )


async def rows(connection: Any) -> int:
    return sum(len(table) for table in (await everything(connection)).values())


@pytest.mark.timeout(60)
async def test_every_route_that_inserts_is_refused_and_every_other_goes_on(
    run_site: SiteFactory, connections: Any
):
    """What inserts is found out on a roomy disk, so a new route cannot be forgotten here."""
    connection, inserting = await connections(), set[tuple[str, str]]()
    async with run_site() as roomy:
        for method, path, call in calls():
            victim = await victim_on(roomy)
            before = await rows(connection)
            await made(roomy, method, path, call, victim)
            if await rows(connection) > before:
                inserting.add((method, path))
        victims = [await victim_on(roomy) for _ in TABLE]

    async with low_site(run_site) as site:
        answers = {
            (method, path): await made(site, method, path, call, victim)
            for (method, path, call), victim in zip(calls(), victims, strict=True)
        }

    refused = {key for key, answer in answers.items() if answer.status == 507}
    assert refused == inserting
    assert {answers[key].json["code"] for key in refused} == {"disk_low"}
    # What belongs to peers is refused to everybody else, here too.
    of_peers = {key for key in TABLE if key[1].startswith("/internal/")}
    assert {answers[key].status for key in of_peers} == {401}
    assert {answers[key].status for key in set(TABLE) - refused - of_peers} <= {101, 200}
    assert ("POST", "/workspaces/{workspace_id}/pending-uploads/{file_id}/reopen") in inserting


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
