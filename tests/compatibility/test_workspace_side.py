"""A workspace runtime of the existing protocol, in a page of standard library, does its work."""

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from callers import Part
from outsiders import Outsider, Reply, message


@dataclass
class Runtime:
    """Polls, fetches, writes, acknowledges, and rewrites URIs in messages, in this order."""

    workspace: Outsider
    folder: Path
    cursor: str = ""
    paths: dict[str, str] = field(default_factory=dict[str, str])  # by pending URI
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def poll(self) -> None:
        """One poll, and everything that its rows ask for."""
        answer = self._page()
        if answer.status == 410:
            self.cursor = ""
            answer = self._page()
        assert answer.status == 200, answer.body
        for row in answer.json if self.cursor else reversed(answer.json):
            self._handle(row)
            self.cursor = row["id"]

    def _page(self) -> Reply:
        return self.workspace.feed(
            type="a2a_receive", since_id=self.cursor, limit=100, since_secs=3600
        )

    def _handle(self, row: dict[str, Any]) -> None:
        if row["method"] == "chat_upload_receive":
            self._receive(row["request_body"])
        elif row["method"] != "notify":
            self.messages.append(self._rewritten(row["request_body"]))

    def _receive(self, file: dict[str, Any]) -> None:
        content = self.workspace.fetch(file["file_id"])
        if content.status == 404:
            return
        assert len(content.body) == file["size"]
        path = self.folder / f"{secrets.token_hex(16)}-{file['name']}"
        self.write(path, content.body)
        assert self.workspace.ack(file["file_id"]).json["acked"] is True
        self.paths[file["uri"]] = f"workspace:{path}"

    def write(self, path: Path, content: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(content)

    def _rewritten(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body.get("params", {})
        for holder in (body, params, params.get("message", {})):
            for part in holder.get("parts", ()):
                file = part.get("file", {})
                if file.get("uri") in self.paths:
                    file["uri"] = self.paths[file["uri"]]
        return body


@pytest.fixture
def runtime(workspace: Outsider, tmp_path: Path) -> Runtime:
    return Runtime(workspace, tmp_path)


def contents(runtime: Runtime) -> dict[str, bytes]:
    """The received files by their names, without the random digits."""
    return {path.name[33:]: path.read_bytes() for path in runtime.folder.iterdir()}


def test_files_arrive_and_are_acknowledged(runtime: Runtime):
    workspace = runtime.workspace
    workspace.upload(Part(b"one", name="a b.txt"), Part(b"two", name="\u00fc.txt"))

    runtime.poll()

    assert contents(runtime) == {"a_b.txt": b"one", "_.txt": b"two"}
    assert workspace.get(f"{workspace.path}/pending-uploads").json["uploads"] == []


def test_a_message_names_its_files_by_the_uris_of_the_upload(runtime: Runtime, admin: Outsider):
    """The canvas uploads first and then sends a message about it; unknown URIs stay."""
    workspace = runtime.workspace
    (sent,) = workspace.upload(Part(b"content"), to=workspace).json["files"]
    parts = [
        {"kind": "file", "file": {"uri": sent["uri"], "name": sent["name"]}},
        {"kind": "file", "file": {"uri": f"platform-pending:{workspace.id}/{uuid4()}"}},
        {"kind": "text", "text": sent["uri"]},
    ]
    body = message(parts=parts)
    body["params"]["parts"] = parts
    admin.send(body | {"parts": parts}, to=workspace)

    runtime.poll()

    (got,) = runtime.messages
    for holder in (got, got["params"], got["params"]["message"]):
        found, unknown, text = holder["parts"]
        path = found["file"]["uri"].removeprefix("workspace:")
        assert Path(path).read_bytes() == b"content"
        assert unknown == parts[1]
        assert text == parts[2]


def test_a_file_that_is_gone_is_skipped(runtime: Runtime):
    workspace = runtime.workspace
    gone = workspace.file(Part(name="gone.txt"))
    workspace.file(Part(name="here.txt"))
    workspace.ack(gone)

    runtime.poll()

    assert contents(runtime) == {"here.txt": b"hello"}


def test_a_failed_write_is_tried_again(runtime: Runtime, monkeypatch: pytest.MonkeyPatch):
    runtime.workspace.file()
    with monkeypatch.context() as patched:
        patched.setattr(runtime, "folder", runtime.folder / "missing")
        with pytest.raises(FileNotFoundError):
            runtime.poll()

    runtime.poll()

    assert contents(runtime) == {"a.txt": b"hello"}


def test_a_lost_cursor_starts_over(runtime: Runtime):
    """What was acknowledged before is a 404 then, and is not written twice."""
    runtime.workspace.file()
    runtime.poll()
    runtime.workspace.file(Part(b"later", name="b.txt"))
    runtime.cursor = str(uuid4())

    runtime.poll()

    assert contents(runtime) == {"a.txt": b"hello", "b.txt": b"later"}


def test_a_cursor_continues_where_it_was(runtime: Runtime):
    for name in ("a.txt", "b.txt"):
        runtime.workspace.file(Part(name=name))
        runtime.poll()
    runtime.poll()

    assert contents(runtime) == {"a.txt": b"hello", "b.txt": b"hello"}


def test_its_own_answers_are_not_messages_to_it(runtime: Runtime):
    workspace = runtime.workspace
    workspace.post(f"{workspace.path}/notify", {"message": "done"})

    runtime.poll()

    assert runtime.messages == []
    assert runtime.cursor
