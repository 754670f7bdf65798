"""A backup is restored, of the folder or of the server: no message runs again unnoticed."""

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import connected
from connecting import Connect, Office
from processes import Outcome, restante

from restante.client import Bytes

_TABLES = ("feed", "feeds", "uploads")


@pytest.fixture
def ana(tmp_path: Path, office: Office) -> Connect:
    """A registered workspace that is not running."""
    folder = tmp_path / "folder"
    assert restante("connect", office.server.address, "--dir", folder, "--once").code == 0
    return Connect(folder, office.server.address)


def say(office: Office, to: Connect, *texts: str) -> None:
    for text in texts:
        parts = [{"kind": "text", "text": text}]
        office.say(to, {"jsonrpc": "2.0", "method": "message/send", "params": {"parts": parts}})


def received(at: Connect) -> Outcome:
    """Receive what is waiting; each message and each file is noted by a command."""
    program = at.root / "note.py"
    program.write_text(
        "import json, os, pathlib, sys\n"
        "name = os.environ.get('RESTANTE_FILE_NAME')\n"
        "what = name or json.load(sys.stdin)['request_body']['params']['parts'][0]['text']\n"
        "if name: pathlib.Path(sys.argv[1]).unlink()\n"
        f"with open({str(at.root.with_name('noted'))!r}, 'a') as noted: print(what, file=noted)\n"
    )
    command = f"{sys.executable} {program}"
    flags = ("--once", "--on-message", command, "--exec", command)
    outcome = restante("connect", "--dir", at.root, *flags)
    assert outcome.code == 0, outcome
    return outcome


def noted(at: Connect) -> list[str]:
    return at.root.with_name("noted").read_text().split()


class Backup:
    """The workspace's rows on the server as they are now; `restore` brings them back."""

    def __init__(self, office: Office, at: Connect) -> None:
        self._dsn = office.server.dsn
        self._workspace_id = at.credentials.workspace_id
        self._rows = asyncio.run(self._copied())

    def restore(self) -> None:
        asyncio.run(self._restored())

    async def _copied(self) -> dict[str, list[Any]]:
        async with connected(self._dsn) as connection:
            query = "select * from {} where workspace_id = $1"
            return {
                table: await connection.fetch(query.format(table), self._workspace_id)
                for table in _TABLES
            }

    async def _restored(self) -> None:
        async with connected(self._dsn) as connection, connection.transaction():
            for table, rows in self._rows.items():
                statement = f"delete from {table} where workspace_id = $1"
                await connection.execute(statement, self._workspace_id)
                await connection.copy_records_to_table(table, records=rows)


def test_a_folder_from_a_backup_runs_no_message_again(office: Office, ana: Connect, tmp_path: Path):
    """Its own mark is older than the one on the server."""
    say(office, ana, "one")
    received(ana)
    shutil.copytree(ana.root, tmp_path / "copy")
    say(office, ana, "two", "three")
    received(ana)
    shutil.rmtree(ana.root)
    shutil.move(tmp_path / "copy", ana.root)
    say(office, ana, "four")

    first, second = received(ana), received(ana)

    assert noted(ana) == ["one", "two", "three", "four"]
    assert "2 feed rows were skipped: this workspace has acknowledged them before." in first.stdout
    assert "skipped" not in second.stdout


def test_a_server_from_a_backup_sends_no_handled_message_again(office: Office, ana: Connect):
    """Its feed ends before the folder's mark; a new message gets the seq of a lost one."""
    say(office, ana, "one", "two")
    received(ana)
    backup = Backup(office, ana)
    say(office, ana, "lost")
    received(ana)
    backup.restore()
    say(office, ana, "new")

    first, second = received(ana), received(ana)

    assert noted(ana) == ["one", "two", "lost", "new"]
    assert "it was restored from a backup. Continuing after the last acknowledged" in first.stdout
    assert "restored" not in second.stdout


def test_what_comes_again_from_a_restored_server_is_announced(office: Office, ana: Connect):
    """What was waiting when the backup was made was handled since, and the server cannot know."""
    say(office, ana, "one")
    received(ana)
    say(office, ana, "two")
    office.send(ana, Bytes("letter", b"."))
    backup = Backup(office, ana)
    say(office, ana, "lost")
    received(ana)
    backup.restore()

    outcome = received(ana)

    assert noted(ana) == ["one", "two", "letter", "lost", "two", "letter"]
    assert "up to 2 rows come again." in outcome.stdout
    assert "again: letter was received before and is pending again" in outcome.stdout
