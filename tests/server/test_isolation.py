"""
Every route by every kind of caller: who may call it, and that nobody detects another's data.

The table must name every route; a new one fails the test until it says who may call it.
"""

import re
import secrets
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest
from callers import ADMIN, Caller, Part, ask, bearer, everything, registered
from routes import CALLERS, KEY, TABLE, Victim, make, victim_on
from sites import Site
from starlette.routing import Route, WebSocketRoute

from restante.server.app import ROUTES

pytestmark = pytest.mark.anyio


@pytest.fixture
def site(shared_site: Site) -> Site:
    """Each test has workspaces of its own."""
    return shared_site


@pytest.fixture
def dsn(site: Site) -> str:
    assert site.settings.database_url is not None
    return site.settings.database_url


def test_the_table_names_every_route():
    routes = {
        (method, route.path)
        for route in ROUTES
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}
    }
    websockets = {("WS", route.path) for route in ROUTES if isinstance(route, WebSocketRoute)}

    assert all(isinstance(route, Route | WebSocketRoute) for route in ROUTES)
    assert set(TABLE) == routes | websockets


def tokens(victim: Victim, other: Caller) -> dict[str, dict[str, str]]:
    return {
        "nobody": {},
        "garbage": bearer("\u00ff" + secrets.token_urlsafe(32)),
        "other": bearer(other.token),
        "peer": bearer(victim.peer_token),
        "own": bearer(victim.caller.token),
        "admin": ADMIN,
    }


EACH = pytest.mark.parametrize(("method", "path"), TABLE, ids=" ".join)


@EACH
async def test_a_route_answers_its_callers_and_refuses_all_others_alike(
    site: Site, connections: Any, method: str, path: str
):
    call = TABLE[method, path]
    connection = await connections()
    other = await registered(site)
    victim = await victim_on(site)
    before = await everything(connection, victim.caller.id)

    for name in CALLERS - call.may:
        there, absent = [
            await make(
                site,
                method,
                path,
                call,
                workspace_id=workspace_id,
                headers=tokens(victim, other)[name],
                file_id=victim.file_for(call),
            )
            for workspace_id in (victim.caller.id, str(uuid4()))
        ]
        assert there.status in {401, 403} if method == "WS" else there.status == 401, name
        assert b"secret" not in there.body
        if call.hides:
            assert (there.status, there.body) == (absent.status, absent.body), name
    assert await everything(connection, victim.caller.id) == before

    for name in call.may:
        fresh = await victim_on(site)
        answer = await make(
            site,
            method,
            path,
            call,
            workspace_id=fresh.caller.id,
            headers=tokens(fresh, other)[name],
            file_id=fresh.file_for(call),
        )
        assert answer.status in call.answers, (name, answer)
    assert await everything(connection, victim.caller.id) == before


@pytest.mark.parametrize("path", [path for method, path in TABLE if method == "GET"])
async def test_head_is_allowed_to_the_same_callers_as_get(site: Site, path: str):
    """Starlette adds HEAD to every GET route."""
    call = TABLE["GET", path]
    other = await registered(site)
    victim = await victim_on(site)

    for name in CALLERS:
        answer = await make(
            site,
            "HEAD",
            path,
            call,
            workspace_id=victim.caller.id,
            headers=tokens(victim, other)[name],
            file_id=victim.file_id,
        )
        assert answer.status == (200 if name in call.may else 401), name


async def test_ids_of_another_workspace_are_answered_like_unknown_ids(site: Site, connections: Any):
    """The answers are equal byte for byte, for file ids and for cursors."""
    connection = await connections()
    victim, other = await victim_on(site), await registered(site)
    await other.staged(Part(b"own"))
    before = await everything(connection, victim.caller.id)

    async def both(ask_with: Callable[[str], Any], *theirs: str) -> None:
        absent = await ask_with(str(uuid4()))
        assert absent.status in {404, 410}
        for an_id in theirs:
            found = await ask_with(an_id)
            assert (found.status, found.body) == (absent.status, absent.body)

    files = (victim.file_id, victim.acked_id)
    await both(other.fetch, *files)
    await both(lambda an_id: other.fetch(an_id, Range="bytes=0-1"), *files)
    await both(lambda an_id: other.fetch(an_id, If_None_Match="*"), *files)
    await both(lambda an_id: other.fetch(an_id, "HEAD"), *files)
    await both(other.ack, *files)
    await both(lambda an_id: other.ask("POST", f"/pending-uploads/{an_id}/reopen"), *files)
    await both(lambda an_id: other.waiting(after=an_id), *files)
    await both(lambda an_id: other.read_feed(since_id=an_id), victim.row_id)
    await both(lambda an_id: other.read_feed(since_id=an_id, wait=5), victim.row_id)
    await both(
        lambda an_id: other.ask("GET", "/events", headers={"Last-Event-ID": an_id}), victim.row_id
    )

    assert await everything(connection, victim.caller.id) == before


async def test_the_right_file_id_does_not_help_a_wrong_token(site: Site, connections: Any):
    """The refusal is the same as for an unknown file id."""
    connection = await connections()
    victim, other = await victim_on(site), await registered(site)
    before = await everything(connection, victim.caller.id)
    path = victim.caller.path

    for method, below in (
        ("GET", f"/pending-uploads/{victim.file_id}/content"),
        ("POST", f"/pending-uploads/{victim.file_id}/ack"),
        ("POST", f"/pending-uploads/{victim.acked_id}/reopen"),
        ("GET", f"/activity?since_id={victim.row_id}"),
        ("GET", "/activity?since_seq=0"),
        ("GET", f"/pending-uploads?after={victim.file_id}"),
    ):
        right = await ask(site, method, path + below, headers=bearer(other.token))
        wrong_id = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4,12}){4}", str(uuid4()), below)
        wrong = await ask(site, method, path + wrong_id, headers=bearer(other.token))
        assert right.status == 401
        assert right.body == wrong.body
    assert await everything(connection, victim.caller.id) == before


async def test_a_key_of_another_workspace_is_a_new_key(site: Site, connections: Any):
    connection = await connections()
    victim, other = await victim_on(site), await registered(site)
    before = await everything(connection, victim.caller.id)

    same_files = await other.upload(Part(b"secret-3"), Idempotency_Key=KEY)
    repeated = await other.upload(Part(b"secret-3"), Idempotency_Key=KEY)

    assert same_files.status == 200
    assert victim.caller.id not in same_files.body.decode()
    assert repeated.body == same_files.body
    assert len(await other.feed()) == 1
    assert await everything(connection, victim.caller.id) == before


async def test_traffic_of_another_workspace_cannot_be_detected(site: Site):
    """Neither in the rows nor in the marks that are sent as headers."""
    quiet = await registered(site)
    before = await quiet.read_feed()

    await victim_on(site)

    after = await quiet.read_feed()
    assert after.body == before.body == b"[]"
    for name in ("X-Restante-Lowest-Seq", "X-Restante-Latest-Seq", "X-Restante-Acked-Seq"):
        assert after.headers[name] == before.headers[name]


async def test_a_workspace_is_no_operator(site: Site):
    caller = await registered(site)

    listed = await ask(site, "GET", "/admin/workspaces", headers=bearer(caller.token))

    assert listed.status == 401
