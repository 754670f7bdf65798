"""Which server and token `restante connect` uses, and how a folder gets new ones."""

import asyncio
import io
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from callers import ADMIN, ADMIN_TOKEN, Caller, ask, registered
from endings import stop_listening
from impostors import impostor, relay
from sites import Site

from restante.cli.credentials import Target, credentials_for, given_token, introduce, new_server
from restante.client import AsyncClient, Credentials
from restante.client.folder import Folder, kept_credentials
from restante.errors import BadRequest, NotAuthenticated, ServerUnreachable
from restante.ids import WorkspaceId

pytestmark = pytest.mark.anyio

OLD, NEW = "http://127.0.0.1:1", "http://127.0.0.1:2"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RESTANTE_URL", "RESTANTE_NEW_TOKEN", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
async def caller(shared_site: Site) -> Caller:
    return await registered(shared_site)


def connected(path: Path, url: str, workspace_id: str = str(UUID(int=1)), token: str = "t") -> Path:
    """A folder that knows its server."""
    with Folder.open(path) as folder:
        folder.keep(Credentials(url, WorkspaceId(UUID(workspace_id)), token))
    return path


async def introduced(target: Target) -> Credentials | None:
    """What the folder has after the server was asked."""
    credentials = credentials_for(target)
    client = AsyncClient.of(credentials) if credentials else AsyncClient(new_server(target))
    with Folder.open(target.root) as folder:
        async with client:
            await introduce(client, target, folder, "a name")
    return kept_credentials(target.root)


# What the command line says


def test_an_exported_url_is_for_folders_that_know_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RESTANTE_URL", NEW)
    known, unknown = (
        Target(None, connected(tmp_path / "a", OLD), None),
        Target(None, tmp_path, None),
    )

    kept = credentials_for(known)

    assert kept is not None
    assert kept.url == OLD
    assert credentials_for(unknown) is None
    assert new_server(unknown) == NEW


def test_another_address_is_refused_with_the_command_that_moves_the_folder(tmp_path: Path):
    into = connected(tmp_path / "my inbox", OLD)

    with pytest.raises(BadRequest) as refused:
        credentials_for(Target(NEW, None, into))

    assert f"connect {NEW} --into '{into}' --moved`; otherwise use another --dir." in str(
        refused.value
    )
    moved = credentials_for(Target(NEW, None, into, is_moved=True))
    assert moved is not None
    assert moved.url == NEW
    assert kept_credentials(into) != moved  # nothing is stored before the server was asked


def test_flags_for_a_connected_folder_are_refused_without_one(tmp_path: Path):
    for target in (
        Target(NEW, tmp_path, None, is_moved=True),
        Target(NEW, tmp_path, None, new_token="x"),
    ):
        with pytest.raises(BadRequest, match="is not connected yet"):
            credentials_for(target)
    with pytest.raises(BadRequest, match="Say where the server is now"):
        credentials_for(Target(None, connected(tmp_path, OLD), None, is_moved=True))
    with pytest.raises(BadRequest, match="Say which server"):
        new_server(Target(None, tmp_path, None))


@pytest.mark.parametrize(
    ("variable", "piped", "token"),
    [("a", "b\n", "a"), ("", " b \n", "b"), ("", "b\nc\n", "b")],
)
def test_a_new_token_comes_from_the_environment_or_a_pipe(
    monkeypatch: pytest.MonkeyPatch, variable: str, piped: str, token: str
):
    monkeypatch.setenv("RESTANTE_NEW_TOKEN", variable)
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))

    assert given_token() == token


@pytest.mark.parametrize("piped", ["", "\n", "a\tb\n", "x" * 5000])
def test_no_token_is_an_error(monkeypatch: pytest.MonkeyPatch, piped: str):
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))

    with pytest.raises(BadRequest, match="There is no token"):
        given_token()


# What the server says


async def test_a_moved_server_is_asked_and_then_stored(caller: Caller, tmp_path: Path):
    root = connected(tmp_path, OLD, caller.id, caller.token)

    async with impostor(relay(caller.site)) as moved:
        kept = await introduced(Target(moved.url, root, None, is_moved=True))

    assert kept == Credentials(moved.url, WorkspaceId(UUID(caller.id)), caller.token)


async def test_a_rotated_token_is_asked_and_then_stored(caller: Caller, tmp_path: Path):
    root = connected(tmp_path, caller.site.url, caller.id, caller.token)
    issued = await ask(caller.site, "POST", f"/admin/workspaces/{caller.id}/token", headers=ADMIN)
    token = issued.json["auth_token"]

    kept = await introduced(Target(None, root, None, new_token=token))

    assert kept is not None
    assert kept.token == token


async def test_a_server_or_token_that_does_not_fit_changes_nothing(caller: Caller, tmp_path: Path):
    """Above all, the admin's token is not stored in a folder."""
    other = await registered(caller.site)
    root = connected(tmp_path / "a", caller.site.url, caller.id, caller.token)
    stranger = connected(tmp_path / "b", OLD)

    for target in (
        Target(None, root, None, new_token=ADMIN_TOKEN),
        Target(None, root, None, new_token=other.token),
        Target(caller.site.url, stranger, None, is_moved=True),
    ):
        before = kept_credentials(target.root)
        with pytest.raises(NotAuthenticated, match="The folder is unchanged"):
            await introduced(target)
        assert kept_credentials(target.root) == before


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(
        ["openssl", *words, "-keyout", path, "-out", path.with_name("c"), "-subj", "/CN=localhost"],
        check=True,
        capture_output=True,
    )
    path.write_bytes(path.read_bytes() + path.with_name("c").read_bytes())
    return path


@pytest.fixture
async def tls_port(certificate: Path) -> AsyncIterator[int]:
    """A server that speaks TLS, and closes every connection."""

    def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server = await asyncio.start_server(close, "127.0.0.1", 0, ssl=context)
    yield server.sockets[0].getsockname()[1]
    await stop_listening(server)


async def test_a_plain_address_of_a_server_with_tls_is_named_as_such(tls_port: int, tmp_path: Path):
    url = f"127.0.0.1:{tls_port}"

    with pytest.raises(BadRequest) as refused:
        await introduced(Target(f"http://{url}", tmp_path, None))

    assert str(refused.value) == f"http://{url} expects TLS. Its address is https://{url}."


async def test_a_certificate_that_is_not_trusted_is_named(tls_port: int, tmp_path: Path):
    with pytest.raises(ServerUnreachable, match="has a certificate that this machine does not"):
        await introduced(Target(f"https://127.0.0.1:{tls_port}", tmp_path, None))


async def test_an_https_address_of_a_plain_server_is_named_as_such(
    shared_site: Site, tmp_path: Path
):
    plain = shared_site.url

    with pytest.raises(ServerUnreachable) as refused:
        await introduced(Target(plain.replace("http:", "https:"), tmp_path, None))

    assert f"it is a plain HTTP server. Its address is {plain}." in str(refused.value)
    assert kept_credentials(tmp_path) is None
