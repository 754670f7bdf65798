"""The SDK talks: texts with files, answers, and words for the user."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from callers import ADMIN_TOKEN, Caller, registered
from impostors import Asked, http, impostor, one_after_another, relay
from sites import Site

from restante.client import AsyncClient, BlockingMessage, Bytes, Client, MessageItem
from restante.errors import BadRequest, MessageTooLarge, ServerUnreachable, WorkspaceUnknown
from restante.wire import MAX_MESSAGE_BYTES

pytestmark = pytest.mark.anyio


@pytest.fixture
async def ana(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
async def bob(shared_site: Site) -> Caller:
    return await registered(shared_site)


@pytest.fixture
async def admin(shared_site: Site) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(shared_site.url, token=ADMIN_TOKEN) as client:
        yield client


def client_of(caller: Caller, url: str = "") -> AsyncClient:
    return AsyncClient(url or caller.site.url, token=caller.token, workspace_id=UUID(caller.id))


async def messages(client: AsyncClient) -> list[MessageItem]:
    return [item async for item in client.inbox(once=True) if isinstance(item, MessageItem)]


def sent_in(row: dict[str, Any]) -> dict[str, Any]:
    return row["request_body"]["params"]["message"]


@asynccontextmanager
async def losing_answers(caller: Caller, path: str, times: int = 1) -> AsyncIterator[AsyncClient]:
    """A client whose first requests to a path are processed, and their answers lost."""
    pass_on, lost = relay(caller.site), list[str]()

    async def answering(asked: Asked) -> bytes | None:
        answer = await pass_on(asked)
        if asked.path.endswith(path) and len(lost) < times:
            lost.append(asked.path)
            return None
        return answer

    async with impostor(answering) as line, client_of(caller, line.url) as client:
        yield client
    assert len(lost) == times


# Messages


async def test_a_text_becomes_a_message(ana: Caller, bob: Caller, admin: AsyncClient):
    """Of the user with the admin token, of a workspace with its own."""
    async with client_of(bob) as client:
        answer = await client.send_message(UUID(ana.id), "hello", context_id="c")
    await admin.send_message(UUID(ana.id), "good morning")

    second, first = await ana.feed()
    assert answer == {"status": "queued", "delivery_mode": "poll", "method": "message/send"}
    assert (first["source_id"], second["source_id"]) == (bob.id, None)
    message = sent_in(first)
    assert (message["role"], message["contextId"]) == ("user", "c")
    assert message["parts"] == [{"kind": "text", "text": "hello"}]
    assert UUID(message["messageId"])
    assert "contextId" not in sent_in(second)


async def test_files_travel_in_a_message_or_are_referred_to(ana: Caller, admin: AsyncClient):
    [staged] = await admin.send_files(UUID(ana.id), [Bytes("plan.txt", b"p", "text/plain")])
    files = [Bytes("../Größe.bin", b"\0\1")]

    await admin.send_message(UUID(ana.id), "See", files=files, attachments=[staged])

    _, inline, referred = sent_in((await ana.feed())[0])["parts"]
    content = base64.b64encode(b"\0\1").decode()
    kind = "application/octet-stream"
    assert inline == {
        "kind": "file",
        "file": {"name": "Größe.bin", "mimeType": kind, "bytes": content},
    }
    assert referred["file"] == {
        "uri": staged.uri,
        "name": "plan.txt",
        "mimeType": "text/plain",
        "size": 1,
    }


async def test_a_message_is_queued_once_however_often_its_answer_is_lost(
    ana: Caller, no_delays: None
):
    async with losing_answers(ana, "/a2a", times=3) as client:
        answer = await client.send_message(UUID(ana.id), "hello")

    assert answer["status"] == "queued"
    assert len(await ana.feed()) == 1


async def test_the_same_text_twice_is_two_messages(ana: Caller, admin: AsyncClient):
    for _ in range(2):
        await admin.send_message(UUID(ana.id), "hello")
    for _ in range(2):
        await admin.send_message(UUID(ana.id), "once", message_id="m")

    assert len(await ana.feed()) == 3


@pytest.mark.parametrize("text", ["", " \n", "\ud800"])
async def test_a_text_that_says_nothing_is_not_sent(ana: Caller, text: str):
    async with client_of(ana) as client:
        with pytest.raises(BadRequest):
            await client.send_message(UUID(ana.id), text)
        with pytest.raises(BadRequest):
            await client.notify(text)

    assert await ana.feed() == []


async def test_what_is_too_large_for_a_message_is_not_read(ana: Caller, tmp_path: Any):
    """Base64 needs a third more than the file."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_MESSAGE_BYTES // 4 * 3 + 3)

    async with client_of(ana) as client:
        with pytest.raises(MessageTooLarge, match="16777216"):
            await client.send_message(UUID(ana.id), "See", files=[tmp_path / "large"])
        with pytest.raises(MessageTooLarge, match="16777216"):
            await client.send_message(UUID(ana.id), "x" * MAX_MESSAGE_BYTES)

    assert await ana.feed() == []


async def test_files_do_not_go_with_a_whole_request(ana: Caller):
    """They would be lost silently."""
    body = {"method": "message/send", "params": {"message": {"parts": [{"text": "x"}]}}}
    async with client_of(ana) as client:
        with pytest.raises(BadRequest):
            await client.send_message(UUID(ana.id), body, files=[Bytes("a", b"x")])


async def test_the_answer_of_a_push_workspace_is_returned(ana: Caller):
    result = {"kind": "message", "role": "agent", "parts": [{"kind": "text", "text": "hi"}]}
    async with (
        impostor(one_after_another(http(200, {"jsonrpc": "2.0", "result": result}))) as other,
        client_of(ana, other.url) as client,
    ):
        assert (await client.send_message(UUID(ana.id), "hello"))["result"] == result


# Answers


async def test_a_message_of_the_canvas_is_answered_to_the_user(ana: Caller, admin: AsyncClient):
    """Its files wait for the user, who fetches them with the admin token."""
    await admin.send_message(UUID(ana.id), "hello")
    async with client_of(ana) as client:
        (item,) = await messages(client)
        assert (item.text, item.is_answerable) == ("hello", True)
        await item.reply("Done.", files=[Bytes("a b.txt", b"result", "text/plain")])
        assert await messages(client) == []

    said, file, _ = await ana.feed()
    assert (said["method"], said["response_body"]["result"]) == ("notify", "Done.")
    assert (file["method"], file["source_id"]) == ("chat_upload_receive", ana.id)
    assert said["response_body"]["parts"][0]["file"]["uri"] == file["request_body"]["uri"]
    assert said["response_body"]["parts"][0]["file"]["name"] == "a b.txt"


async def test_a_message_of_a_workspace_is_answered_to_it(ana: Caller, bob: Caller):
    """In the same conversation, and so that it is not answered again."""
    async with client_of(ana) as client, client_of(bob) as other:
        await other.send_message(UUID(ana.id), "hello", context_id="talk")
        (item,) = await messages(client)
        for _ in range(2):
            await item.reply("HELLO", files=[Bytes("a", b"x")], message_id="m")
        (answer,) = await messages(other)

    assert (answer.text, answer.is_answerable) == ("HELLO", False)
    message = answer.body["params"]["message"]
    assert (message["role"], message["contextId"], message["messageId"]) == ("agent", "talk", "m")
    assert message["parts"][1]["file"]["bytes"] == base64.b64encode(b"x").decode()
    assert [row["method"] for row in await ana.feed()] == ["message/send"]


async def test_an_answer_to_nobody_is_an_error(ana: Caller, bob: Caller):
    async with client_of(ana) as client, client_of(bob) as other:
        await other.send_message(UUID(ana.id), "hello")
        await bob.ask("DELETE", "", params={"confirm": "true"})
        (item,) = await messages(client)
        with pytest.raises(WorkspaceUnknown):
            await item.reply("HELLO")


async def test_programs_without_a_loop_answer_too(ana: Caller, admin: AsyncClient):
    await admin.send_message(UUID(ana.id), "hello")

    def program() -> None:
        with Client(ana.site.url, token=ana.token, workspace_id=UUID(ana.id)) as client:
            for item in client.inbox(once=True):
                assert isinstance(item, BlockingMessage)
                item.reply(item.text.upper())
            client.notify("More.")
            client.send_message(UUID(ana.id), "to myself")

    await asyncio.to_thread(program)

    told = [row["response_body"] for row in await ana.feed() if row["method"] == "notify"]
    assert [body["result"] for body in told] == ["More.", "HELLO"]


# Words for the user


async def test_words_whose_answer_was_lost_are_found_in_the_feed(ana: Caller):
    """Equal words of before are not taken for them."""
    async with client_of(ana) as client:
        await client.notify("Done.")
    async with losing_answers(ana, "/notify") as client:
        await client.notify("Done.", attachments=[{"uri": "https://example.org", "name": "x"}])

    first, second = await ana.feed()
    assert first["response_body"]["parts"]
    assert not second["response_body"]["parts"]


async def test_words_that_did_not_arrive_are_an_error_and_sent_once(ana: Caller):
    """Equal words of before, or of others in between, are not taken for them."""
    pass_on, notified = relay(ana.site), list[str]()

    async def dropping(asked: Asked) -> bytes | None:
        if not asked.path.endswith("/notify"):
            return await pass_on(asked)
        notified.append(asked.path)
        await ana.ask("POST", "/notify", json={"message": "Something else."})
        return None

    async with client_of(ana) as client:
        await client.notify("Done.")
    async with impostor(dropping) as line, client_of(ana, line.url) as client:
        with pytest.raises(ServerUnreachable):
            await client.notify("Done.")

    assert len(notified) == 1
    told = [row["response_body"]["result"] for row in await ana.feed()]
    assert told == ["Something else.", "Done."]
