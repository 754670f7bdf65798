"""The asyncio client against servers that fail, lie, hang or never stop sending."""

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pushes
import pytest
from aiohttp import web
from callers import Caller, registered
from impostors import Answering, Asked, Impostor, http, impostor, one_after_another, relay
from sites import Site, SiteFactory

from restante import wire
from restante.client import AsyncClient, Bytes, Cursor, Limits, calls
from restante.client.connection import DEFAULT_LIMITS
from restante.errors import (
    AnswerInvalid,
    FileUnreadable,
    NotAuthenticated,
    NotReady,
    OutcomeUnknown,
    RestanteError,
    ServerRefused,
    ServerUnreachable,
    TooManyAtOnce,
    TooManyMessages,
    UploadGone,
)
from restante.ids import FileId

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_delays")]

TOKEN = "a-secret-token"
FILE = FileId(uuid4())
NOT_READY = http(503, {"error": "Not yet.", "code": "not_ready"})
OK = http(200, {"status": "ok"})

Use = Callable[[AsyncClient], Awaitable[Any]]


@asynccontextmanager
async def talking_to(
    answering: Answering, limits: Limits = DEFAULT_LIMITS
) -> AsyncIterator[tuple[Impostor, AsyncClient]]:
    async with (
        impostor(answering) as other,
        AsyncClient(other.url, token=TOKEN, workspace_id=uuid4(), limits=limits) as client,
    ):
        yield other, client


async def listed(client: AsyncClient) -> list[Any]:
    return [upload async for upload in client.pending()]


async def fetched(client: AsyncClient) -> None:
    async with client.fetch(FILE):
        pass


async def sent(client: AsyncClient) -> None:
    await client.send_files(client.workspace_id, [Bytes("a", b"x")])


REPEATABLE: dict[str, tuple[Use, Any]] = {
    "heartbeat": (lambda client: client.heartbeat(), {"status": "ok"}),
    "feed": (lambda client: client.feed(Cursor(3)), []),
    "acknowledge_feed": (lambda client: client.acknowledge_feed(3), {"acked_seq": 3}),
    "pending": (listed, {"uploads": []}),
    "acknowledge": (lambda client: client.acknowledge(FILE), {"acked": True}),
    "send_files": (sent, {"files": []}),
    "send_message": (
        lambda client: client.send_message(client.workspace_id, "hello"),
        {"status": "queued"},
    ),
}
ONCE: dict[str, Use] = {
    "register": lambda client: client.register("laptop"),
    "rename": lambda client: client.rename("laptop"),
    "reopen": lambda client: client.reopen(FILE),
    "send_message": lambda client: client.send_message(client.workspace_id, {"method": "x"}),
    "reply": lambda client: client.send(calls.notify(client.workspace_id, "hello", [])),
}


# Retries


@pytest.mark.parametrize("name", REPEATABLE)
@pytest.mark.parametrize("failure", [None, NOT_READY, http(502, b"<html>")], ids=["cut", "", "502"])
async def test_an_idempotent_request_is_retried(name: str, failure: bytes | None):
    """Callers do not notice a server restart."""
    use, answer = REPEATABLE[name]

    async with talking_to(one_after_another(failure, failure, failure, http(200, answer))) as (
        other,
        client,
    ):
        await use(client)

    assert len(other.asked) == 4
    assert len({(asked.method, asked.target, asked.body) for asked in other.asked}) == 1


@pytest.mark.parametrize("name", REPEATABLE)
async def test_retries_stop_after_four_attempts(name: str):
    async with talking_to(lambda _: NOT_READY) as (other, client):
        with pytest.raises(NotReady, match="Not yet"):
            await REPEATABLE[name][0](client)

    assert len(other.asked) == 4


@pytest.mark.parametrize("failure", [None, NOT_READY], ids=["cut", "not_ready"])
@pytest.mark.parametrize("name", ONCE)
async def test_a_request_that_is_not_idempotent_is_sent_once(name: str, failure: bytes | None):
    """The first one may have arrived."""
    async with talking_to(lambda _: failure) as (other, client):
        with pytest.raises(ServerUnreachable if failure is None else NotReady):
            await ONCE[name](client)

    assert len(other.asked) == 1


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (http(401, {"error": "No.", "code": "not_authenticated"}), NotAuthenticated),
        (http(404, {"error": "Gone.", "code": "upload_gone"}), UploadGone),
        (http(418), ServerRefused),
        (http(200, b"not json"), AnswerInvalid),
        (http(200, {"status": 7}), AnswerInvalid),
        (http(302, Location="http://127.0.0.1:1/"), AnswerInvalid),
        (b"SSH-2.0-OpenSSH_9.7\r\n\r\n", AnswerInvalid),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", AnswerInvalid),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\x1b[2J\r\n\r\n{}", AnswerInvalid),
    ],
    ids=["401", "404", "418", "text", "shape", "redirect", "ssh", "two lengths", "no length"],
)
async def test_a_permanent_failure_is_not_retried(said: bytes, error: type[RestanteError]):
    async with talking_to(lambda _: said) as (other, client):
        with pytest.raises(error) as caught:
            await client.heartbeat()

    assert len(other.asked) == 1
    assert str(caught.value).isprintable()


async def test_an_unreachable_server_is_reported_with_the_reason():
    async with talking_to(lambda _: OK) as (other, _):
        pass

    async with AsyncClient(other.url, workspace_id=uuid4()) as client:
        with pytest.raises(ServerUnreachable) as caught:
            await client.heartbeat()

    assert str(caught.value) == f"{other.url} cannot be reached: Connection refused."


async def test_a_silent_server_times_out():
    """Without a timeout, a connection that a firewall dropped would never end."""
    over = asyncio.Event()

    async def silent(_: Asked) -> bytes:
        await over.wait()
        return OK

    async with talking_to(silent, Limits(read_timeout_seconds=0.05)) as (_, client):
        with pytest.raises(ServerUnreachable, match="in time"):
            await client.heartbeat()
        over.set()


async def test_the_read_timeout_starts_after_the_requested_wait():
    """A long poll is not a silent server."""
    over = asyncio.Event()

    async def silent(asked: Asked) -> bytes:
        await over.wait()
        return http(200, [])

    async with talking_to(silent, Limits(read_timeout_seconds=0.05)) as (_, client):
        call = calls.feed(client.workspace_id, Cursor(), wait_seconds=30, limit=1)
        waiting = asyncio.ensure_future(client.send(call, attempts=1))
        with pytest.raises(ServerUnreachable):
            await client.heartbeat()
        over.set()

        assert not (await waiting).rows


# Lost answers


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


@asynccontextmanager
async def losing_the_first_answer(
    caller: Caller | pushes.Workspace, site: Site
) -> AsyncIterator[tuple[Impostor, AsyncClient]]:
    """A relay to the server that drops the first answer."""
    pass_on = relay(site)
    answers: list[bytes] = []

    async def lose(asked: Asked) -> bytes | None:
        answers.append(await pass_on(asked))
        return None if len(answers) == 1 else answers[-1]

    async with (
        impostor(lose) as line,
        AsyncClient(line.url, token=caller.token, workspace_id=UUID(str(caller.id))) as client,
    ):
        yield line, client


async def test_files_whose_answer_was_lost_are_stored_once(caller: Caller):
    """The server recognizes the retry by its idempotency key."""
    async with losing_the_first_answer(caller, caller.site) as (line, client):
        accepted = await client.send_files(client.workspace_id, [Bytes("a", b"x")])

    keys = {asked.headers["Idempotency-Key"] for asked in line.asked}
    (waiting,) = (await caller.waiting()).json["uploads"]
    assert len(line.asked) == 2
    assert len(keys) == 1
    assert accepted[0].uri == waiting["uri"]


async def test_sending_the_same_file_twice_makes_two_files(caller: Caller):
    async with AsyncClient(caller.site.url, token=caller.token) as client:
        for _ in range(2):
            await client.send_files(UUID(caller.id), [Bytes("a", b"x")])

    assert len((await caller.waiting()).json["uploads"]) == 2


async def test_a_message_whose_answer_was_lost_is_stored_once(caller: Caller):
    async with losing_the_first_answer(caller, caller.site) as (_, client):
        with pytest.raises(ServerUnreachable):
            await client.send_message(client.workspace_id, {"method": "tasks/get"})

    assert len(await caller.feed()) == 1


def messaged(client: AsyncClient) -> Awaitable[Any]:
    return client.send_message(client.workspace_id, "Pay the bill.")


@pytest.mark.parametrize("use", [messaged, sent])
async def test_a_push_workspace_is_called_once_although_the_answer_was_lost(
    run_site: SiteFactory, use: Use
):
    """An agent that acts would act again."""
    calls_seen: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        calls_seen.append(await request.read())
        return web.json_response({"files": []})

    async with run_site(push_to_private=True) as site, pushes.receiver(take) as url:
        workspace = await pushes.registered(site, url)
        async with losing_the_first_answer(workspace, site) as (line, client):
            with pytest.raises(OutcomeUnknown, match="is not known"):
                await use(client)

    assert len(calls_seen) == 1
    assert [asked.headers.get(wire.ATTEMPT) for asked in line.asked] == [None, "2"]


@pytest.mark.parametrize(
    "refused",
    [
        ServerUnreachable("Nobody listens.", is_unsent=True),
        TooManyMessages("Slow down.", retry_after=0),
        TooManyAtOnce("One at a time.", retry_after=0),
    ],
    ids=lambda error: error.code,
)
async def test_a_server_that_has_done_nothing_gets_a_first_attempt(
    monkeypatch: pytest.MonkeyPatch, refused: RestanteError
):
    """A push workspace gets the message then."""
    async with talking_to(one_after_another(http(200, {}))) as (line, client):
        monkeypatch.setattr(client, "_outcome", failing_once(client._outcome, refused))
        await messaged(client)

    assert [asked.headers.get(wire.ATTEMPT) for asked in line.asked] == [None]


def failing_once(then: Callable[..., Awaitable[Any]], error: RestanteError) -> Any:
    errors = [error]

    async def outcome(*given: Any) -> Any:
        return errors.pop() if errors else await then(*given)

    return outcome


async def test_a_refused_connection_did_not_reach_the_server():
    async with AsyncClient("http://127.0.0.1:1", token=TOKEN, workspace_id=uuid4()) as client:
        with pytest.raises(ServerUnreachable) as caught:
            await messaged(client)

    assert caught.value.facts["may_have_arrived"] is False


# Endless and oversized answers


async def endless(status: int, sent: list[int]) -> AsyncIterator[bytes]:
    yield http(status, b"", Content_Length=None, Transfer_Encoding="chunked")
    while True:
        sent.append(4096)
        yield b"1000\r\n" + b" " * 4096 + b"\r\n"


@pytest.mark.parametrize("status", [200, 404, 503])
@pytest.mark.parametrize("use", [listed, fetched], ids=["json", "refused content"])
async def test_an_endless_answer_is_cut_off(status: int, use: Use):
    sent: list[int] = []

    async with talking_to(lambda _: endless(status, sent), Limits(max_answer_bytes=100_000)) as (
        _,
        client,
    ):
        with pytest.raises(AnswerInvalid):
            await use(client)

    assert sum(sent) < 20_000_000


async def test_a_slow_answer_is_cut_off():
    """A server that sends one byte now and then must not keep a request open for ever."""
    limits = Limits(slow_start_seconds=0, min_bytes_per_second=10**12, max_answer_bytes=10**12)

    async with talking_to(lambda _: endless(200, []), limits) as (_, client):
        with pytest.raises(AnswerInvalid, match="too slow"):
            await client.heartbeat()


async def test_a_compressed_answer_is_not_unpacked():
    """A few kilobytes could expand to 64 MiB."""
    bomb = gzip.compress(bytes(64 * 1024 * 1024))

    async with talking_to(lambda _: http(200, bomb, Content_Encoding="gzip")) as (_, client):
        tracemalloc.start()
        with pytest.raises(AnswerInvalid):
            await client.heartbeat()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert most < 8 * 1024 * 1024


# Files that change while they are sent


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big"
    path.write_bytes(bytes(3_000_000))
    return path


def truncated(path: Path) -> None:
    path.write_bytes(b"short")


@pytest.mark.parametrize("change", [truncated, Path.unlink], ids=["shorter", "gone"])
async def test_a_file_that_changes_while_it_is_sent_is_reported(
    caller: Caller, big: Path, tmp_path: Path, change: Callable[[Path], None]
):
    """Nothing is stored, and the error names the file, not the server."""
    second = tmp_path / "second"
    second.write_bytes(bytes(1_000_000))

    def meanwhile(sent: int) -> None:
        if sent == 1_000_000:
            change(second)

    async with AsyncClient(caller.site.url, token=caller.token) as client:
        with pytest.raises(FileUnreadable, match=str(second)):
            await client.send_files(UUID(caller.id), [second, big, second], progress=meanwhile)

    assert (await caller.waiting()).json["uploads"] == []


async def test_a_file_that_grows_is_sent_with_its_first_size(caller: Caller, big: Path):
    """Such as a log file."""

    def grow(_: int) -> None:
        with big.open("ab") as file:
            file.write(b"more")

    async with AsyncClient(caller.site.url, token=caller.token) as client:
        (accepted,) = await client.send_files(UUID(caller.id), [big], progress=grow)

    assert accepted.size == 3_000_000
