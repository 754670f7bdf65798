"""With which token, and at which server, the client's commands speak."""

from pathlib import Path

import pytest
from impostors import http, impostor

from restante.cli.access import Access
from restante.errors import BadRequest, NotAuthenticated
from restante.postgres.datadir import DataDirectory

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Neither a token nor a server's data directory is to be found."""
    for name in ("URL", "TOKEN", "ADMIN_TOKEN", "DATA_DIR"):
        monkeypatch.delenv(f"RESTANTE_{name}", raising=False)
    monkeypatch.setattr(DataDirectory, "default", lambda: tmp_path / "no-server")


def data_dir(tmp_path: Path, token: str, name: str = "data") -> Path:
    path = tmp_path / name
    path.mkdir()
    (path / "admin-token").write_text(token + "\n")
    return path


async def spoken(access: Access) -> str | None:
    """The token that a server hears."""
    async with impostor(lambda _: http(200, {"workspaces": []})) as server:
        given = Access(url=server.url, token=access.token, data_dir=access.data_dir)
        async with given.client() as client:
            _ = [view async for view in client.workspaces()]
    return server.asked[0].headers.get("Authorization", "").removeprefix("Bearer ")


async def test_what_is_nearest_counts_most(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A flag, then RESTANTE_TOKEN, then what is known of the server on this machine."""
    usual = data_dir(tmp_path, "of-the-usual-directory", "usual")
    monkeypatch.setattr(DataDirectory, "default", lambda: usual)
    assert await spoken(Access()) == "of-the-usual-directory"

    monkeypatch.setenv("RESTANTE_DATA_DIR", str(data_dir(tmp_path, "of-a-variable", "other")))
    assert await spoken(Access()) == "of-a-variable"

    told = Access(data_dir=data_dir(tmp_path, "of-a-flag"))
    assert await spoken(told) == "of-a-flag"

    monkeypatch.setenv("RESTANTE_ADMIN_TOKEN", "admins")
    assert await spoken(told) == "of-a-flag"
    assert await spoken(Access()) == "admins"

    monkeypatch.setenv("RESTANTE_TOKEN", "ours")
    assert await spoken(told) == "ours"

    assert await spoken(Access(token="given", data_dir=told.data_dir)) == "given"


def test_no_token_is_a_sentence_that_says_where_one_is():
    with pytest.raises(NotAuthenticated, match="--token"):
        Access().client()


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_a_token_that_cannot_be_read_is_none(tmp_path: Path, content: bytes):
    (tmp_path / "admin-token").write_bytes(content)

    with pytest.raises(NotAuthenticated):
        Access(data_dir=tmp_path).client()


def test_the_token_of_this_machine_is_not_offered_to_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Whoever mistypes an address must not hand over their server."""
    here = data_dir(tmp_path, "ours")
    monkeypatch.setattr(DataDirectory, "default", lambda: here)
    monkeypatch.setenv("RESTANTE_DATA_DIR", str(here))

    for url in ("https://example.org", "http://10.0.0.1:8080"):
        with pytest.raises(NotAuthenticated):
            Access(url=url).client()
        assert Access(url=url, data_dir=here).client()


def test_the_server_is_the_one_given_or_named_or_on_this_machine(monkeypatch: pytest.MonkeyPatch):
    assert Access(token="t").client().url == "http://127.0.0.1:8080"

    monkeypatch.setenv("RESTANTE_URL", "https://example.org/")
    assert Access(token="t").client().url == "https://example.org"

    assert Access(url="localhost:1", token="t").client().url == "http://localhost:1"


def test_an_address_that_is_none_is_a_sentence():
    with pytest.raises(BadRequest):
        Access(url="ftp://example.org").client()
