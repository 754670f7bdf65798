"""Registering, heartbeats, changes and removal, as clients of the existing server do it."""

import json
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import Part
from outsiders import Outsider, Reply, joined, newcomer

CALLABLE = "http://workspace.example:9000"


def beat(workspace: Outsider, **body: Any) -> Reply:
    return workspace.post("/registry/heartbeat", {"workspace_id": workspace.id} | body)


def shown(admin: Outsider, workspace: Outsider) -> dict[str, Any]:
    return admin.get(f"/admin/workspaces/{workspace.id}").json


def test_the_first_registration_gets_a_token(url: str):
    answer = newcomer(url).register()

    assert answer.status == 200
    assert (answer.json["status"], answer.json["delivery_mode"]) == ("registered", "poll")
    assert isinstance(answer.json["auth_token"], str)


def test_a_later_registration_needs_the_token_and_gets_no_new_one(workspace: Outsider):
    again = workspace.register()
    refused = [workspace.with_token(token).register().status for token in ("", "stale")]

    assert (again.status, again.json["status"]) == (200, "registered")
    assert "auth_token" not in again.json
    assert refused == [401, 401]


def test_fields_that_are_not_sent_keep_their_values(url: str, admin: Outsider):
    """A Go client sends an empty string, and a Python one null, for what it does not set."""
    workspace = joined(url, delivery_mode="push", url=CALLABLE)

    for absent in (..., None, ""):
        assert workspace.register(delivery_mode=absent, url=absent).status == 200, absent

    now = shown(admin, workspace)
    assert (now["delivery_mode"], now["url"]) == ("push", CALLABLE)


def test_an_unknown_mode_is_a_400_that_names_the_field(url: str):
    answer = newcomer(url).register(delivery_mode="pigeon")

    assert answer.status == 400
    assert "delivery_mode" in answer.error


def test_without_a_mode_the_stored_one_stays_and_the_first_is_push(url: str, workspace: Outsider):
    for absent in (..., None, ""):
        first = newcomer(url).register(delivery_mode=absent, url=CALLABLE)
        again = workspace.register(delivery_mode=absent)

        assert (first.json["delivery_mode"], again.json["delivery_mode"]) == ("push", "poll")


def test_push_without_a_url_is_a_400(url: str):
    answer = newcomer(url).register(delivery_mode="push")

    assert answer.status == 400
    assert "url" in answer.error


def test_a_registration_that_cannot_be_read_is_a_400(url: str):
    stranger = newcomer(url)
    wrong = [{"id": "not-a-uuid"}, {"id": ...}, {"agent_card": ...}, {"agent_card": None}]

    for change in wrong:
        assert stranger.register(**change).status == 400, change
    for body in (b"", b"{", b"id=1&agent_card=x", b"[]"):
        assert stranger.post("/registry/register", body).status == 400, body


def test_every_registration_and_heartbeat_carries_the_inbound_secret(url: str):
    """In poll mode too: receivers heal a lost secret with it."""
    stranger = newcomer(url)
    first = stranger.register()
    workspace = stranger.with_token(first.json["auth_token"])

    answers = [first, workspace.register(), beat(workspace), workspace.register()]

    secrets = {answer.json["platform_inbound_secret"] for answer in answers}
    assert len(secrets) == 1
    assert len(secrets.pop()) >= 32


def test_a_workspace_and_its_neighbour_have_different_secrets(workspace: Outsider, other: Outsider):
    secrets = {beat(one).json["platform_inbound_secret"] for one in (workspace, other)}

    assert len(secrets) == 2


def test_nobody_else_gets_the_secret(workspace: Outsider, other: Outsider):
    for token in ("", "stale", other.token):
        stranger = workspace.with_token(token)
        for answer in (beat(stranger), stranger.register()):
            assert answer.status == 401
            assert "platform_inbound_secret" not in answer.json


def test_a_heartbeat_is_ok_and_noted(workspace: Outsider, admin: Outsider):
    answer = beat(workspace, active_tasks=2, current_task="sorting mail")

    assert (answer.status, answer.json["status"]) == (200, "ok")
    now = shown(admin, workspace)
    assert (now["active_tasks"], now["current_task"]) == (2, "sorting mail")


@pytest.mark.parametrize("tasks", [{}, {"active_tasks": None}, {"active_tasks": -3}], ids=str)
def test_a_heartbeat_without_a_count_of_tasks_counts_as_idle(
    workspace: Outsider, admin: Outsider, tasks: dict[str, Any]
):
    beat(workspace, active_tasks=5, current_task="x")

    answer = beat(workspace, **tasks)

    assert answer.status == 200
    assert shown(admin, workspace)["active_tasks"] == 0


def test_poll_mode_ignores_a_url_that_cannot_be_called(url: str, admin: Outsider):
    workspace = newcomer(url)

    answer = workspace.register(url="remote://no-inbound")
    change = admin.ask("PATCH", workspace.path, b'{"url": "remote://no-inbound"}')

    assert (answer.status, answer.json["delivery_mode"]) == (200, "poll")
    assert (change.status, change.json) == (200, {"status": "updated"})
    assert shown(admin, workspace)["url"] is None


def test_a_card_without_a_name_is_named_after_the_id(url: str, admin: Outsider):
    for card in ({}, {"name": ""}, {"name": None}, {"description": "x"}):
        workspace = newcomer(url)

        assert workspace.register(agent_card=card).status == 200, card
        assert shown(admin, workspace)["name"] == workspace.id[:8]


def test_push_mode_takes_the_url_of_the_card(url: str, admin: Outsider):
    workspace = newcomer(url)

    answer = workspace.register(delivery_mode="push", agent_card={"name": "x", "url": CALLABLE})

    assert (answer.status, answer.json["delivery_mode"]) == (200, "push")
    assert shown(admin, workspace)["url"] == CALLABLE


def test_a_revoked_workspace_stays_revoked(workspace: Outsider, admin: Outsider):
    """The existing server would let it in again with the stale token."""
    admin.ask("DELETE", f"/admin/workspaces/{workspace.id}/token")

    assert workspace.register().status == 401
    assert workspace.with_token("").register().status == 401
    assert beat(workspace).status == 401


def test_the_admin_changes_any_of_four_fields(workspace: Outsider, admin: Outsider):
    for change in (
        {"name": "renamed"},
        {"url": CALLABLE},
        {"delivery_mode": "push"},
        {"parent_id": str(uuid4())},
    ):
        answer = admin.ask("PATCH", workspace.path, json.dumps(change))

        assert (answer.status, answer.json) == (200, {"status": "updated"})
        assert change.items() <= shown(admin, workspace).items()
    assert workspace.ask("PATCH", workspace.path, b'{"name": "x"}').status == 401


def test_a_workspace_is_removed_by_the_admin_or_by_itself(
    workspace: Outsider, other: Outsider, admin: Outsider
):
    by_itself = workspace.ask("DELETE", f"{workspace.path}?confirm=true")
    by_admin = admin.ask("DELETE", f"{other.path}?confirm=true")

    for removed, answer in ((workspace, by_itself), (other, by_admin)):
        assert (answer.status, answer.json["status"]) == (200, "removed")
        assert shown(admin, removed)["status"] == "removed"
        assert removed.feed().status == 401


def test_a_removed_workspace_keeps_its_files(workspace: Outsider, admin: Outsider):
    """They are the evidence that they were received, and leave by their own TTL."""
    file_id = workspace.file()

    workspace.ask("DELETE", f"{workspace.path}?confirm=true")

    again = workspace.with_token(admin.token).register()
    returned = workspace.with_token(again.json["auth_token"])
    assert returned.fetch(file_id).status == 200


def test_ids_are_answered_in_lower_case(url: str):
    """Swift and .NET write UUIDs in capitals."""
    chosen = str(uuid4())
    shouting = Outsider(url, id=chosen.upper())
    workspace = shouting.with_token(shouting.register().json["auth_token"])

    (sent,) = workspace.upload(Part()).json["files"]
    (row,) = workspace.rows()

    assert sent["uri"].startswith(f"platform-pending:{chosen}/")
    assert row["workspace_id"] == row["target_id"] == chosen
    assert str(UUID(row["id"])) == row["id"]
