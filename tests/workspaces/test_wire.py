"""WIRE, Registration: who is registered, with which token, and what changes and removes it."""

import json
import secrets
from typing import Any
from uuid import uuid4

import pytest
import structlog
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
    until_refused,
)
from sites import ADMIN_TOKEN, Site, SiteFactory

from restante.workspaces import registry

pytestmark = pytest.mark.anyio

URL = "http://workspace.example:9000"
SECRET = "platform_inbound_secret"


async def shown(site: Site, workspace_id: str) -> dict[str, Any]:
    return (await ask(site, "GET", f"/admin/workspaces/{workspace_id}", headers=ADMIN)).json


async def test_the_first_registration_answers_with_a_token(site: Site):
    answer = await register(site)

    assert answer.status == 200
    assert answer.json == {
        "status": "registered",
        "delivery_mode": "poll",
        "auth_token": answer.json["auth_token"],
        "platform_inbound_secret": answer.json["platform_inbound_secret"],
    }
    assert len(answer.json["auth_token"]) >= 32


async def test_a_token_is_random_and_appears_only_once(site: Site):
    first, second = await registered(site), await registered(site)

    again = await register(site, id=first.id, headers=bearer(first.token))

    assert first.token != second.token
    assert (again.status, again.json["status"]) == (200, "registered")
    assert "auth_token" not in again.json
    assert first.token not in json.dumps(await shown(site, first.id))


async def test_a_token_is_stored_only_as_its_hash(site: Site, connections: Any):
    caller = await registered(site)
    connection = await connections()

    row = dict(await connection.fetchrow("select * from workspaces where id = $1", caller.id))

    assert caller.token not in str(row)
    assert len(row["token_hash"]) == 32


@pytest.mark.parametrize("token", ["none", "garbage", "another's", "admin"])
async def test_a_taken_id_cannot_be_registered_without_its_token(site: Site, token: str):
    caller, other = await registered(site), await registered(site)
    before = await shown(site, caller.id)
    headers = {
        "none": {},
        "garbage": bearer("x" * 43),
        "another's": bearer(other.token),
        "admin": ADMIN,
    }[token]

    answer = await register(site, id=caller.id, agent_card={"name": "thief"}, headers=headers)

    assert answer.status == 401
    assert answer.json["code"] == "not_authenticated"
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert await shown(site, caller.id) == before


async def test_fields_that_are_not_sent_keep_their_values(site: Site):
    caller = await registered(site, delivery_mode="push", url=URL, agent_card={"name": "one"})
    own = bearer(caller.token)

    answer = await register(
        site, id=caller.id, delivery_mode=..., agent_card={"name": "two"}, headers=own
    )

    assert answer.json["delivery_mode"] == "push"
    now = await shown(site, caller.id)
    assert (now["delivery_mode"], now["url"], now["name"]) == ("push", URL, "two")


async def test_without_a_mode_the_stored_one_stays_and_the_first_is_push(site: Site):
    fresh = await register(site, delivery_mode=..., url=URL)
    poller = await registered(site, delivery_mode="poll")

    again = await register(site, id=poller.id, delivery_mode=..., headers=bearer(poller.token))

    assert fresh.json["delivery_mode"] == "push"
    assert again.json["delivery_mode"] == "poll"


async def test_null_counts_as_not_sent(site: Site):
    caller = await registered(site, delivery_mode="push", url=URL)
    body = {"id": caller.id, "delivery_mode": None, "url": None, "agent_card": {"name": "n"}}

    await ask(site, "POST", "/registry/register", json=body, headers=bearer(caller.token))

    assert (await shown(site, caller.id))["url"] == URL


async def test_all_of_the_agent_card_is_kept(site: Site):
    card = {"name": "nul \0 and \U0001f600", "skills": [{"id": 1.5, "big": 2**70}], "x": None}

    caller = await registered(site, agent_card=card)

    assert (await shown(site, caller.id))["agent_card"] == card
    listed = await ask(site, "GET", "/admin/workspaces", headers=ADMIN)
    assert [one["agent_card"] for one in listed.json["workspaces"]] == [None]


async def test_a_card_that_is_sent_again_is_not_written_again(site: Site, connections: Any):
    """A workspace that registers in a loop would leave a dead copy of its card each time."""
    connection, card = await connections(), {"name": "laptop", "text": secrets.token_hex(30_000)}
    caller = await registered(site, agent_card=card)
    own = {"Authorization": f"Bearer {caller.token}"}
    before = await toasted_bytes(connection)

    for _ in range(5):
        assert (await register(site, id=caller.id, agent_card=card, headers=own)).status == 200

    assert await toasted_bytes(connection) == before
    assert (await shown(site, caller.id))["agent_card"] == card


async def toasted_bytes(connection: Any) -> int:
    return await connection.fetchval(
        "select pg_relation_size(reltoastrelid) from pg_class where oid = 'workspaces'::regclass"
    )


async def test_large_cards_that_change_are_limited_per_minute(site: Site):
    caller = await registered(site)
    own = {"Authorization": f"Bearer {caller.token}"}
    answers = await until_refused(
        register(
            site, id=caller.id, agent_card={"name": "w", "text": f"{n}" + "x" * 60_000}, headers=own
        )
        for n in range(100)
    )

    assert answers[0].status == 200
    assert (answers[-1].status, answers[-1].json["code"]) == (429, "too_many_messages")
    small = await register(site, id=caller.id, agent_card={"name": "w"}, headers=own)
    assert small.status == 200


async def test_registering_again_is_limited_per_minute_however_small_the_card(
    run_site: SiteFactory, monkeypatch: pytest.MonkeyPatch
):
    """Each writes the row anew.  Others, and the operator's changes, have no part in it."""
    monkeypatch.setattr(registry, "_CARD_BYTES_PER_MINUTE", 8 * 1024)
    async with run_site() as site:
        caller, other = await registered(site), await registered(site)

        answers = await until_refused(register_again(site, caller) for _ in range(50))
        others = await register_again(site, other)
        change = await ask(site, "PATCH", caller.path, json={"name": "new"}, headers=ADMIN)

    assert answers[0].status == 200
    assert (answers[-1].status, answers[-1].json["code"]) == (429, "too_many_messages")
    assert 1 <= int(answers[-1].headers["Retry-After"]) <= 60
    assert (others.status, change.status) == (200, 200)


async def register_again(site: Site, caller: Caller) -> Answer:
    return await register(site, id=caller.id, headers=bearer(caller.token))


async def test_an_agent_card_is_bounded_and_an_older_larger_one_stays(site: Site, connections: Any):
    """It is kept as long as its workspace; before it was bounded it could have a MiB."""
    connection, card = await connections(), {"name": "laptop", "text": ""}
    card["text"] = "x" * (64 * 1024 - len(json.dumps(card, separators=(",", ":"))))
    caller = await registered(site, agent_card=card)
    card["text"] += "x"

    answer = await register(site, headers=ADMIN, agent_card=card)
    await connection.execute("update workspaces set agent_card = $1", json.dumps(card))

    assert (answer.status, answer.json["code"]) == (413, "message_too_large")
    assert answer.json["max"] == 64 * 1024
    assert (await shown(site, caller.id))["agent_card"] == card


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"delivery_mode": "pull"}, "delivery_mode"),
    ({"delivery_mode": "Poll"}, "delivery_mode"),
    ({"delivery_mode": 1}, "delivery_mode"),
    ({"delivery_mode": "push"}, "url"),
    ({"delivery_mode": ...}, "url"),
    ({"delivery_mode": ""}, "url"),
    ({"delivery_mode": None}, "url"),
    ({"delivery_mode": "push", "url": "remote://no-inbound"}, "url"),
    ({"delivery_mode": "poll", "url": 7}, "url"),
    ({"delivery_mode": "push", "url": ""}, "url"),
    ({"delivery_mode": "push", "url": "ftp://x"}, "url"),
    ({"delivery_mode": "push", "url": "http://user:secret@x"}, "url"),
    ({"delivery_mode": "push", "url": "http://x\r\nX: y"}, "url"),
    ({"delivery_mode": "push", "url": "http:///nowhere"}, "url"),
    ({"delivery_mode": "push", "url": "http://x:99999"}, "url"),
    ({"delivery_mode": "push", "url": ["http://x"]}, "url"),
    ({"id": "not-a-uuid"}, "id"),
    ({"id": ""}, "id"),
    ({"id": 7}, "id"),
    ({"id": ...}, "id"),
    ({"agent_card": ...}, "agent_card"),
    ({"agent_card": "tester"}, "agent_card"),
    ({"agent_card": None}, "agent_card"),
    ({"agent_card": [{"name": "tester"}]}, "agent_card"),
]


async def test_a_wrong_registration_is_a_400_that_names_the_field(site: Site, connections: Any):
    connection = await connections()

    for change, named in WRONG:
        answer = await register(site, **change)

        assert (answer.status, answer.json["code"]) == (400, "bad_request"), change
        assert named in answer.json["error"], change
    assert await connection.fetchval("select count(*) from workspaces") == 0


async def test_a_body_that_is_not_json_is_a_400(site: Site):
    for body in (b"", b"{", b"id=1", b"null", b"[]", b'"x"', b"\xff\xfe{}", b"{}{}"):
        answer = await ask(site, "POST", "/registry/register", data=body)

        assert (answer.status, answer.json["code"]) == (400, "bad_request"), body


async def test_registration_is_open_on_loopback_alone(run_site: SiteFactory):
    async with run_site(host="0.0.0.0") as site:
        stranger = await register(site)
        admin = await register(site, headers=ADMIN)

    assert (stranger.status, admin.status) == (401, 200)


async def test_a_registration_token_lets_new_workspaces_in(run_site: SiteFactory):
    async with run_site(registration_token="open-sesame-open-sesame") as site:
        answers = [
            await register(site, headers=headers)
            for headers in ({}, bearer("x"), bearer("open-sesame-open-sesame"), ADMIN)
        ]

    assert [answer.status for answer in answers] == [401, 401, 200, 200]


async def test_a_closed_server_does_not_tell_which_ids_are_taken(run_site: SiteFactory):
    async with run_site(registration_token="open-sesame-open-sesame") as site:
        taken = await registered(site)
        answers = [
            await register(site, id=an_id, headers=bearer("guess"))
            for an_id in (taken.id, str(uuid4()))
        ]

    assert answers[0].status == answers[1].status == 401
    assert answers[0].body == answers[1].body


async def beat(site: Site, token: str, **body: Any) -> Any:
    return await ask(site, "POST", "/registry/heartbeat", json=body, headers=bearer(token))


async def test_a_heartbeat_is_noted(site: Site):
    caller = await registered(site)
    before = await shown(site, caller.id)

    answer = await beat(
        site, caller.token, workspace_id=caller.id, active_tasks=3, current_task="sorting\nmail"
    )

    assert (answer.status, answer.json["status"]) == (200, "ok")
    now = await shown(site, caller.id)
    assert (now["active_tasks"], now["current_task"]) == (3, "sorting mail")
    assert now["last_seen_at"] > before["last_seen_at"]


async def test_a_heartbeat_needs_the_workspaces_own_token(site: Site):
    caller, other = await registered(site), await registered(site)
    before = await shown(site, caller.id)

    for token in (other.token, ADMIN_TOKEN, "x"):
        answer = await beat(site, token, workspace_id=caller.id, active_tasks=9, current_task="")
        assert answer.status == 401
    unknown = await beat(site, caller.token, workspace_id=str(uuid4()), active_tasks=9)

    assert unknown.status == 401
    assert await shown(site, caller.id) == before


async def test_a_wrong_heartbeat_is_a_400_that_names_the_field(site: Site):
    caller = await registered(site)
    good = {"workspace_id": caller.id, "active_tasks": 0, "current_task": ""}

    for field, value in (
        ("workspace_id", "x"),
        ("active_tasks", 2.5),
        ("active_tasks", "many"),
        ("active_tasks", True),
        ("current_task", 5),
    ):
        answer = await beat(site, caller.token, **(good | {field: value}))
        assert answer.status == 400
        assert field in answer.json["error"]


async def patch(site: Site, workspace_id: str, headers: Any = ADMIN, **body: Any) -> Any:
    return await ask(site, "PATCH", f"/workspaces/{workspace_id}", json=body, headers=headers)


async def test_the_admin_changes_any_of_four_fields(site: Site):
    caller = await registered(site)
    parent = str(uuid4())

    for change in (
        {"name": "renamed"},
        {"url": URL},
        {"delivery_mode": "push"},
        {"parent_id": parent},
    ):
        before = await shown(site, caller.id)
        answer = await patch(site, caller.id, **change)

        assert (answer.status, answer.json) == (200, {"status": "updated"})
        now = await shown(site, caller.id)
        assert now | {"last_seen_at": ""} == before | change | {"last_seen_at": ""}


async def test_a_workspace_may_not_change_itself_by_patch(site: Site):
    caller = await registered(site)
    before = await shown(site, caller.id)

    for headers in ({}, bearer(caller.token), bearer("x")):
        assert (await patch(site, caller.id, headers, name="x")).status == 401

    assert await shown(site, caller.id) == before


async def test_a_wrong_change_is_refused_and_names_the_field(site: Site):
    caller, poller = await registered(site, delivery_mode="push", url=URL), await registered(site)
    before = await shown(site, caller.id)

    for field, value in (
        ("delivery_mode", "pull"),
        ("url", "nonsense"),
        ("parent_id", "x"),
        ("name", 1),
    ):
        answer = await patch(site, caller.id, **{field: value})
        assert answer.status == 400
        assert field in answer.json["error"]
    to_push = await patch(site, poller.id, delivery_mode="push")

    assert to_push.status == 400
    assert "url" in to_push.json["error"]
    assert await shown(site, caller.id) == before


async def test_changing_what_is_not_there_is_a_404(site: Site):
    assert (await patch(site, str(uuid4()), name="x")).status == 404
    assert (await patch(site, "no-id", name="x")).status == 400


async def remove(caller: Caller, headers: Any, query: str = "?confirm=true") -> Any:
    return await ask(caller.site, "DELETE", caller.path + query, headers=headers)


@pytest.mark.parametrize("by", ["admin", "itself"])
async def test_a_workspace_is_removed_by_the_admin_or_by_itself(site: Site, by: str):
    caller = await registered(site)

    answer = await remove(caller, ADMIN if by == "admin" else bearer(caller.token))

    assert (answer.status, answer.json) == (200, {"status": "removed"})
    assert (await shown(site, caller.id))["status"] == "removed"


async def test_removing_takes_a_confirmation(site: Site):
    caller = await registered(site)

    for query in ("", "?confirm=false", "?confirm=", "?confirm=yes", "?other=true"):
        assert (await remove(caller, ADMIN, query)).status == 400

    assert (await shown(site, caller.id))["status"] == "active"


async def test_nobody_else_removes_a_workspace(site: Site):
    caller, other = await registered(site), await registered(site)

    for headers in ({}, bearer(other.token), bearer("x")):
        assert (await remove(caller, headers)).status == 401

    assert (await shown(site, caller.id))["status"] == "active"


async def test_a_removed_workspaces_uploads_stay(site: Site, connections: Any):
    """They are evidence of receipt and leave by their own TTL."""
    caller = await registered(site)
    await caller.staged(Part(b"one"), Part(b"two"))
    connection = await connections()
    before = await everything(connection, caller.id)

    await remove(caller, ADMIN)

    after = await everything(connection, caller.id)
    assert before.pop("workspaces") != after.pop("workspaces")
    assert after == before
    assert len(after["uploads"]) == 2


async def test_a_removed_workspace_is_gone_for_everyone(site: Site):
    caller = await registered(site)
    (file_id,) = await caller.staged()
    await remove(caller, ADMIN)

    assert (await caller.upload(Part())).status == 401
    assert (await caller.read_feed()).status == 401
    assert (await caller.fetch(file_id)).status == 401
    assert (await caller.ack(file_id)).status == 401
    as_admin = await ask(site, "GET", f"{caller.path}/activity", headers=ADMIN)
    assert as_admin.status == 404
    assert (await remove(caller, ADMIN)).status == 404


async def test_only_the_admin_brings_a_removed_workspace_back(site: Site):
    """Its id was somebody's: the next one to ask for it must not find their files."""
    caller = await registered(site)
    (file_id,) = await caller.staged()
    await remove(caller, ADMIN)

    for headers in ({}, bearer(caller.token)):
        assert (await register(site, id=caller.id, headers=headers)).status == 401
    revived = await register(site, id=caller.id, headers=ADMIN)

    assert revived.status == 200
    back = Caller(site, caller.id, revived.json["auth_token"])
    assert back.token != caller.token
    assert (await back.fetch(file_id)).body == b"hello"


async def test_the_admin_issues_and_revokes_tokens(site: Site):
    caller = await registered(site)
    path = f"/admin/workspaces/{caller.id}/token"

    fresh = (await ask(site, "POST", path, headers=ADMIN)).json["auth_token"]
    with_old = await caller.read_feed()
    with_new = await Caller(site, caller.id, fresh).read_feed()
    revoked = await ask(site, "DELETE", path, headers=ADMIN)
    after = await Caller(site, caller.id, fresh).read_feed()
    by_canvas = await ask(site, "GET", f"{caller.path}/activity", headers=ADMIN)

    assert (with_old.status, with_new.status) == (401, 200)
    assert (revoked.status, after.status) == (200, 401)
    assert by_canvas.status == 200


async def test_workspaces_are_listed_page_by_page(site: Site):
    ids = sorted([(await registered(site)).id for _ in range(5)])
    seen: list[str] = []
    after: dict[str, str] = {}

    while True:
        page = await ask(
            site, "GET", "/admin/workspaces", headers=ADMIN, params={"limit": "2", **after}
        )
        seen += [workspace["id"] for workspace in page.json["workspaces"]]
        if "next_after" not in page.json:
            break
        after = {"after": page.json["next_after"]}

    assert seen == ids


async def test_no_token_reaches_the_log(site: Site):
    with structlog.testing.capture_logs() as logged:
        caller = await registered(site, delivery_mode="push", url=URL)
        path = f"/admin/workspaces/{caller.id}/token"
        fresh = (await ask(site, "POST", path, headers=ADMIN)).json["auth_token"]
        await register(site, id=caller.id, headers=bearer("a-wrong-token"))
        beaten = await beat(site, fresh, workspace_id=caller.id)

    events = {line["event"] for line in logged}
    assert {"workspace_registered", "token_reissued", "request"} <= events
    for secret in (caller.token, fresh, ADMIN_TOKEN, "a-wrong-token", beaten.json[SECRET]):
        assert secret not in str(logged)
