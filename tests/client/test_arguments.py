"""What callers pass to the clients, and what the objects that they get show of themselves."""

import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest
import rich.pretty
from impostors import http, impostor

from restante import wire
from restante.client import AsyncClient, Bytes, Client, Credentials, Cursor
from restante.errors import BadRequest

pytestmark = pytest.mark.anyio

TOKEN = "a-secret-token"
WORKSPACE = UUID("01234567-89ab-cdef-0123-456789abcdef")
FILE = uuid4()
URL = "http://127.0.0.1:8080"

Use = Callable[[Any, Any], Awaitable[Any]]


async def fetched(client: AsyncClient, given: str) -> None:
    async with client.fetch(given):
        pass


WITH_AN_ID: dict[str, tuple[Use, UUID]] = {
    "send_files": (lambda client, to: client.send_files(to, [Bytes("a", b"x")]), WORKSPACE),
    "send_message": (lambda client, to: client.send_message(to, "hello"), WORKSPACE),
    "feed": (lambda client, of: client.feed(Cursor(1), of=of), WORKSPACE),
    "acknowledge": (lambda client, file: client.acknowledge(file), FILE),
    "reopen": (lambda client, file: client.reopen(file), FILE),
    "fetch": (fetched, FILE),
}
WITH_A_LIST: dict[str, Use] = {
    "send_files": lambda client, files: client.send_files(WORKSPACE, files),
    "send_message": lambda client, files: client.send_message(WORKSPACE, "a", files=files),
    "notify": lambda client, files: client.notify("a", files=files),
    "attachments": lambda client, files: client.notify("a", attachments=files),
}


@pytest.mark.parametrize("name", WITH_AN_ID)
async def test_an_id_may_be_a_text(name: str):
    """As programs have it in a file or a variable, in any of the usual forms."""
    use, of = WITH_AN_ID[name]
    async with (
        impostor(lambda _: http(400, {"code": "bad_request", "error": "Seen."})) as other,
        AsyncClient(other.url, workspace_id=str(WORKSPACE)) as client,
    ):
        for given in (str(of), of.hex.upper(), of):
            with pytest.raises(BadRequest, match="Seen"):
                await use(client, given)

    assert len({asked.path for asked in other.asked}) == 1
    assert all(str(of) in asked.path for asked in other.asked)


@pytest.mark.parametrize("name", WITH_AN_ID)
@pytest.mark.parametrize("given", ["laptop", "", "../../admin/sweep"])
async def test_a_text_that_is_no_id_is_refused_before_anything_is_sent(name: str, given: str):
    """It would become part of a path."""
    use, _ = WITH_AN_ID[name]
    async with (
        impostor(lambda _: http()) as other,
        AsyncClient(other.url, workspace_id=WORKSPACE) as client,
    ):
        with pytest.raises(BadRequest, match="is not the id of a"):
            await use(client, given)

    assert other.asked == []


def test_credentials_and_clients_take_an_id_as_text():
    kept = Credentials(URL, str(WORKSPACE), TOKEN)

    assert kept.workspace_id == WORKSPACE
    assert Client(URL, token=TOKEN, workspace_id=WORKSPACE.hex).workspace_id == WORKSPACE
    assert msgspec.json.decode(msgspec.json.encode(kept), type=Credentials) == kept
    with pytest.raises(BadRequest, match="'laptop' is not the id of a workspace"):
        Client(URL, workspace_id="laptop")


@pytest.mark.parametrize("name", WITH_A_LIST)
@pytest.mark.parametrize(
    "given",
    ["README.md", Path("README.md"), b"README.md", Bytes("a", b"x"), io.BytesIO(), {"uri": "a"}],
    ids=lambda given: type(given).__name__,
)
async def test_one_where_a_list_is_wanted_is_refused(name: str, given: Any):
    """A text is a list of letters to Python: each of them would be taken for a path."""
    async with (
        impostor(lambda _: http()) as other,
        AsyncClient(other.url, workspace_id=WORKSPACE) as client,
    ):
        with pytest.raises(TypeError, match=r"must be a list, even for a single one: \["):
            await WITH_A_LIST[name](client, given)

    assert other.asked == []


SHOWN = {
    "credentials": Credentials(URL, WORKSPACE, TOKEN),
    "client": Client(URL, token=TOKEN, workspace_id=WORKSPACE),
    "async_client": AsyncClient(URL, token=TOKEN, workspace_id=WORKSPACE),
    "registered": wire.Registered("registered", "poll", TOKEN, TOKEN, TOKEN),
    "issued": wire.IssuedToken(TOKEN, TOKEN),
    "heartbeat": wire.HeartbeatNoted("ok", TOKEN),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_program_prints_has_no_token(name: str):
    """In a log, in a traceback with locals, in an interactive session."""
    thing = SHOWN[name]
    shown = rich.pretty.pretty_repr(thing, max_width=1000)

    assert type(thing).__name__ in repr(thing)
    assert TOKEN not in repr(thing) + str(thing) + shown


def test_a_client_says_which_one_it_is():
    assert repr(Client(URL, token=TOKEN)) == f"Client({URL!r})"
    assert repr(SHOWN["client"]) == f"Client({URL!r}, workspace_id={str(WORKSPACE)!r})"
    assert repr(SHOWN["async_client"]) == f"Async{SHOWN['client']!r}"
