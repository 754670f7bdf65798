"""WIRE, Registration: what programs in the field send and lack, and the secret that heals them."""

from typing import Any
from uuid import uuid4

import pytest
from callers import ADMIN, Answer, Caller, ask, bearer, register, registered
from sites import Site, SiteFactory

pytestmark = pytest.mark.anyio

URL = "http://workspace.example:9000"
OTHER_URL = "https://other.example/agent"
SECRET = "platform_inbound_secret"


async def shown(site: Site, workspace_id: str) -> dict[str, Any]:
    return (await ask(site, "GET", f"/admin/workspaces/{workspace_id}", headers=ADMIN)).json


async def register_again(caller: Caller, **body: Any) -> Answer:
    return await register(caller.site, id=caller.id, headers=bearer(caller.token), **body)


async def beat(caller: Caller, **body: Any) -> Answer:
    sent = {"workspace_id": caller.id} | body
    return await ask(
        caller.site, "POST", "/registry/heartbeat", json=sent, headers=bearer(caller.token)
    )


@pytest.mark.parametrize("mode", ["poll", "push"])
async def test_every_registration_and_heartbeat_answers_the_same_secret(
    shared_site: Site, mode: str
):
    workspace_id = str(uuid4())
    first = await register(shared_site, id=workspace_id, delivery_mode=mode, url=URL)
    caller = Caller(shared_site, workspace_id, first.json["auth_token"])

    answers = [
        await register_again(caller),
        await beat(caller),
        await register_again(caller, delivery_mode="push", url=OTHER_URL),
        await register_again(caller, delivery_mode="poll"),
        await beat(caller, active_tasks=1, current_task="x"),
    ]

    assert len(first.json[SECRET]) >= 32
    assert {answer.json[SECRET] for answer in answers} == {first.json[SECRET]}
    assert answers[1].json == {"status": "ok", SECRET: first.json[SECRET]}
    assert first.json[SECRET] != caller.token


async def test_a_workspace_that_comes_back_has_a_new_secret(shared_site: Site):
    caller = await registered(shared_site)
    before = (await beat(caller)).json[SECRET]
    await ask(shared_site, "DELETE", caller.path + "?confirm=true", headers=ADMIN)

    revived = await register(shared_site, id=caller.id, headers=ADMIN)

    assert revived.json[SECRET] != before


async def test_a_refusal_shows_no_secret(shared_site: Site):
    caller = await registered(shared_site)
    thief = Caller(shared_site, caller.id, (await registered(shared_site)).token)

    refused = [await register_again(thief), await beat(thief)]

    assert [answer.status for answer in refused] == [401, 401]
    assert not any(SECRET in answer.json for answer in refused)


async def test_a_revoked_token_stays_revoked_until_the_admin_issues_another(shared_site: Site):
    caller = await registered(shared_site)
    token = f"/admin/workspaces/{caller.id}/token"
    await ask(shared_site, "DELETE", token, headers=ADMIN)

    refused = [await register_again(caller), await beat(caller)]
    issued = await ask(shared_site, "POST", token, headers=ADMIN)
    again = await register_again(Caller(shared_site, caller.id, issued.json["auth_token"]))

    assert [answer.status for answer in refused] == [401, 401]
    assert again.status == 200


@pytest.mark.parametrize(
    "url",
    [
        "remote://no-inbound",
        "nonsense",
        "ftp://x",
        "http://user:secret@x",
        "x" * 5000,
        "http://a b",
    ],
    ids=lambda url: url[:20],
)
async def test_a_url_that_cannot_be_called_is_ignored_in_poll_mode(shared_site: Site, url: str):
    fresh = await registered(shared_site, delivery_mode="poll", url=url)
    stored = await registered(shared_site, delivery_mode="poll", url=URL)

    again = await register_again(stored, delivery_mode=..., url=url)
    changes = [
        await ask(shared_site, "PATCH", one.path, json={"url": url}, headers=ADMIN)
        for one in (fresh, stored)
    ]

    assert again.status == 200
    assert [change.status for change in changes] == [200, 200]
    assert (await shown(shared_site, fresh.id))["url"] is None
    assert (await shown(shared_site, stored.id))["url"] == URL


async def test_what_was_ignored_does_not_count_when_the_workspace_changes_to_push(
    shared_site: Site,
):
    caller = await registered(shared_site, delivery_mode="poll", url="remote://no-inbound")

    refused = [
        await register_again(caller, delivery_mode="push"),
        await register_again(caller, delivery_mode="push", url="remote://no-inbound"),
        await ask(shared_site, "PATCH", caller.path, json={"delivery_mode": "push"}, headers=ADMIN),
        await ask(
            shared_site,
            "PATCH",
            caller.path,
            json={"delivery_mode": "push", "url": "remote://no-inbound"},
            headers=ADMIN,
        ),
    ]

    assert [answer.status for answer in refused] == [400] * 4
    assert all("url" in answer.json["error"] for answer in refused)
    assert (await shown(shared_site, caller.id))["delivery_mode"] == "poll"


@pytest.mark.parametrize("card", [{}, {"name": ""}, {"name": " \n"}, {"name": 1}, {"name": None}])
async def test_a_card_without_a_name_is_accepted(shared_site: Site, card: dict[str, Any]):
    fresh = await registered(shared_site, agent_card=card)
    named = await registered(shared_site, agent_card={"name": "laptop"})

    again = await register_again(named, agent_card=card)

    assert again.status == 200
    assert (await shown(shared_site, fresh.id))["name"] == fresh.id[:8]
    assert (await shown(shared_site, named.id))["name"] == "laptop"
    assert (await shown(shared_site, named.id))["agent_card"] == card


async def test_push_mode_without_a_url_takes_that_of_the_card(shared_site: Site):
    fresh = await registered(shared_site, delivery_mode=..., agent_card={"url": URL})
    moved = await registered(shared_site, delivery_mode="push", agent_card={"url": URL})
    await register_again(moved, delivery_mode=..., url="", agent_card={"url": OTHER_URL})
    given = await registered(
        shared_site, delivery_mode="push", url=URL, agent_card={"url": OTHER_URL}
    )
    poller = await registered(shared_site, agent_card={"url": URL})

    urls = [(await shown(shared_site, one.id))["url"] for one in (fresh, moved, given, poller)]

    assert urls == [URL, OTHER_URL, URL, None]


@pytest.mark.parametrize("url", ["remote://no-inbound", "ftp://x", "http://user:secret@x"])
async def test_push_mode_with_a_url_that_cannot_be_called_takes_that_of_the_card(
    shared_site: Site, url: str
):
    fresh = await registered(shared_site, delivery_mode="push", url=url, agent_card={"url": URL})

    again = await register_again(fresh, delivery_mode=..., url=url, agent_card={"url": OTHER_URL})

    assert again.status == 200
    assert (await shown(shared_site, fresh.id))["url"] == OTHER_URL


@pytest.mark.parametrize(
    "url", ["remote://no-inbound", "ftp://x", "http://user:secret@x", "http://x:99999", "", 7, None]
)
async def test_a_card_whose_url_cannot_be_called_has_none(shared_site: Site, url: Any):
    workspace_id = str(uuid4())
    card = {"name": "w", "url": url}
    stored = await registered(shared_site, delivery_mode="push", url=URL)

    refused = await register(shared_site, id=workspace_id, delivery_mode="push", agent_card=card)
    again = await register_again(stored, delivery_mode="push", agent_card=card)

    assert (refused.status, refused.json["code"]) == (400, "bad_request")
    assert (
        await ask(shared_site, "GET", f"/admin/workspaces/{workspace_id}", headers=ADMIN)
    ).status == 404
    assert again.status == 200
    assert (await shown(shared_site, stored.id))["url"] == URL


async def test_a_private_address_of_the_card_is_not_called(run_site: SiteFactory):
    async with run_site() as site:
        caller = await registered(
            site, delivery_mode="push", agent_card={"url": "http://127.0.0.1:9"}
        )
        message = {"content": "hello"}
        answer = await ask(site, "POST", f"{caller.path}/a2a", json=message, headers=ADMIN)

    assert (answer.status, answer.json["code"]) == (502, "address_refused")


@pytest.mark.parametrize("mode", ["", None])
async def test_an_empty_mode_counts_as_not_given(shared_site: Site, mode: str | None):
    fresh = await register(shared_site, delivery_mode=mode, url=URL)
    poller = await registered(shared_site, delivery_mode="poll")

    again = await register_again(poller, delivery_mode=mode)
    change = await ask(
        shared_site, "PATCH", poller.path, json={"delivery_mode": mode}, headers=ADMIN
    )

    assert (fresh.json["delivery_mode"], again.json["delivery_mode"]) == ("push", "poll")
    assert change.status == 200
    assert (await shown(shared_site, poller.id))["delivery_mode"] == "poll"


@pytest.mark.parametrize(
    ("sent", "noted"),
    [
        ({}, 0),
        ({"active_tasks": None}, 0),
        ({"active_tasks": -1}, 0),
        ({"active_tasks": -(2**70)}, 0),
        ({"active_tasks": 2.0}, 2),
        ({"active_tasks": 2**31 - 1}, 2**31 - 1),
        ({"active_tasks": 2**31}, 2**31 - 1),
        ({"active_tasks": 2**70}, 2**31 - 1),
        ({"active_tasks": 1e300}, 2**31 - 1),
    ],
    ids=str,
)
async def test_any_count_of_tasks_is_noted_as_one_that_can_be(
    shared_site: Site, sent: dict[str, Any], noted: int
):
    caller = await registered(shared_site)
    await beat(caller, active_tasks=5, current_task="busy")

    answer = await beat(caller, **sent)

    assert answer.status == 200
    assert (await shown(shared_site, caller.id))["active_tasks"] == noted


async def test_no_current_task_is_an_empty_one(shared_site: Site):
    caller = await registered(shared_site)
    for sent in ({}, {"current_task": None}):
        await beat(caller, current_task="busy")

        answer = await beat(caller, **sent)

        assert answer.status == 200
        assert (await shown(shared_site, caller.id))["current_task"] == ""


async def test_unknown_fields_are_ignored_everywhere(shared_site: Site):
    more = {"status": "removed", "tier": 3, "metadata": {"x": [1]}}
    caller = await registered(shared_site, **more)
    before = await shown(shared_site, caller.id)

    answers = [
        await register_again(caller, **more),
        await beat(caller, **more),
        await ask(shared_site, "PATCH", caller.path, json=more, headers=ADMIN),
    ]

    assert [answer.status for answer in answers] == [200, 200, 200]
    now = await shown(shared_site, caller.id)
    assert now | {"last_seen_at": ""} == before | {"last_seen_at": ""}


async def test_the_admin_takes_a_workspace_out_of_its_parent(shared_site: Site):
    caller = await registered(shared_site)
    await ask(shared_site, "PATCH", caller.path, json={"parent_id": str(uuid4())}, headers=ADMIN)

    answer = await ask(
        shared_site, "PATCH", caller.path, json={"parent_id": None, "name": None}, headers=ADMIN
    )

    assert (answer.status, answer.json) == (200, {"status": "updated"})
    now = await shown(shared_site, caller.id)
    assert (now["parent_id"], now["name"]) == (None, "tester")


async def test_an_empty_parent_counts_as_not_given(shared_site: Site):
    caller, parent = await registered(shared_site), str(uuid4())
    await ask(shared_site, "PATCH", caller.path, json={"parent_id": parent}, headers=ADMIN)

    change = {"parent_id": "", "name": "another"}
    answer = await ask(shared_site, "PATCH", caller.path, json=change, headers=ADMIN)

    assert (answer.status, answer.json) == (200, {"status": "updated"})
    now = await shown(shared_site, caller.id)
    assert (now["name"], now["parent_id"]) == ("another", parent)


@pytest.mark.parametrize("parent", ["x", " ", "5f0c6a52", 5, []])
async def test_a_parent_that_is_no_id_is_refused(shared_site: Site, parent: Any):
    caller = await registered(shared_site)

    change = {"parent_id": parent}
    answer = await ask(shared_site, "PATCH", caller.path, json=change, headers=ADMIN)

    assert (answer.status, answer.json["code"]) == (400, "bad_request")
    assert answer.json["error"].startswith("parent_id is wrong: ")


async def test_a_parent_may_be_spelled_in_several_ways(shared_site: Site):
    caller, parent = await registered(shared_site), uuid4()

    change = {"parent_id": f"{{{parent}}}"}
    await ask(shared_site, "PATCH", caller.path, json=change, headers=ADMIN)

    assert (await shown(shared_site, caller.id))["parent_id"] == str(parent)
