"""Where the token goes, and where it does not."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from impostors import Answering, Impostor, http, impostor

from restante.client import AsyncClient, Bytes
from restante.errors import AnswerInvalid, BadRequest

pytestmark = pytest.mark.anyio

TOKEN = "a-secret-token"
OK = http(200, {"status": "ok"})

Use = Callable[[AsyncClient], Awaitable[Any]]


@asynccontextmanager
async def talking_to(answering: Answering) -> AsyncIterator[tuple[Impostor, AsyncClient]]:
    async with (
        impostor(answering) as other,
        AsyncClient(other.url, token=TOKEN, workspace_id=uuid4()) as client,
    ):
        yield other, client


async def fetched(client: AsyncClient) -> None:
    async with client.fetch(uuid4()):
        pass


async def sent(client: AsyncClient) -> None:
    await client.send_files(client.workspace_id, [Bytes("a", b"x")])


async def registered(client: AsyncClient) -> None:
    await client.register("laptop")


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("use", [fetched, sent, registered], ids=["get", "upload", "post"])
async def test_a_token_does_not_follow_a_redirect(status: int, use: Use):
    async with impostor(lambda _: OK) as elsewhere:
        said = http(status, Location=elsewhere.url + "/")
        async with talking_to(lambda _: said) as (_, client):
            with pytest.raises(AnswerInvalid, match=elsewhere.url):
                await use(client)

    assert elsewhere.asked == []


async def test_the_token_is_sent_and_cookies_are_not_stored():
    async with talking_to(lambda _: http(200, {"status": "ok"}, Set_Cookie="a=b")) as (
        other,
        client,
    ):
        await client.heartbeat()
        await client.heartbeat()

    assert [asked.headers["Authorization"] for asked in other.asked] == [f"Bearer {TOKEN}"] * 2
    assert all("Cookie" not in asked.headers for asked in other.asked)


async def test_a_registration_does_not_send_the_token_of_a_workspace():
    answer = {"status": "registered", "delivery_mode": "poll", "auth_token": "new"}

    async with talking_to(lambda _: http(200, answer)) as (other, client):
        await client.register("a")
        await client.register("b", registration_token="secret")

    assert [asked.headers.get("Authorization") for asked in other.asked] == [None, "Bearer secret"]


async def test_a_registration_without_a_token_is_refused():
    async with talking_to(
        lambda _: http(200, {"status": "registered", "delivery_mode": "poll"})
    ) as (_, client):
        before = client.workspace_id
        with pytest.raises(AnswerInvalid, match="no token"):
            await client.register("a")

        assert client.workspace_id == before


@pytest.mark.parametrize("token", ["two\nlines", "a\r\nX-Evil: 1", "nul\0", "half\ud800"])
async def test_an_invalid_token_is_not_sent(token: str):
    """Often it was read from a file together with the line break."""
    async with (
        impostor(lambda _: OK) as other,
        AsyncClient(other.url, token=token, workspace_id=uuid4()) as client,
    ):
        with pytest.raises(BadRequest, match="token"):
            await client.heartbeat()

    assert other.asked == []


async def test_a_netrc_does_not_replace_the_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "netrc").write_text("default login somebody password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    async with talking_to(lambda _: OK) as (other, client):
        await client.heartbeat()

    assert other.asked[0].headers["Authorization"] == f"Bearer {TOKEN}"


async def test_the_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch):
    async with impostor(lambda _: OK) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        async with AsyncClient("http://restante.invalid:8080", workspace_id=uuid4()) as client:
            await client.heartbeat()

    assert proxy.asked[0].target == "http://restante.invalid:8080/registry/heartbeat"


async def test_a_server_can_have_a_path_prefix():
    async with (
        impostor(lambda _: OK) as other,
        AsyncClient(other.url + "/behind/", workspace_id=uuid4()) as client,
    ):
        await client.heartbeat()

    assert other.asked[0].target == "/behind/registry/heartbeat"
