"""WIRE, Upload: files come in, within limits, all or none, once; and what that leaves behind."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
import structlog
from callers import (
    ADMIN,
    FORM,
    Answer,
    Caller,
    Part,
    ask,
    bearer,
    everything,
    form,
    pattern,
    registered,
    upload_head,
    waits_for_a_lock,
    wire_to,
)
from sites import ADMIN_TOKEN, Site, SiteFactory
from waiting import until

from restante.delivery import quota_store as quotas
from restante.delivery.rules import MAX_FILE_BYTES, MAX_REQUEST_BYTES

pytestmark = pytest.mark.anyio

MIB = 1024 * 1024


@pytest.fixture
async def caller(site: Site) -> Caller:
    return await registered(site)


@pytest.fixture
async def connection(connections: Any) -> Any:
    return await connections()


async def test_accepted_files_are_listed_in_the_order_of_their_parts(caller: Caller):
    parts = [Part(bytes([65 + n]) * (n + 1), name=f"{9 - n}.bin") for n in range(9)]

    answer = await caller.upload(*parts)

    assert answer.status == 200
    files = answer.json["files"]
    assert [(file["name"], file["size"]) for file in files] == [
        (part.name, len(part.content)) for part in parts
    ]
    for file, part in zip(files, parts, strict=True):
        assert set(file) == {"uri", "name", "mimeType", "size"}
        scheme, _, rest = file["uri"].partition(":")
        workspace_id, _, file_id = rest.partition("/")
        assert (scheme, workspace_id, str(UUID(file_id))) == (
            "platform-pending",
            caller.id,
            file_id,
        )
        assert (await caller.fetch(file_id)).body == part.content


async def test_the_canvas_uploads_with_the_admins_token(caller: Caller):
    answer = await ask(
        caller.site,
        "POST",
        f"{caller.path}/chat/uploads",
        data=form(Part()),
        headers={**ADMIN, "Content-Type": FORM},
    )

    assert answer.status == 200
    assert len(await caller.feed()) == 1


async def test_parts_of_other_names_are_read_over(caller: Caller):
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
        "": "file",
        ".": "file",
        "..": "file",
        "...": "...",
        "a\\b.txt": "a_b.txt",
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


async def test_types_are_cleaned_by_the_rule(caller: Caller):
    long_type = "application/" + "x" * 3000
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
        long_type: long_type,
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


async def assert_refused(
    caller: Caller, connection: Any, answer: Answer, status: int, code: str
) -> dict[str, Any]:
    """Refused in our shape, and all that was stored is as it was when nothing was."""
    assert (answer.status, answer.json["code"]) == (status, code), answer.body
    assert answer.json["error"].endswith((".", "URL"))
    await assert_nothing_stored(connection)
    return answer.json


async def assert_nothing_stored(connection: Any) -> None:
    now = await everything(connection)
    assert now["uploads"] == now["feed"] == now["answers"] == now["reservations"] == []
    assert all(set(row[1:]) == {0} for row in now["feeds"])


async def test_a_file_of_exactly_25_mib_is_accepted(caller: Caller):
    content = pattern(MAX_FILE_BYTES)

    (file_id,) = await caller.staged(Part(content))

    assert (await caller.fetch(file_id)).body == content


async def test_a_file_of_one_byte_more_is_a_413_with_its_name_and_size(
    caller: Caller, connection: Any
):
    answer = await caller.upload(
        Part(b"fine", name="fine.txt"), Part(bytes(MAX_FILE_BYTES + 1), name="too large.bin")
    )

    refusal = await assert_refused(caller, connection, answer, 413, "file_too_large")
    assert refusal["filename"] == "too_large.bin"
    assert (refusal["size"], refusal["max"]) == (MAX_FILE_BYTES + 1, MAX_FILE_BYTES)


async def test_two_files_of_25_mib_fill_a_request_exactly(caller: Caller):
    answer = await caller.upload(Part(bytes(MAX_FILE_BYTES)), Part(bytes(MAX_FILE_BYTES)))

    assert [file["size"] for file in answer.json["files"]] == [MAX_FILE_BYTES] * 2


async def test_a_request_of_one_byte_more_is_a_413_with_the_limit(caller: Caller, connection: Any):
    half = Part(bytes(MAX_FILE_BYTES))

    answer = await caller.upload(half, half, Part(b"x"))

    refusal = await assert_refused(caller, connection, answer, 413, "request_too_large")
    assert refusal["max"] == MAX_REQUEST_BYTES


async def test_a_request_that_says_it_is_too_long_is_refused_before_it_is_sent(
    caller: Caller, connection: Any
):
    async with wire_to(caller.site) as wire:
        lines = [f"Content-Type: {FORM}", "Expect: 100-continue"]
        await wire.send(upload_head(caller, 10**12, lines=lines))
        answer = await wire.answer()

    refusal = await assert_refused(caller, connection, answer, 413, "request_too_large")
    assert refusal["max"] == MAX_REQUEST_BYTES


async def test_64_files_are_accepted_and_65_are_not(caller: Caller, connection: Any):
    answer = await caller.upload(*[Part(b"x")] * 65)
    refusal = await assert_refused(caller, connection, answer, 400, "too_many_files")
    assert refusal["max"] == 64

    assert len(await caller.staged(*[Part(b"x")] * 64)) == 64


async def test_an_empty_file_is_a_400_whatever_comes_with_it(caller: Caller, connection: Any):
    for parts in (
        [Part(b"")],
        [Part(b"good"), Part(b"", name="empty one")],
        [Part(b""), Part(b"good")],
    ):
        answer = await caller.upload(*parts)
        refusal = await assert_refused(caller, connection, answer, 400, "upload_malformed")
        assert "empty" in refusal["error"]


async def test_no_files_part_is_a_400(caller: Caller, connection: Any):
    for parts in ([], [Part(field="file")], [Part(field="Files")], [Part(field="")]):
        answer = await caller.upload(*parts)
        refusal = await assert_refused(caller, connection, answer, 400, "upload_malformed")
        assert "files" in refusal["error"] or "multipart" in refusal["error"]


async def test_a_malformed_body_is_a_400(caller: Caller, connection: Any):
    for body in (b"", b"hello", form(Part(), closed=False), form(Part())[:-30]):
        answer = await caller.send(body)
        await assert_refused(caller, connection, answer, 400, "upload_malformed")


async def test_refusals_do_not_keep_the_sender_waiting(caller: Caller):
    """A body that has arrived whole needs no time to be read to its end."""
    began = asyncio.get_running_loop().time()

    for parts in ([Part(b"")], [Part(field="x")], [Part(b"x")] * 65):
        assert (await caller.upload(*parts)).status == 400

    assert asyncio.get_running_loop().time() - began < 2


async def test_an_unknown_workspace_is_a_404_and_a_bad_id_a_400(site: Site):
    for workspace_id, status in ((str(uuid4()), 404), ("nobody", 400), (uuid4().hex, 400)):
        answer = await ask(
            site,
            "POST",
            f"/workspaces/{workspace_id}/chat/uploads",
            data=form(Part()),
            headers={**ADMIN, "Content-Type": FORM},
        )
        assert answer.status == status
        assert status == 404 or answer.json["error"] == "invalid workspace ID"


async def test_an_upload_needs_the_workspaces_or_the_admins_token(caller: Caller, connection: Any):
    other = await registered(caller.site)

    for headers in ({}, bearer("x"), bearer(other.token)):
        answer = await ask(
            caller.site,
            "POST",
            f"{caller.path}/chat/uploads",
            data=form(Part()),
            headers={**headers, "Content-Type": FORM},
        )
        await assert_refused(caller, connection, answer, 401, "not_authenticated")


async def test_with_staging_off_a_poll_workspace_gets_the_422(
    run_site: SiteFactory, connection: Any
):
    async with run_site(staging=False) as site:
        caller = await registered(site)
        with structlog.testing.capture_logs() as logged:
            answer = await caller.upload(Part())
        refusal = await assert_refused(caller, connection, answer, 422, "workspace_has_no_callback")

    assert refusal["error"] == "workspace has no callback URL"
    assert "upload_refused" in [line["event"] for line in logged]


async def test_a_push_workspace_without_a_url_gets_the_same_422(caller: Caller, connection: Any):
    await connection.execute("update workspaces set delivery_mode = 'push', url = null")

    answer = await caller.upload(Part())

    assert (answer.status, answer.json["error"]) == (422, "workspace has no callback URL")


async def test_a_sender_that_goes_away_leaves_nothing(caller: Caller, connection: Any):
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller, 20 * MIB))
        await wire.send(form(Part(pattern(6 * MIB)), closed=False))
        await until(lambda: connection.fetchval("select count(*) from reservations"))
        wire.close()

    await until(lambda: connection.fetchval("select count(*) = 0 from reservations"))
    await assert_nothing_stored(connection)


async def test_files_find_a_bucket_after_its_width_was_changed(run_site: SiteFactory):
    """A wider bucket begins before the first of the narrow ones."""
    async with run_site(bucket_seconds=600) as site:
        caller = await registered(site)
        (narrow,) = await caller.staged(Part(b"narrow"))

    async with run_site(bucket_seconds=86_400) as site:
        caller = Caller(site, caller.id, caller.token)
        (wide,) = await caller.staged(Part(b"wide"))

        assert (await caller.fetch(narrow)).body == b"narrow"
        assert (await caller.fetch(wide)).body == b"wide"


# ---- repeated requests


async def test_a_repeated_key_gets_the_first_answer_and_stores_nothing_again(
    caller: Caller, connection: Any
):
    parts = [Part(b"one"), Part(pattern(2 * MIB), name="two.bin")]

    first = await caller.upload(*parts, Idempotency_Key="k-1")
    before = await everything(connection)
    second = await caller.upload(*parts, Idempotency_Key="k-1")

    assert first.status == second.status == 200
    assert second.json == first.json
    assert await everything(connection) == before
    assert len(before["uploads"]) == 2


async def test_two_requests_with_one_key_at_once_store_once(caller: Caller, connection: Any):
    answers = await asyncio.gather(
        *(caller.upload(Part(b"x" * 100_000), Idempotency_Key="twin") for _ in range(6))
    )

    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert len((await everything(connection))["uploads"]) == 1
    assert len(await caller.feed()) == 1


async def test_a_twin_waits_for_the_first_to_commit(caller: Caller, connection: Any):
    """Both have passed the first look; the one that holds the key decides."""
    lock = connection.transaction()
    await lock.start()
    await connection.execute("select from feeds where workspace_id = $1 for update", caller.id)
    pair = [asyncio.create_task(caller.upload(Part(), Idempotency_Key="twin")) for _ in range(2)]
    await until(lambda: waits_for_a_lock(connection, 2))
    await lock.rollback()

    one, other = await asyncio.gather(*pair)

    assert one.status == other.status == 200
    assert one.body == other.body
    assert len(await caller.feed()) == 1


async def test_a_key_with_other_files_is_a_422(caller: Caller, connection: Any):
    await caller.upload(Part(b"one", name="a"), Idempotency_Key="k")
    before = await everything(connection)

    for parts in (
        [Part(b"two", name="a")],
        [Part(b"one", name="b")],
        [Part(b"one", name="a", mimetype="image/png")],
        [Part(b"one", name="a"), Part(b"more")],
    ):
        answer = await caller.upload(*parts, Idempotency_Key="k")
        assert (answer.status, answer.json["code"]) == (422, "key_reused")
    assert await everything(connection) == before


async def test_the_same_key_means_something_else_to_another_workspace(caller: Caller):
    other = await registered(caller.site)

    mine = await caller.upload(Part(b"mine"), Idempotency_Key="k")
    theirs = await other.upload(Part(b"theirs"), Idempotency_Key="k")

    assert (mine.status, theirs.status) == (200, 200)
    assert len(await other.feed()) == 1


async def test_a_refused_request_does_not_burn_its_key(run_site: SiteFactory, connection: Any):
    async with run_site(workspace_max_files=1) as site:
        caller = await registered(site)
        (waiting,) = await caller.staged()
        refused = await caller.upload(Part(b"later"), Idempotency_Key="k")
        await caller.upload(Part(b""), Idempotency_Key="e")
        assert (await everything(connection))["answers"] == []
        await caller.ack(waiting)

        accepted = await caller.upload(Part(b"later"), Idempotency_Key="k")

    assert (refused.status, accepted.status) == (429, 200)


async def test_a_key_is_forgotten_after_a_day(caller: Caller, connection: Any):
    first = await caller.upload(Part(), Idempotency_Key="k")
    await connection.execute("update answers set expires_at = now()")

    second = await caller.upload(Part(b"other"), Idempotency_Key="k")

    assert first.status == second.status == 200
    assert len(await caller.feed()) == 2


async def test_a_key_must_be_short_and_printable(caller: Caller, connection: Any):
    for key in ("", "k" * 256, "caf\u00e9"):
        answer = await caller.upload(Part(), Idempotency_Key=key)
        await assert_refused(caller, connection, answer, 400, "bad_request")
    assert (await caller.upload(Part(), Idempotency_Key="k" * 255)).status == 200


# ---- quotas


async def test_what_may_wait_for_a_workspace_is_bounded_to_the_byte(run_site: SiteFactory):
    async with run_site(workspace_max_bytes=1000) as site:
        caller = await registered(site)
        await caller.staged(Part(bytes(999)))

        too_much = await caller.upload(Part(b"xx"))
        just_right = await caller.upload(Part(b"x"))

    assert (too_much.status, just_right.status) == (429, 200)
    refusal = too_much.json
    assert refusal["code"] == "workspace_full"
    assert (refusal["waiting_bytes"], refusal["max_bytes"]) == (999, 1000)
    frees_at = datetime.fromisoformat(refusal["frees_at"])
    assert timedelta(hours=23) < frees_at - datetime.now(UTC) <= timedelta(days=1)


async def test_how_many_files_may_wait_is_bounded(run_site: SiteFactory, connection: Any):
    async with run_site(workspace_max_files=3) as site:
        caller = await registered(site)
        await caller.staged(Part(), Part())
        before = await everything(connection)

        too_many = await caller.upload(Part(), Part())
        after = await everything(connection)
        just_right = await caller.upload(Part())

    assert (too_many.status, just_right.status) == (429, 200)
    assert (too_many.json["waiting_files"], too_many.json["max_files"]) == (2, 3)
    assert after == before


async def test_one_workspaces_quota_is_not_anothers(run_site: SiteFactory):
    async with run_site(workspace_max_files=1) as site:
        full, other = await registered(site), await registered(site)
        await full.staged()

        assert (await full.upload(Part())).status == 429
        assert (await other.upload(Part())).status == 200


async def test_what_can_never_fit_is_a_413(run_site: SiteFactory, connection: Any):
    async with run_site(workspace_max_bytes=1000, workspace_max_files=2) as site:
        caller = await registered(site)
        for parts in ([Part(bytes(1001))], [Part(bytes(600))] * 2, [Part()] * 3):
            answer = await caller.upload(*parts)
            refusal = await assert_refused(caller, connection, answer, 413, "quota_too_small")
            assert refusal["max"] == 1000


@pytest.mark.parametrize("way", ["ack", "expiry"])
async def test_room_is_given_back(run_site: SiteFactory, connection: Any, way: str):
    async with run_site(workspace_max_files=1) as site:
        caller = await registered(site)
        (file_id,) = await caller.staged()
        assert (await caller.upload(Part())).status == 429

        if way == "ack":
            await caller.ack(file_id)
            await caller.ack(file_id)
        else:
            later = datetime.now(UTC) + timedelta(days=2)
            swept = await site.state.delivery.sweep(now=later)
            assert (swept.acked, swept.expired) == (0, 1)

        waiting = "select waiting_bytes, waiting_files from feeds"
        assert tuple(await connection.fetchrow(waiting)) == (0, 0)
        assert (await caller.upload(Part())).status == 200


async def test_sweeping_what_was_acknowledged_gives_nothing_back_twice(
    caller: Caller, connection: Any
):
    (acked, _) = await caller.staged(Part(b"12345"), Part(b"123"))
    await caller.ack(acked)
    later = datetime.now(UTC) + timedelta(hours=2)

    swept = await caller.site.state.delivery.sweep(now=later)

    assert (swept.acked, swept.expired) == (1, 0)
    usage = await connection.fetchrow("select waiting_bytes, waiting_files from feeds")
    assert tuple(usage) == (3, 1)


async def test_room_is_reserved_before_bytes_are_stored(run_site: SiteFactory, connection: Any):
    """Two senders that are both half-way cannot both be promised the same room."""
    async with run_site(workspace_max_bytes=10 * MIB) as site:
        caller = await registered(site)
        async with wire_to(site) as wire:
            await wire.send(upload_head(caller, 6 * MIB))
            await wire.send(form(Part(pattern(2 * MIB)), closed=False))
            await until(lambda: connection.fetchval("select count(*) from reservations"))
            usage = await connection.fetchrow("select reserved_bytes, waiting_bytes from feeds")

            second = await caller.upload(Part(pattern(6 * MIB)))
            small = await caller.upload(Part(b"small"))
            wire.close()

        assert tuple(usage) == (6 * MIB, 0)
        assert (second.status, second.json["code"]) == (429, "workspace_full")
        assert second.json["waiting_bytes"] >= 6 * MIB
        assert small.status == 200
        await until(lambda: connection.fetchval("select reserved_bytes = 0 from feeds"))
        assert (await caller.upload(Part(pattern(6 * MIB)))).status == 200


async def test_a_refusal_gives_its_reservation_back(caller: Caller, connection: Any):
    answer = await caller.upload(Part(pattern(3 * MIB)), Part(b""))

    await assert_refused(caller, connection, answer, 400, "upload_malformed")


async def test_a_commit_turns_the_reservation_into_what_waits(caller: Caller, connection: Any):
    await caller.staged(Part(pattern(5 * MIB)))

    usage = await connection.fetchrow(
        "select reserved_bytes, reserved_files, waiting_bytes, waiting_files from feeds"
    )
    assert tuple(usage) == (0, 0, 5 * MIB, 1)
    assert await connection.fetchval("select count(*) from reservations") == 0


async def test_what_a_killed_server_had_reserved_is_given_back(caller: Caller, connection: Any):
    await connection.execute("update feeds set reserved_bytes = 70, reserved_files = 1")
    await connection.execute(
        "insert into reservations values ($1, $2, now(), 70, 1, now() - interval '1 s')",
        uuid4(),
        UUID(caller.id),
    )

    forgotten = await caller.site.state.delivery.forget_expired(now=datetime.now(UTC))

    assert forgotten == 1
    await assert_nothing_stored(connection)


async def test_a_reservation_that_expires_during_the_commit_is_given_back_once(
    caller: Caller, connection: Any, connections: Any
):
    """The clean-up has released it and not committed yet; the publishing statement waits."""
    body = form(Part(pattern(3 * MIB)))
    async with wire_to(caller.site) as wire:
        await wire.send(upload_head(caller, len(body)) + body[:-10])
        await until(lambda: connection.fetchval("select count(*) from reservations"))
        clean_up = connection.transaction()
        await clean_up.start()
        reservation = await connection.fetchval("select id from reservations")
        await quotas.release(connection, reservation)
        await wire.send(body[-10:])
        watcher = await connections()
        await until(lambda: waits_for_a_lock(watcher))
        await clean_up.commit()

        answer = await wire.answer()

    assert answer.status == 408
    usage = await connection.fetchrow("select reserved_bytes, waiting_bytes from feeds")
    assert tuple(usage) == (0, 0)


async def test_the_whole_server_holds_no_more_than_it_may(run_site: SiteFactory, connection: Any):
    async with run_site(server_max_bytes=10_000) as site:
        one, other = await registered(site), await registered(site)
        await one.staged(Part(bytes(9_000)))
        before = await everything(connection)

        refused = await other.upload(Part(bytes(2_000)))

        assert (refused.status, refused.json["code"]) == (507, "server_full")
        assert refused.json["max_bytes"] == 10_000
        assert refused.json["waiting_bytes"] >= 9_000
        assert datetime.fromisoformat(refused.json["frees_at"]) > datetime.now(UTC)
        assert await everything(connection) == before


async def test_the_whole_server_holds_no_more_files_than_it_may(
    run_site: SiteFactory, connection: Any
):
    async with run_site(server_max_files=5) as site:
        one, other = await registered(site), await registered(site)
        await one.staged(Part(), Part(), Part())
        before = await everything(connection)

        refused = await other.upload(*[Part()] * 3)
        after = await everything(connection)
        just_right = await other.upload(*[Part()] * 2)

    assert (refused.status, refused.json["code"]) == (507, "server_full")
    assert after == before
    assert just_right.status == 200


async def test_a_full_server_has_room_again_after_an_ack(run_site: SiteFactory):
    async with run_site(server_max_files=1) as site:
        one, other = await registered(site), await registered(site)
        (file_id,) = await one.staged()
        assert (await other.upload(Part())).status == 507

        await one.ack(file_id)

        async def has_room() -> bool:
            return (await other.upload(Part())).status == 200

        await until(has_room)


async def test_many_at_once_do_not_fill_a_server_beyond_its_quota(
    run_site: SiteFactory, connection: Any
):
    """The first requests after a start come together, before anybody has read the sum."""
    async with run_site(server_max_files=4) as site:
        callers = [await registered(site) for _ in range(10)]

        answers = await asyncio.gather(*(one.upload(Part()) for one in callers))

    assert sorted(answer.status for answer in answers) == [200] * 4 + [507] * 6
    assert await connection.fetchval("select count(*) from uploads") == 4


# ---- logs


@pytest.fixture
async def logged(caller: Caller) -> AsyncIterator[list[Any]]:
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
    await until(lambda: asyncio.sleep(0, named(logged, "upload_fetched")))
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


async def test_neither_tokens_nor_contents_reach_the_log(caller: Caller, logged: list[Any]):
    (file_id,) = await caller.staged(Part(b"the-secret-content"))
    await caller.upload(Part(b"the-secret-content"), Part(b""), Idempotency_Key="the-key")
    await caller.fetch(file_id)
    await caller.fetch(file_id, Authorization="Bearer the-wrong-token")
    await caller.ack(file_id)

    assert len(logged) > 5
    for secret in ("the-secret-content", caller.token, ADMIN_TOKEN, "the-wrong-token"):
        assert secret not in str(logged)
