"""The flags of `restante connect`; crashes and outages are tested in e2e."""

import asyncio
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from callers import ADMIN_TOKEN, ask, bearer
from impostors import http, impostor, relay
from processes import Outcome, restante
from sites import Site, SiteFactory

from restante.client import AsyncClient, Bytes
from restante.client.folder import Folder, kept_credentials

pytestmark = pytest.mark.anyio


async def connect(*words: object, **environment: str) -> Outcome:
    """Run the command with its output in pipes, which must not contain terminal codes."""
    done = await asyncio.to_thread(_connect, *map(str, words), **environment)
    assert "\x1b" not in done.stdout + done.stderr
    return done


def _connect(*words: str, **environment: str) -> Outcome:
    return restante("connect", *words, **environment)  # pyright: ignore[reportArgumentType]


def error_of(outcome: Outcome) -> str:
    """The one line on standard error of a command that failed."""
    assert outcome.code == 1, outcome
    assert re.fullmatch(r"restante: .*\n", outcome.stderr), outcome.stderr
    return outcome.stderr


async def workspaces(site: Site) -> dict[str, Any]:
    async with AsyncClient(site.url, token=ADMIN_TOKEN) as admin:
        return {str(view.id): view async for view in admin.workspaces()}


async def send(site: Site, workspace: str, *names: str) -> None:
    async with AsyncClient(site.url, token=ADMIN_TOKEN) as admin:
        (to,) = [view.id async for view in admin.workspaces() if str(view.id) == workspace]
        await admin.send_files(to, [Bytes(name, b"hello") for name in names])


# Registering and receiving


async def test_one_command_registers_and_the_next_receives(shared_site: Site, tmp_path: Path):
    """The second run needs neither URL nor token."""
    folder = tmp_path / "inbox"
    first = await connect(shared_site.url, "--dir", folder, "--once", "--name", "laptop")
    kept = kept_credentials(folder)
    assert kept is not None
    workspace = str(kept.workspace_id)
    await send(shared_site, workspace, "a b.txt")

    second = await connect("--dir", folder, "--once")

    assert (first.code, first.stderr, second.code, second.stderr) == (0, "", 0, "")
    assert first.stdout.splitlines()[:4] == [
        "Workspace laptop",
        f"Its id is {workspace}",
        f"Server {shared_site.url}",
        f"Files appear in {folder / '.molecule/chat-uploads'}",
    ]
    assert "0 files received" in first.stdout
    (path,) = (folder / ".molecule" / "chat-uploads").iterdir()
    assert re.fullmatch(r"[0-9a-f]{32}-a_b\.txt", path.name)
    assert path.read_bytes() == b"hello"
    assert second.stdout.startswith(f"Workspace {workspace}\n")
    assert f"received         5 B  a b.txt as {path.name}\n1 file received" in second.stdout
    assert (await workspaces(shared_site))[workspace].name == "laptop"


async def test_only_the_owner_can_read_the_token(shared_site: Site, tmp_path: Path):
    await connect("--dir", tmp_path, "--once", RESTANTE_URL=shared_site.url)

    kept = kept_credentials(tmp_path)
    assert kept is not None
    ours = tmp_path / ".molecule" / "restante"
    assert stat.S_IMODE((ours / "credentials.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700


async def test_a_later_run_can_rename_the_workspace(shared_site: Site, tmp_path: Path):
    await connect(shared_site.url, "--dir", tmp_path, "--once", "--name", "old")

    done = await connect("--dir", tmp_path, "--once", "--name", "new")

    kept = kept_credentials(tmp_path)
    assert done.code == 0
    assert kept is not None
    assert (await workspaces(shared_site))[str(kept.workspace_id)].name == "new"


async def test_a_server_that_requires_a_registration_token(run_site: SiteFactory, tmp_path: Path):
    token = "a-token-for-new-workspaces"
    async with run_site(registration_token=token) as site:
        words = [site.url, "--once", "--dir"]
        refused, flag, variable = await asyncio.gather(
            connect(*words, tmp_path / "1"),
            connect(*words, tmp_path / "2", "--registration-token", token),
            connect(*words, tmp_path / "3", RESTANTE_REGISTRATION_TOKEN=token),
        )

    assert "token" in error_of(refused)
    assert kept_credentials(tmp_path / "1") is None
    assert (flag.code, variable.code) == (0, 0)


async def test_a_file_above_our_own_limit_stays_pending(shared_site: Site, tmp_path: Path):
    await connect(shared_site.url, "--dir", tmp_path, "--once")
    kept = kept_credentials(tmp_path)
    assert kept is not None
    await send(shared_site, str(kept.workspace_id), "a b.txt")

    refused = await connect("--dir", tmp_path, "--once", "--max-file-bytes", 4)
    limit = {"RESTANTE_CONNECT_MAX_FILE_BYTES": "4"}
    also_refused = await connect("--dir", tmp_path, "--once", **limit)
    taken = await connect("--dir", tmp_path, "--once", "--max-file-bytes", 5, **limit)
    wrong = await connect("--dir", tmp_path, "--once", "--max-file-bytes", 0)

    assert "1 file could not be taken" in error_of(refused)
    for outcome in (refused, also_refused):
        assert "not taken: a b.txt: " in outcome.stdout
        assert "has 5 bytes, and this side accepts at most 4" in outcome.stdout
    assert taken.code == 0
    assert wrong.code == 2


async def test_files_whose_command_fails_are_not_acknowledged(shared_site: Site, tmp_path: Path):
    await connect(shared_site.url, "--dir", tmp_path, "--once")
    kept = kept_credentials(tmp_path)
    assert kept is not None
    await send(shared_site, str(kept.workspace_id), "a", "b")

    refused = await connect("--dir", tmp_path, "--once", "--exec", "false")
    taken = await connect("--dir", tmp_path, "--once", "--exec", "cat")

    assert "2 files could not be taken" in error_of(refused)
    assert refused.stdout.count("false ended with status 1") == 2
    assert taken.code == 0
    assert taken.stdout.count("  hello") == 2


async def test_an_unencrypted_connection_is_warned_about(shared_site: Site, tmp_path: Path):
    async with impostor(relay(shared_site)) as proxy:
        done = await connect(
            "http://restante.invalid", "--dir", tmp_path, "--once", http_proxy=proxy.url
        )

    assert "Warning: http://restante.invalid is not encrypted" in done.stdout


# Mistakes


async def test_mistakes_on_the_command_line_are_one_line_errors(tmp_path: Path):
    nowhere = "http://127.0.0.1:1"
    outcomes = await asyncio.gather(
        connect("--dir", tmp_path / "1"),
        connect("ftp://example.org", "--dir", tmp_path / "2"),
        connect(nowhere, "--dir", tmp_path / "3", "--exec", ""),
        connect(nowhere, "--dir", tmp_path / "4", "--on-message", "'unclosed"),
        connect(nowhere, "--dir", tmp_path / "5", "--once"),
        connect(nowhere, "--dir", "/dev/null", "--once"),
    )

    for outcome, words in zip(
        outcomes,
        ["which server", "ftp://example.org", "empty", "unclosed", "refused", "/dev/null"],
        strict=True,
    ):
        assert words in error_of(outcome)


async def test_a_folder_belongs_to_one_server(shared_site: Site, tmp_path: Path):
    """Otherwise its token would be sent to another server."""
    await connect(shared_site.url, "--dir", tmp_path, "--once")

    async with impostor(lambda _: http(200, {})) as other:
        error = error_of(await connect(other.url, "--dir", tmp_path, "--once"))

    assert f"belongs to a workspace at {shared_site.url}" in error
    assert other.asked == []
    assert (await connect(shared_site.url + "/", "--dir", tmp_path, "--once")).code == 0


async def test_a_folder_in_use_by_another_process_is_refused(shared_site: Site, tmp_path: Path):
    with Folder.open(tmp_path):
        error = error_of(await connect(shared_site.url, "--dir", tmp_path, "--once"))

    assert f"is receiving into {tmp_path}:" in error
    assert kept_credentials(tmp_path) is None


async def test_a_revoked_token_ends_the_command(shared_site: Site, tmp_path: Path):
    """Even without --once: a retry cannot succeed."""
    await connect(shared_site.url, "--dir", tmp_path, "--once")
    kept = kept_credentials(tmp_path)
    assert kept is not None
    path = f"/admin/workspaces/{kept.workspace_id}/token"
    revoked = await ask(shared_site, "DELETE", path, headers=bearer(ADMIN_TOKEN))
    assert revoked.status == 200

    assert "token" in error_of(await connect("--dir", tmp_path))
