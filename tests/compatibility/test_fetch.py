"""Fetching and acknowledging as an existing workspace runtime or canvas does it."""

import hashlib
from uuid import UUID, uuid4

import pytest
from callers import Part
from outsiders import Outsider
from processes import wait_until


def spellings(text: str) -> list[str]:
    """Other ways to write a UUID that Go's uuid.Parse accepts."""
    return [UUID(text).hex, f"{{{text}}}", f"urn:uuid:{text}", text.upper()]


def quoted(path: str) -> str:
    return path.replace("{", "%7B").replace("}", "%7D")


def test_the_bytes_come_with_type_name_and_length(workspace: Outsider):
    content = bytes(range(256)) * 5000
    file_id = workspace.file(Part(content, name="my plan.png", mimetype="image/png"))

    answer = workspace.fetch(file_id)

    assert (answer.status, answer.body) == (200, content)
    assert answer.headers["Content-Type"] == "image/png"
    assert answer.headers["Content-Length"] == str(len(content))
    disposition = answer.headers["Content-Disposition"]
    assert disposition.startswith("attachment; filename=\"my_plan.png\"; filename*=UTF-8''")


def test_a_file_without_a_type_is_octet_stream(workspace: Outsider):
    file_id = workspace.file(Part(mimetype=None))

    assert workspace.fetch(file_id).headers["Content-Type"] == "application/octet-stream"


def test_a_fetch_can_be_repeated_until_the_ack(workspace: Outsider):
    file_id = workspace.file(Part(b"content"))

    assert [workspace.fetch(file_id).body for _ in range(3)] == [b"content"] * 3
    workspace.ack(file_id)
    assert workspace.fetch(file_id).status == 404


def test_a_fetch_is_noted_once_the_body_was_sent(workspace: Outsider):
    file_id = workspace.file()

    def listed() -> str | None:
        (upload,) = workspace.get(f"{workspace.path}/pending-uploads").json["uploads"]
        return upload["fetched_at"]

    before = listed()
    workspace.fetch(file_id)

    assert before is None
    wait_until(listed, seconds=10, what="the note of the fetch")


def test_an_ack_is_idempotent(workspace: Outsider):
    file_id = workspace.file()

    answers = [workspace.ack(file_id) for _ in range(3)]

    assert [(answer.status, answer.json) for answer in answers] == [(200, {"acked": True})] * 3


def test_a_body_and_a_content_type_do_not_matter_to_an_ack(workspace: Outsider):
    """Clients send nothing, {} or null, as their HTTP library likes it."""
    for body in (b"", b"{}", b"null", b"not json"):
        file_id = workspace.file()
        answer = workspace.post(f"{workspace.path}/pending-uploads/{file_id}/ack", body)
        assert (answer.status, answer.json) == (200, {"acked": True}), body


def test_the_admin_fetches_and_acknowledges_too(workspace: Outsider, admin: Outsider):
    file_id = workspace.file(Part(b"content"))
    canvas = workspace.with_token(admin.token)

    assert canvas.fetch(file_id).body == b"content"
    assert canvas.ack(file_id).json == {"acked": True}
    assert workspace.fetch(file_id).status == 404


def test_what_is_not_a_uuid_is_a_400_that_says_which(workspace: Outsider, admin: Outsider):
    file_id = workspace.file()
    nowhere = Outsider(workspace.url, admin.token, "not-a-uuid")

    for answer in (workspace.fetch("x"), workspace.ack("x")):
        assert (answer.status, answer.error) == (400, "invalid file_id")
    for answer in (nowhere.fetch(file_id), nowhere.ack(file_id)):
        assert (answer.status, answer.error) == (400, "invalid workspace ID")


@pytest.mark.parametrize("way", range(4), ids=["hex", "braces", "urn", "capitals"])
def test_other_spellings_of_a_uuid_are_the_same_uuid(workspace: Outsider, way: int):
    file_id = workspace.file(Part(b"content"))
    path = f"/workspaces/{spellings(workspace.id)[way]}/pending-uploads/{spellings(file_id)[way]}"

    fetched = workspace.get(quoted(f"{path}/content"))
    acked = workspace.ask("POST", quoted(f"{path}/ack"))

    assert (fetched.status, fetched.body) == (200, b"content")
    assert acked.json == {"acked": True}


def test_every_missing_file_is_the_same_404(workspace: Outsider, other: Outsider):
    acked, theirs = workspace.file(), other.file()
    workspace.ack(acked)

    fetches = [workspace.fetch(one) for one in (str(uuid4()), theirs, acked)]
    acks = [workspace.ack(one) for one in (str(uuid4()), theirs)]

    assert {answer.status for answer in fetches + acks} == {404}
    assert len({answer.body for answer in fetches + acks}) == 1
    assert other.fetch(theirs).status == 200


def test_without_the_right_token_it_is_a_401(workspace: Outsider, other: Outsider):
    file_id = workspace.file()

    for token in ("", "stale", other.token):
        stranger = workspace.with_token(token)
        assert (stranger.fetch(file_id).status, stranger.ack(file_id).status) == (401, 401)
    assert workspace.fetch(file_id).status == 200


def test_waiting_files_are_listed_oldest_first(workspace: Outsider):
    first, second, third = (workspace.file() for _ in range(3))
    workspace.ack(second)

    listed = workspace.get(f"{workspace.path}/pending-uploads").json["uploads"]

    assert [upload["file_id"] for upload in listed] == [first, third]


def test_a_download_can_be_resumed_and_checked(workspace: Outsider):
    content = bytes(range(200)) * 50
    file_id = workspace.file(Part(content))
    path = f"{workspace.path}/pending-uploads/{file_id}/content"

    rest = workspace.ask("GET", path, headers={"Range": "bytes=1000-"})
    whole = workspace.ask("HEAD", path)

    assert (rest.status, rest.body) == (206, content[1000:])
    assert whole.headers["ETag"] == f'"{hashlib.sha256(content).hexdigest()}"'
    assert whole.headers["Repr-Digest"].startswith("sha-256=:")
