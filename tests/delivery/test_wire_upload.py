"""Uploads over HTTP: what is accepted, from whom, what is stored, and what is logged."""

import hashlib
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from uuid import UUID, uuid4

import pytest
import structlog
from callers import (
    ADMIN,
    FORM,
    Caller,
    Part,
    ask,
    bearer,
    everything,
    form,
    pattern,
    registered,
    upload_head,
    wire_to,
)
from sites import ADMIN_TOKEN, Site, SiteFactory
from waiting import until

from restante.delivery.rules import MAX_FILE_BYTES, MIB

pytestmark = pytest.mark.anyio


async def test_accepted_files_are_listed_in_the_order_of_their_parts(caller: Caller):
    parts = [Part(bytes([65 + n]) * (n + 1), name=f"{9 - n}.bin") for n in range(9)]

    answer = await caller.upload(*parts)

    assert answer.status == 200
    files = answer.json["files"]
    assert [(file["name"], file["size"]) for file in files] == [
        (part.name, len(part.content)) for part in parts
    ]
    for file, part in zip(files, parts, strict=True):
        assert set(file) == {"uri", "name", "display_name", "mimeType", "size"}
        scheme, _, rest = file["uri"].partition(":")
        workspace_id, _, file_id = rest.partition("/")
        assert (scheme, workspace_id, str(UUID(file_id))) == (
            "platform-pending",
            caller.id,
            file_id,
        )
        assert (await caller.fetch(file_id)).body == part.content


async def test_the_canvas_uploads_with_the_admin_token(caller: Caller):
    answer = await ask(
        caller.site,
        "POST",
        f"{caller.path}/chat/uploads",
        data=form(Part()),
        headers={**ADMIN, "Content-Type": FORM},
    )

    assert answer.status == 200
    assert len(await caller.feed()) == 1


async def test_parts_with_other_names_are_ignored(caller: Caller):
    answer = await caller.upload(
        Part(b"a field", name=None, field="comment", mimetype=None),
        Part(b"kept", name="kept.txt"),
        Part(b"not ours", name="other.txt", field="file"),
    )

    assert [file["name"] for file in answer.json["files"]] == ["kept.txt"]
    assert len(await caller.feed()) == 1


async def test_names_are_cleaned_by_the_rule(caller: Caller):
    long_stem, long_extension = "s" * 120 + ".tar.gz", "s" * 90 + "." + "e" * 16
    names = {
        "report.pdf": "report.pdf",
        "my report (final).pdf": "my_report__final_.pdf",
        "../../etc/passwd": "passwd",
        "/abs/path/x.txt": "x.txt",
        "a/b/": "file",
        ".": "file",
        "..": "file",
        "...": "...",
        "a\\b.txt": "a_b.txt",
        "C:\\dir\\a.txt": "C__dir_a.txt",
        "na\u00efve \u202eexe.txt": "na_ve__exe.txt",
        "tab\there": "tab_here",
        long_stem: "s" * 97 + ".gz",
        long_extension: "s" * 90 + "." + "e" * 9,
        "x" * 101: "x" * 100,
        "y" * 100: "y" * 100,
        ".hidden": ".hidden",
    }

    answer = await caller.upload(*(Part(name=name) for name in names))

    cleaned = list(names.values())
    assert [file["name"] for file in answer.json["files"]] == cleaned
    rows = await caller.feed()
    assert [row["request_body"]["name"] for row in reversed(rows)] == cleaned
    assert [row["summary"] for row in reversed(rows)] == [
        f"chat_upload_receive: {name}" for name in cleaned
    ]


async def test_the_name_for_people_is_everywhere_beside_the_name(caller: Caller, connection: Any):
    shown = "Übersicht «2030» 👩‍💻.pdf"
    file_id, plain = await caller.staged(Part(name=f"C:\\dir\\{shown}"), Part(name="plain.txt"))

    rows = await caller.feed()
    listed = (await caller.waiting()).json["uploads"]
    fetched = await caller.fetch(file_id)
    stored = "select display_name from uploads where file_id = $1"

    assert [row["request_body"]["display_name"] for row in rows] == ["plain.txt", shown]
    names = {upload["file_id"]: upload["display_name"] for upload in listed}
    assert names == {file_id: shown, plain: "plain.txt"}
    assert fetched.headers["Content-Disposition"] == (
        'attachment; filename="C__dir__bersicht__2030_____.pdf"; '
        f"filename*=UTF-8''{quote(shown, safe='')}"
    )
    assert await connection.fetchval(stored, file_id) == shown
    assert await connection.fetchval(stored, plain) is None


async def test_a_repeated_request_gets_the_name_for_people_again(caller: Caller):
    first = await caller.upload(Part(name="a b.txt"), Idempotency_Key="a key")
    second = await caller.upload(Part(name="a b.txt"), Idempotency_Key="a key")

    assert first.json["files"][0]["display_name"] == "a b.txt"
    assert second.json == first.json


async def test_an_answer_of_the_previous_release_is_repeated_as_it_was(
    caller: Caller, connection: Any
):
    """It has no name for people."""
    first = await caller.upload(Part(), Idempotency_Key="a key")
    await connection.execute(
        "update answers set answer = replace(answer::text, ',\"display_name\":\"a.txt\"', '')::json"
    )

    again = await caller.upload(Part(), Idempotency_Key="a key")

    (file,) = first.json["files"]
    assert again.json == {"files": [{k: v for k, v in file.items() if k != "display_name"}]}


async def test_a_reopened_file_is_announced_with_its_name_for_people(caller: Caller):
    (file_id,) = await caller.staged(Part(name="a b.txt"))
    await caller.ack(file_id)

    assert (await caller.ask("POST", f"/pending-uploads/{file_id}/reopen")).status == 200

    first, second = await caller.feed()
    assert first["request_body"] == second["request_body"]


async def test_a_workspace_that_names_itself_is_the_source_of_its_files(caller: Caller):
    """So that its own poller can tell what it has sent to its user."""
    for spelling in (caller.id, caller.id.upper()):
        assert (await caller.upload(Part(), X_Workspace_ID=spelling)).status == 200
    await caller.staged()
    await ask(
        caller.site,
        "POST",
        f"{caller.path}/chat/uploads",
        data=form(Part()),
        headers={**ADMIN, "Content-Type": FORM, "X-Workspace-ID": caller.id},
    )

    sources = [row["source_id"] for row in await caller.feed()]
    assert sources == [None, None, caller.id, caller.id]


async def test_a_workspace_that_names_another_is_refused(caller: Caller, connection: Any):
    other = await registered(caller.site)

    for claimed in (other.id, str(uuid4()), "x"):
        answer = await caller.upload(Part(), X_Workspace_ID=claimed)
        assert (answer.status, answer.json["code"]) == (401, "not_authenticated")
    await assert_nothing_stored(connection)


async def test_types_are_cleaned_by_the_rule(caller: Caller):
    types = {
        "text/plain": "text/plain",
        "text/html; charset=utf-8": "text/html",
        "  image/png  ;x=y": "image/png",
        "IMAGE/PNG": "IMAGE/PNG",
        "": "",
        ";charset=x": "",
        "nonsense": "application/octet-stream",
        "a/b/c": "application/octet-stream",
        "/b": "application/octet-stream",
        "a/": "application/octet-stream",
        "text/pl ain": "application/octet-stream",
        "t\u00ebxt/plain": "application/octet-stream",
        "a/" + "b" * 253: "a/" + "b" * 253,
        "a/" + "b" * 254: "application/octet-stream",
    }

    answer = await caller.upload(*(Part(mimetype=given) for given in types), Part(mimetype=None))

    cleaned = [*types.values(), ""]
    assert [file["mimeType"] for file in answer.json["files"]] == cleaned
    rows = await caller.feed()
    assert [row["request_body"]["mimeType"] for row in reversed(rows)] == cleaned


async def test_every_file_has_its_row_and_its_bytes(caller: Caller, connection: Any):
    contents = [pattern(size, size) for size in (1, 262_143, 262_144, 262_145, 3 * MIB + 17)]

    ids = await caller.staged(*(Part(content) for content in contents))

    for file_id, content in zip(ids, contents, strict=True):
        row = await connection.fetchrow("select * from uploads where file_id = $1", file_id)
        assert (row["size"], row["sha256"]) == (len(content), hashlib.sha256(content).digest())
        assert row["expires_at"] - row["created_at"] == timedelta(days=1)
        assert (row["fetched_at"], row["acked_at"]) == (None, None)
        assert (await caller.fetch(file_id)).body == content
    assert await connection.fetchval("select last_seq from feeds") == len(ids)


@pytest.mark.parametrize("ttl", [60, 604_800])
async def test_a_sender_chooses_how_long_its_files_are_kept(
    caller: Caller, connection: Any, ttl: int
):
    headers = {"Content-Type": FORM}
    path = f"/chat/uploads?ttl_seconds={ttl}"

    answer = await caller.ask("POST", path, data=form(Part()), headers=headers)

    assert answer.status == 200
    kept = await connection.fetchval("select expires_at - created_at from uploads")
    assert kept == timedelta(seconds=ttl)


async def assert_nothing_stored(connection: Any) -> None:
    stored = await everything(connection)
    assert stored["uploads"] == stored["feed"] == stored["answers"] == stored["reservations"] == []
    assert all(set(row[1:]) == {0} for row in stored["feeds"])


async def test_an_unknown_workspace_is_a_404_and_a_bad_id_a_400(site: Site):
    for workspace_id, status in (
        (str(uuid4()), 404),
        ("nobody", 400),
        (f"{uuid4()}0", 400),
        (uuid4().hex, 404),
    ):
        answer = await ask(
            site,
            "POST",
            f"/workspaces/{workspace_id}/chat/uploads",
            data=form(Part()),
            headers={**ADMIN, "Content-Type": FORM},
        )
        assert answer.status == status
        assert status == 404 or answer.json["error"] == "invalid workspace ID"


async def test_an_upload_needs_the_token_of_the_workspace_or_of_the_admin(
    caller: Caller, connection: Any
):
    other = await registered(caller.site)

    for headers in ({}, bearer("x"), bearer(other.token)):
        answer = await ask(
            caller.site,
            "POST",
            f"{caller.path}/chat/uploads",
            data=form(Part()),
            headers={**headers, "Content-Type": FORM},
        )
        assert (answer.status, answer.json["code"]) == (401, "not_authenticated")
    await assert_nothing_stored(connection)


async def test_with_staging_off_an_upload_to_a_poll_workspace_is_a_422(
    run_site: SiteFactory, connection: Any
):
    async with run_site(staging=False) as site:
        caller = await registered(site)
        with structlog.testing.capture_logs() as logged:
            answer = await caller.upload(Part())
        await assert_nothing_stored(connection)

    assert (answer.status, answer.json["code"]) == (422, "workspace_has_no_callback")
    assert answer.json["error"] == "workspace has no callback URL"
    assert "upload_refused" in [line["event"] for line in logged]


async def test_an_upload_to_a_push_workspace_without_a_url_is_the_same_422(
    caller: Caller, connection: Any
):
    await connection.execute("update workspaces set delivery_mode = 'push', url = null")

    answer = await caller.upload(Part())

    assert (answer.status, answer.json["error"]) == (422, "workspace has no callback URL")


async def test_a_sender_that_disconnects_leaves_nothing(caller: Caller, connection: Any):
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller, 20 * MIB))
        await wire.send(form(Part(pattern(6 * MIB)), closed=False))
        await until(lambda: connection.fetchval("select count(*) from reservations"))
        wire.close()

    await until(lambda: connection.fetchval("select count(*) = 0 from reservations"))
    await assert_nothing_stored(connection)


async def test_files_find_their_bucket_after_the_width_was_changed(run_site: SiteFactory):
    """A wider bucket may begin before the first of the narrow ones."""
    async with run_site(bucket_seconds=600) as site:
        caller = await registered(site)
        (narrow,) = await caller.staged(Part(b"narrow"))

    async with run_site(bucket_seconds=86_400) as site:
        caller = Caller(site, caller.id, caller.token)
        (wide,) = await caller.staged(Part(b"wide"))

        assert (await caller.fetch(narrow)).body == b"narrow"
        assert (await caller.fetch(wide)).body == b"wide"


# Logs


@pytest.fixture
async def logged(caller: Caller) -> AsyncIterator[list[Any]]:
    """What is logged after the workspace was registered."""
    with structlog.testing.capture_logs() as lines:
        yield lines


def named(lines: list[Any], event: str) -> list[dict[str, Any]]:
    extra = {"event", "log_level", "request_id"}
    return [
        {key: value for key, value in line.items() if key not in extra}
        for line in lines
        if line["event"] == event
    ]


async def test_every_change_of_state_is_logged_with_its_file(caller: Caller, logged: list[Any]):
    (file_id,) = await caller.staged(Part(b"the-secret-content", name="a b.txt"))
    await caller.fetch(file_id)
    await until(lambda: named(logged, "upload_fetched"))
    await caller.ack(file_id)
    await caller.ack(file_id)

    facts = {"workspace": caller.id, "file": file_id, "size": 18, "name": "a_b.txt"}
    for event in ("upload_staged", "upload_fetched", "upload_acked"):
        assert named(logged, event) == [facts], event


async def test_a_refusal_is_logged_with_its_reason(caller: Caller, logged: list[Any]):
    await caller.upload(Part(b"", name="e e"))
    await caller.upload(Part(bytes(MAX_FILE_BYTES + 1), name="big one"))

    empty, large = named(logged, "upload_refused")
    assert empty == {"workspace": caller.id, "code": "upload_malformed", "filename": "e_e"}
    assert large == {
        "workspace": caller.id,
        "code": "file_too_large",
        "filename": "big_one",
        "size": MAX_FILE_BYTES + 1,
        "max": MAX_FILE_BYTES,
    }


async def test_neither_tokens_nor_contents_are_logged(caller: Caller, logged: list[Any]):
    (file_id,) = await caller.staged(Part(b"the-secret-content"))
    await caller.upload(Part(b"the-secret-content"), Part(b""), Idempotency_Key="the-key")
    await caller.fetch(file_id)
    await caller.fetch(file_id, Authorization="Bearer the-wrong-token")
    await caller.ack(file_id)

    assert len(logged) > 5
    for secret in ("the-secret-content", caller.token, ADMIN_TOKEN, "the-wrong-token"):
        assert secret not in str(logged)
