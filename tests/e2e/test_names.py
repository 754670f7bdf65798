"""
Honest and hostile names on their whole way: upload, feed, list, fetch, and `restante connect`.

They are sent in a few requests, in the two forms in which senders write them.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path, PurePath
from urllib.parse import quote, unquote
from urllib.request import Request, urlopen

from connecting import ARRIVED, Connect, Office
from file_names import NAMES, Name

BOUNDARY = "a-boundary"
MAX_FILES = 64

# Browsers send UTF-8, and escape what would end the header.
BROWSERS = [name for name in NAMES if not set(name.sent) & set('"\\\r\n')]


def as_browsers_do(name: str) -> str:
    return f'filename="{name}"'


def as_rfc_5987_says(name: str) -> str:
    """Beside a name for servers that do not know this form."""
    return f"filename=\"ignored.txt\"; filename*=UTF-8''{quote(name, safe='')}"


def test_names_as_browsers_send_them_arrive_in_the_folder(office: Office, tmp_path: Path):
    with Connect(tmp_path / "ana", office.server.address, "--once") as ana:
        ana.start().wait()
        staged = sent(office, ana, BROWSERS, as_browsers_do)
        assert_three_forms(office, ana, BROWSERS, staged)

        assert ana.start().wait() == 0

    found = {path.read_bytes(): ARRIVED.fullmatch(path.name) for path in ana.uploads.iterdir()}
    assert {content: match and match[1] for content, match in found.items()} == {
        content: name.wire for content, name in contents(BROWSERS).items()
    }


def test_names_in_their_encoded_form_arrive_in_a_directory(office: Office, tmp_path: Path):
    into = tmp_path / "into"
    with Connect(tmp_path / "ana", office.server.address, "--once", "--into", into) as ana:
        ana.start().wait()
        staged = sent(office, ana, NAMES, as_rfc_5987_says)
        assert_three_forms(office, ana, NAMES, staged)

        assert ana.start().wait() == 0

    found = {path.read_bytes(): path.name for path in into.iterdir()}
    assert found == dict(zip(contents(NAMES), numbered(NAMES), strict=True))
    assert all(path.parent == into and path.is_file() for path in into.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ana", "into"]
    assert ana.names() == []


def contents(names: Sequence[Name]) -> dict[bytes, Name]:
    """What is in the file of each name."""
    return {str(number).encode(): name for number, name in enumerate(names)}


def numbered(names: Sequence[Name]) -> list[str]:
    """The local names in the order of arrival; the second of the same has a number."""
    seen, local = Counter[str](), list[str]()
    for name in names:
        seen[name.local.casefold()] += 1
        count, path = seen[name.local.casefold()], PurePath(name.local)
        local.append(name.local if count == 1 else f"{path.stem} ({count}){path.suffix}")
    return local


def sent(
    office: Office, to: Connect, names: Sequence[Name], form: Callable[[str], str]
) -> list[dict[str, str]]:
    """Send a file for each name; returns what the server says about them."""
    parts = [
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=files; {form(name.sent)}\r\n\r\n"
        f"{content.decode()}\r\n".encode()
        for content, name in contents(names).items()
    ]
    kind = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
    accepted = list[dict[str, str]]()
    for first in range(0, len(parts), MAX_FILES):
        body = b"".join([*parts[first : first + MAX_FILES], f"--{BOUNDARY}--\r\n".encode()])
        answer, _ = ask(office, to, "chat/uploads", body, **kind)
        accepted += json.loads(answer)["files"]
    return accepted


def ask(
    office: Office, at: Connect, path: str, body: bytes | None = None, **headers: str
) -> tuple[bytes, str]:
    """The body and the Content-Disposition of an answer to the workspace."""
    kept = at.credentials
    headers |= {"Authorization": f"Bearer {kept.token}"}
    url = f"{office.server.address}/workspaces/{kept.workspace_id}/{path}"
    with urlopen(Request(url, body, headers), timeout=30) as answer:
        return answer.read(), answer.headers.get("Content-Disposition", "")


def assert_three_forms(
    office: Office, at: Connect, names: Sequence[Name], staged: Sequence[dict[str, str]]
) -> None:
    """Answer, feed, list and fetch agree on the name on the wire and the name for people."""
    feed, _ = ask(office, at, "activity?limit=500")
    listed, _ = ask(office, at, "pending-uploads?limit=500")
    expected = [(name.wire, name.shown) for name in names]
    rows = sorted(json.loads(feed), key=lambda row: row["seq"])

    assert forms(staged) == expected
    assert forms([row["request_body"] for row in rows]) == expected
    assert [row["summary"] for row in rows] == [f"chat_upload_receive: {n.wire}" for n in names]
    assert sorted(forms(json.loads(listed)["uploads"])) == sorted(expected)
    for file, name in zip(staged, names, strict=True):
        file_id = file["uri"].rpartition("/")[2]
        _, disposition = ask(office, at, f"pending-uploads/{file_id}/content")
        plain, _, encoded = disposition.partition("; filename*=UTF-8''")
        assert plain == f'attachment; filename="{name.wire}"'
        assert unquote(encoded) == name.shown
        assert encoded.isascii()


def forms(files: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
    return [(file["name"], file["display_name"]) for file in files]
