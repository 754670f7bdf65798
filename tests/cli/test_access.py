"""Which token and which server the client commands use."""

import os
from pathlib import Path

import pytest
from impostors import http, impostor

from restante.cli.access import Access
from restante.errors import BadRequest, NotAuthenticated

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def no_local_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An ordinary user without a token in the environment or a local server."""
    for name in ("URL", "TOKEN", "ADMIN_TOKEN", "DATA_DIR"):
        monkeypatch.delenv(f"RESTANTE_{name}", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))


def data_dir(tmp_path: Path, token: str, name: str = "data") -> Path:
    path = tmp_path / name
    path.mkdir(parents=True)
    (path / "admin-token").write_text(token + "\n")
    return path


async def token_sent(access: Access) -> str | None:
    """The token that a server receives."""
    async with impostor(lambda _: http(200, {"workspaces": []})) as server:
        given = Access(url=server.url, token=access.token, data_dir=access.data_dir)
        async with given.client() as client:
            _ = [view async for view in client.workspaces()]
    return server.asked[0].headers.get("Authorization", "").removeprefix("Bearer ")


async def test_the_order_in_which_tokens_are_looked_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The flag, then RESTANTE_TOKEN, then the admin token of the server on this machine."""
    data_dir(tmp_path, "in-the-default-directory", "home/restante")
    assert await token_sent(Access()) == "in-the-default-directory"

    monkeypatch.setenv(
        "RESTANTE_DATA_DIR", str(data_dir(tmp_path, "in-the-variables-directory", "other"))
    )
    assert await token_sent(Access()) == "in-the-variables-directory"

    by_flag = Access(data_dir=data_dir(tmp_path, "in-the-flags-directory"))
    assert await token_sent(by_flag) == "in-the-flags-directory"

    monkeypatch.setenv("RESTANTE_ADMIN_TOKEN", "admins")
    assert await token_sent(by_flag) == "in-the-flags-directory"
    assert await token_sent(Access()) == "admins"

    monkeypatch.setenv("RESTANTE_TOKEN", "ours")
    assert await token_sent(by_flag) == "ours"

    assert await token_sent(Access(token="given", data_dir=by_flag.data_dir)) == "given"


def test_a_missing_token_is_an_error_that_says_where_to_find_one():
    with pytest.raises(NotAuthenticated, match="--token"):
        Access().client()


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe"])
def test_an_unreadable_token_file_counts_as_no_token(tmp_path: Path, content: bytes):
    (tmp_path / "admin-token").write_bytes(content)

    with pytest.raises(NotAuthenticated):
        Access(data_dir=tmp_path).client()


def test_the_admin_token_of_this_machine_is_not_sent_to_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A mistyped URL must not leak the admin token."""
    here = data_dir(tmp_path, "ours", "home/restante")
    monkeypatch.setenv("RESTANTE_DATA_DIR", str(here))

    for url in ("https://example.org", "http://10.0.0.1:8080"):
        with pytest.raises(NotAuthenticated):
            Access(url=url).client()
        assert Access(url=url, data_dir=here).client()


def test_the_url_comes_from_the_flag_then_the_variable_then_the_default(
    monkeypatch: pytest.MonkeyPatch,
):
    assert Access(token="t").client().url == "http://127.0.0.1:8080"

    monkeypatch.setenv("RESTANTE_URL", "https://example.org/")
    assert Access(token="t").client().url == "https://example.org"

    assert Access(url="localhost:1", token="t").client().url == "http://localhost:1"


def test_an_invalid_url_is_refused():
    with pytest.raises(BadRequest):
        Access(url="ftp://example.org").client()
