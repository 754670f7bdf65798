"""Acknowledging over HTTP, and the list of unacknowledged files."""

import asyncio
import hashlib
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from callers import ADMIN, Caller, Part, ask, bearer, registered, waits_for_a_lock
from sites import SiteFactory
from waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def file_id(caller: Caller) -> str:
    (file_id,) = await caller.staged(Part(b"some content"))
    return file_id


async def test_an_acknowledgement_is_idempotent_and_keeps_the_first_time(
    caller: Caller, connection: Any, file_id: str
):
    first = await caller.ack(file_id)
    at = await connection.fetchval("select acked_at from uploads")
    second = await caller.ack(file_id)

    assert (first.status, first.json) == (200, {"acked": True})
    assert (second.status, second.json) == (200, {"acked": True})
    assert await connection.fetchval("select acked_at from uploads") == at


async def test_concurrent_acknowledgements_free_the_room_once(
    caller: Caller, connection: Any, file_id: str
):
    await caller.staged()

    answers = await asyncio.gather(*(caller.ack(file_id) for _ in range(8)))

    assert [answer.json for answer in answers] == [{"acked": True}] * 8
    usage = await connection.fetchrow("select waiting_bytes, waiting_files from feeds")
    assert tuple(usage) == (5, 1)


async def test_a_file_can_be_acknowledged_without_being_fetched(caller: Caller, file_id: str):
    assert (await caller.ack(file_id)).json == {"acked": True}


async def test_an_acknowledgement_that_raced_with_the_sweep_says_so(
    caller: Caller, connection: Any, connections: Any, file_id: str
):
    """The sweep has deleted the row and not committed yet; the acknowledgement waits for that."""
    sweep = connection.transaction()
    await sweep.start()
    await connection.execute("delete from uploads where file_id = $1", file_id)
    acking = asyncio.create_task(caller.ack(file_id))
    watcher = await connections()
    await until(lambda: waits_for_a_lock(watcher))
    await sweep.commit()

    answer = await acking

    again = await caller.ack(file_id)
    assert (answer.status, answer.json) == (200, {"acked": True, "raced": True})
    assert (again.status, again.json["code"]) == (404, "upload_gone")


async def test_an_acknowledged_file_cannot_be_fetched(caller: Caller, file_id: str):
    await caller.ack(file_id)

    answer = await caller.fetch(file_id)

    assert (answer.status, answer.json["code"]) == (404, "upload_gone")
    assert (await caller.fetch(file_id, "HEAD")).status == 404
    assert (await caller.fetch(file_id, If_None_Match="*")).status == 404


async def test_a_missing_file_is_the_same_404_for_every_reason(caller: Caller, connection: Any):
    other = await registered(caller.site)
    (theirs,) = await other.staged()
    expired, acked = await caller.staged(Part(), Part())
    await caller.ack(acked)
    await connection.execute("update uploads set expires_at = now() where file_id = $1", expired)

    fetches = [await caller.fetch(one) for one in (str(uuid4()), theirs, expired, acked)]
    acks = [await caller.ack(one) for one in (str(uuid4()), theirs, expired)]

    assert {answer.status for answer in fetches + acks} == {404}
    assert len({answer.body for answer in fetches + acks}) == 1
    assert (await other.fetch(theirs)).body == b"hello"


async def test_a_malformed_id_is_a_400(caller: Caller):
    file_id = str(uuid4())
    for wrong in ("x", "1", f"{uuid4()}0", "%00", "00000000-0000-0000-0000-00000000000g"):
        for method, end in (("GET", "content"), ("HEAD", "content"), ("POST", "ack")):
            bad_file = await caller.ask(method, f"/pending-uploads/{wrong}/{end}")
            bad_workspace = await ask(
                caller.site,
                method,
                f"/workspaces/{wrong}/pending-uploads/{file_id}/{end}",
                headers=bearer(caller.token),
            )

            assert (bad_file.status, bad_workspace.status) == (400, 400)
            if method != "HEAD":
                assert bad_file.json["error"] == "invalid file_id"
                assert bad_workspace.json["error"] == "invalid workspace ID"


async def test_fetch_and_acknowledgement_need_the_token_of_the_workspace(
    caller: Caller, connection: Any, file_id: str
):
    other = await registered(caller.site)
    for headers in ({}, bearer("x"), bearer(other.token)):
        for method, end in (("GET", "content"), ("POST", "ack")):
            path = f"{caller.path}/pending-uploads/{file_id}/{end}"
            answer = await ask(caller.site, method, path, headers=headers)
            assert (answer.status, answer.json["code"]) == (401, "not_authenticated")

    row = await connection.fetchrow("select fetched_at, acked_at from uploads")
    assert tuple(row) == (None, None)


async def test_the_admin_fetches_and_acknowledges_as_the_workspace_does(
    caller: Caller, connection: Any, file_id: str
):
    """A canvas shows a file before the workspace has it."""
    path = f"{caller.path}/pending-uploads/{file_id}"

    fetched = await ask(caller.site, "GET", f"{path}/content", headers=ADMIN)
    ranged = await ask(
        caller.site, "GET", f"{path}/content", headers={**ADMIN, "Range": "bytes=5-"}
    )
    acked = await ask(caller.site, "POST", f"{path}/ack", headers=ADMIN)
    again = await ask(caller.site, "GET", f"{path}/content", headers=ADMIN)

    assert (fetched.status, fetched.body) == (200, b"some content")
    assert (ranged.status, ranged.body) == (206, b"content")
    assert (acked.status, acked.json) == (200, {"acked": True})
    assert (again.status, again.json["code"]) == (404, "upload_gone")
    assert await connection.fetchval("select acked_at is not null from uploads")


async def test_only_the_admin_learns_that_a_workspace_is_unknown(caller: Caller, file_id: str):
    for method, end in (("GET", "content"), ("POST", "ack")):
        path = f"/workspaces/{uuid4()}/pending-uploads/{file_id}/{end}"
        admins = await ask(caller.site, method, path, headers=ADMIN)
        others = await ask(caller.site, method, path, headers=bearer(caller.token))

        assert (admins.status, admins.json["code"]) == (404, "workspace_unknown")
        assert (others.status, others.json["code"]) == (401, "not_authenticated")


async def test_the_admin_gets_the_same_404_for_the_file_of_another_workspace(caller: Caller):
    other = await registered(caller.site)
    (theirs,) = await other.staged()

    for file_id in (theirs, str(uuid4())):
        for method, end in (("GET", "content"), ("POST", "ack")):
            path = f"{caller.path}/pending-uploads/{file_id}/{end}"
            answer = await ask(caller.site, method, path, headers=ADMIN)
            assert (answer.status, answer.json["code"]) == (404, "upload_gone")


# Acknowledged files that are served until they are swept


async def test_a_server_can_be_set_to_serve_acknowledged_files(
    run_site: SiteFactory, connection: Any
):
    """Some workspaces fetch again after a crash between the acknowledgement and the use."""
    async with run_site(serve_acked=True, ack_retention_seconds=60) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged(Part(b"some content"))
        await caller.ack(file_id)
        await connection.execute(
            "update uploads set acked_at = now() - interval '1 hour', expires_at = now()"
        )

        whole, part = await caller.fetch(file_id), await caller.fetch(file_id, Range="bytes=5-")
        listed = (await caller.waiting()).json
        again = await caller.ack(file_id)
        await ask(site, "POST", "/admin/retention/sweep", headers=ADMIN)
        swept = await caller.fetch(file_id)

    assert (whole.status, whole.body) == (200, b"some content")
    assert (part.status, part.body) == (206, b"content")
    assert listed == {"uploads": []}
    assert again.json == {"acked": True}
    assert (swept.status, swept.json["code"]) == (404, "upload_gone")


async def test_expired_files_are_never_served(run_site: SiteFactory, connection: Any):
    async with run_site(serve_acked=True) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged()
        await connection.execute("update uploads set expires_at = now()")

        answer = await caller.fetch(file_id)

    assert (answer.status, answer.json["code"]) == (404, "upload_gone")


# The list of unacknowledged files


async def test_unacknowledged_files_are_listed_oldest_first(caller: Caller):
    first = await caller.staged(Part(b"1", name="one", mimetype="text/plain"))
    await caller.staged(Part(b"22", name="two"))
    third = await caller.staged(Part(b"333", name="three"))
    await caller.ack(third[0])

    listed = (await caller.waiting()).json

    assert [upload["name"] for upload in listed["uploads"]] == ["one", "two"]
    assert "next_after" not in listed
    (one, _) = listed["uploads"]
    created, expires = (datetime.fromisoformat(one[name]) for name in ("created_at", "expires_at"))
    assert expires - created == timedelta(days=1)
    assert one == {
        "file_id": first[0],
        "uri": f"platform-pending:{caller.id}/{first[0]}",
        "name": "one",
        "mimeType": "text/plain",
        "size": 1,
        "sha256": hashlib.sha256(b"1").hexdigest(),
        "created_at": one["created_at"],
        "fetched_at": None,
        "expires_at": one["expires_at"],
        "display_name": "one",
        "source_id": None,
    }


async def test_pages_have_every_unacknowledged_file_once(caller: Caller):
    """Files of one request have the same time; a page may end between them."""
    staged = {file_id for _ in range(3) for file_id in await caller.staged(Part(), Part(), Part())}
    seen: list[str] = []
    page = (await caller.waiting(limit=2)).json
    while True:
        seen += [upload["file_id"] for upload in page["uploads"]]
        if "next_after" not in page:
            break
        page = (await caller.waiting(limit=2, after=page["next_after"])).json

    assert len(seen) == 9
    assert set(seen) == staged


async def test_files_may_be_acknowledged_between_pages(caller: Caller):
    await caller.staged(*[Part()] * 5)
    seen: list[str] = []
    page = (await caller.waiting(limit=2)).json
    while True:
        for upload in page["uploads"]:
            seen.append(upload["file_id"])
            await caller.ack(upload["file_id"])
        if "next_after" not in page:
            break
        page = (await caller.waiting(limit=2, after=page["next_after"])).json

    assert len(set(seen)) == 5


async def test_expired_files_are_not_listed(caller: Caller, connection: Any):
    await caller.staged()
    await connection.execute("update uploads set expires_at = now()")

    assert (await caller.waiting()).json == {"uploads": []}


async def test_a_malformed_or_unknown_page_is_refused(caller: Caller):
    other = await registered(caller.site)
    (others,) = await other.staged()

    unknown, another = await caller.waiting(after=uuid4()), await caller.waiting(after=others)
    assert unknown.status == another.status == 404
    assert unknown.body == another.body
    for query in ({"limit": 0}, {"limit": 501}, {"limit": "x"}, {"after": "x"}, {"after": "null"}):
        answer = await caller.waiting(**query)
        assert answer.status == 400
        assert next(iter(query)) in answer.json["error"]
