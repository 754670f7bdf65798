"""Files from a canvas: forms of browsers, curl, Go and Python, and what is answered."""

from collections.abc import Sequence
from contextlib import closing
from uuid import UUID, uuid4

import pytest
from callers import BOUNDARY, FORM, Part, form
from outsiders import Outsider, Reply, callback, joined, newcomer, reply

NAMED = b'Content-Disposition: form-data; name="files"; '


def names(answer: Reply) -> list[str]:
    assert answer.status == 200, answer.body
    return [file["name"] for file in answer.json["files"]]


def upload_named(workspace: Outsider, *parameters: bytes) -> Reply:
    """One file for each of these parameters of a Content-Disposition."""
    return workspace.upload(*(Part(headers=[NAMED + one]) for one in parameters))


def test_the_answer_has_the_files_in_the_order_of_the_parts(workspace: Outsider):
    answer = workspace.upload(
        Part(b"12", name="b.txt"), Part(b"1", name="a b.png", mimetype="image/png")
    )

    assert answer.status == 200
    assert [(file["name"], file["mimeType"], file["size"]) for file in answer.json["files"]] == [
        ("b.txt", "text/plain", 2),
        ("a_b.png", "image/png", 1),
    ]
    for file in answer.json["files"]:
        prefix, _, file_id = file["uri"].rpartition("/")
        assert prefix == f"platform-pending:{workspace.id}"
        assert str(UUID(file_id)) == file_id


def test_the_workspace_and_the_admin_may_upload(
    workspace: Outsider, other: Outsider, admin: Outsider
):
    callers = (workspace, admin, other, admin.with_token(""))

    answers = [caller.upload(Part(), to=workspace) for caller in callers]

    assert [answer.status for answer in answers] == [200, 200, 401, 401]


def test_a_push_workspace_is_sent_the_form_with_its_secret(url: str):
    with callback() as pushed:
        stranger = newcomer(url)
        registration = stranger.register(delivery_mode="push", url=pushed.url)
        workspace = stranger.with_token(registration.json["auth_token"])

        workspace.upload(Part(b"some bytes"))

    (delivered,) = pushed.delivered
    assert delivered.path == "/internal/chat/uploads/ingest"
    secret = registration.json["platform_inbound_secret"]
    assert delivered.headers["Authorization"] == f"Bearer {secret}"
    assert delivered.headers["Content-Type"] == FORM
    assert delivered.body == form(Part(b"some bytes"))


def test_the_answer_of_a_push_workspace_is_the_answer(url: str):
    with callback() as pushed:
        workspace = joined(url, delivery_mode="push", url=pushed.url)
        pushed.status, pushed.answer = 418, b'{"error": "I am a teapot"}'

        answer = workspace.upload(Part())

    assert (answer.status, answer.body) == (418, pushed.answer)


def test_a_push_workspace_that_cannot_be_reached_is_a_502(url: str):
    with callback() as gone:
        nowhere = gone.url
    workspace = joined(url, delivery_mode="push", url=nowhere)

    answer = workspace.upload(Part())

    assert (answer.status, answer.error) == (502, "workspace unreachable")


def test_limits_are_public(url: str):
    answer = Outsider(url).get("/uploads/limits")

    assert answer.status == 200
    assert answer.json == {
        "per_file_bytes": 26_214_400,
        "per_request_bytes": 52_428_800,
        "max_attachments_per_message": answer.json["max_attachments_per_message"],
    }
    assert 1 <= answer.json["max_attachments_per_message"] <= 64


def test_a_file_above_the_limit_is_a_413_with_its_name_and_size(workspace: Outsider):
    limit = 26_214_400

    answer = workspace.upload(Part(b"fine"), Part(bytes(limit + 1), name="too large.bin"))

    assert answer.status == 413
    assert answer.json["filename"] == "too_large.bin"
    assert (answer.json["size"], answer.json["max"]) == (limit + 1, limit)
    assert workspace.rows() == []


def test_a_request_above_the_limit_is_a_413_with_the_limit(workspace: Outsider):
    """Its length is enough to refuse it; nothing of the body is read."""
    with closing(workspace.connect()) as connection:
        connection.putrequest("POST", f"{workspace.path}/chat/uploads")
        connection.putheader("Authorization", f"Bearer {workspace.token}")
        connection.putheader("Content-Type", FORM)
        connection.putheader("Content-Length", str(200 * 1024 * 1024))
        connection.endheaders()
        answer = reply(connection)

    assert (answer.status, answer.json["max"]) == (413, 52_428_800)


@pytest.mark.parametrize(
    "body",
    [
        form(*[Part(b"x")] * 65),
        form(Part(field="file")),
        form(Part(b"good"), Part(b"")),
        form(Part(), closed=False),
        b"not a form",
        b"",
    ],
    ids=["too many", "no files", "an empty one", "unfinished", "no form", "nothing"],
)
def test_a_form_that_cannot_be_accepted_is_a_400_and_stores_nothing(
    workspace: Outsider, body: bytes
):
    answer = workspace.upload_raw(body)

    assert answer.status == 400
    assert answer.error
    assert workspace.rows() == []
    assert workspace.get(f"{workspace.path}/pending-uploads").json["uploads"] == []


def test_another_content_type_is_a_400(workspace: Outsider):
    for kind in ("application/json", "multipart/form-data", "text/plain"):
        assert workspace.upload_raw(form(Part()), Content_Type=kind).status == 400, kind


def test_an_unknown_workspace_is_a_404_and_a_bad_id_a_400(admin: Outsider):
    unknown = Outsider(admin.url, admin.token, str(uuid4()))
    wrong = Outsider(admin.url, admin.token, "not-a-uuid")

    assert unknown.upload(Part()).status == 404
    assert wrong.upload(Part()).status == 400


def test_the_extended_name_wins_if_it_is_well_formed(workspace: Outsider):
    answer = upload_named(
        workspace,
        b"filename=\"plain.txt\"; filename*=UTF-8''na%C3%AFve%20plan.txt",
        b"filename*=utf-8'en'%E2%82%AC.txt; filename=\"plain.txt\"",
        b"filename*=ISO-8859-1''caf%E9.txt",
    )

    assert names(answer) == ["na_ve_plan.txt", "_.txt", "caf_.txt"]
    people = [file["display_name"] for file in answer.json["files"]]
    assert people == ["na\u00efve plan.txt", "\u20ac.txt", "caf\u00e9.txt"]


def test_a_malformed_extended_name_is_ignored(workspace: Outsider):
    answer = upload_named(
        workspace,
        b"filename=\"plain.txt\"; filename*=UTF-8''%ZZ.txt",
        b"filename=\"plain.txt\"; filename*=UTF-8''%FF%FE.txt",
        b'filename="plain.txt"; filename*=no-quotes.txt',
        b"filename=\"plain.txt\"; filename*=klingon''x.txt",
    )

    assert names(answer) == ["plain.txt"] * 4


def test_a_name_that_is_not_utf_8_is_read_as_latin_1(workspace: Outsider):
    answer = upload_named(workspace, b'filename="caf\xe9 \xfc.txt"', b'filename="caf\xc3\xa9.txt"')

    assert names(answer) == ["caf___.txt", "caf_.txt"]
    people = [file["display_name"] for file in answer.json["files"]]
    assert people == ["caf\u00e9 \u00fc.txt", "caf\u00e9.txt"]


def test_a_part_named_files_without_a_filename_is_a_400(workspace: Outsider):
    """A script that writes `-F files=report.pdf` and forgets the @ learns that nothing was sent."""
    answer = workspace.upload(Part(), Part(name=None))

    assert answer.status == 400
    assert workspace.rows() == []


def test_headers_of_a_part_may_end_with_a_bare_line_feed(workspace: Outsider):
    body = (
        f"--{BOUNDARY}\r\n"
        'Content-Disposition: form-data; name="files"; filename="lf.txt"\n'
        "Content-Type: image/png\n\n"
        f"content\r\n--{BOUNDARY}--\r\n"
    )

    answer = workspace.upload_raw(body.encode())

    assert names(answer) == ["lf.txt"]
    assert answer.json["files"][0]["mimeType"] == "image/png"
    (row,) = workspace.rows()
    assert workspace.fetch(row["request_body"]["file_id"]).body == b"content"


CLEANED = {
    "report.pdf": "report.pdf",
    "../../etc/passwd": "passwd",
    "two words.txt": "two_words.txt",
    "50% (1)+[x].txt": "50___1___x_.txt",
    "\u65e5\u672c.txt": "__.txt",
    "x" * 150 + ".tar.gz": "x" * 97 + ".gz",
    "x" * 90 + "." + "e" * 15: "x" * 84 + "." + "e" * 15,
    "x" * 90 + "." + "e" * 16: "x" * 90 + "." + "e" * 9,
    "y" * 101: "y" * 100,
    ".": "file",
    "..": "file",
    ".env": ".env",
}


def test_names_are_cleaned_by_the_rule(workspace: Outsider):
    answer = workspace.upload(*(Part(name=name) for name in CLEANED))

    assert names(answer) == list(CLEANED.values())


def test_quotes_and_backslashes_are_read_as_clients_write_them(workspace: Outsider):
    """Go and Python escape both with a backslash; a browser sends a backslash as it is."""
    answer = upload_named(
        workspace,
        b'filename="a\\"b.txt"',
        b'filename="a\\\\b.txt"',
        b'filename="a\\b.txt"',
        b'filename="C:\\Users\\me\\a.txt"',
    )

    assert names(answer) == ["a_b.txt", "a_b.txt", "a_b.txt", "C__Users_me_a.txt"]


TYPES: Sequence[tuple[str | None, str]] = [
    ("text/html; charset=utf-8", "text/html"),
    ("  image/png ", "image/png"),
    ("image/svg+xml", "image/svg+xml"),
    (None, ""),
    ("", ""),
    ("; charset=utf-8", ""),
    ("nonsense", "application/octet-stream"),
    ("a/b/c", "application/octet-stream"),
    ("/png", "application/octet-stream"),
    ("image/", "application/octet-stream"),
    ("text/pl ain", "application/octet-stream"),
]


def test_types_are_cleaned_by_the_rule(workspace: Outsider):
    answer = workspace.upload(*(Part(mimetype=given) for given, _ in TYPES))

    assert [file["mimeType"] for file in answer.json["files"]] == [clean for _, clean in TYPES]


def test_a_form_without_a_length_is_accepted(workspace: Outsider):
    """Go's http.Client sends a body from a pipe in chunks."""
    body = form(Part(b"piped"))
    with closing(workspace.connect()) as connection:
        headers = {"Authorization": f"Bearer {workspace.token}", "Content-Type": FORM}
        pieces = (body[at : at + 40] for at in range(0, len(body), 40))
        connection.request(
            "POST", f"{workspace.path}/chat/uploads", pieces, headers, encode_chunked=True
        )
        answer = reply(connection)

    assert names(answer) == ["a.txt"]


def test_the_parts_of_other_fields_are_ignored(workspace: Outsider):
    """A canvas may send a caption beside its files."""
    answer = workspace.upload(Part(b"a caption", name=None, field="caption"), Part())

    assert names(answer) == ["a.txt"]


def test_a_boundary_may_be_quoted_and_parts_may_have_other_headers(workspace: Outsider):
    part = Part(
        headers=[
            b"content-type: text/plain",
            b"Content-Transfer-Encoding: binary",
            b'content-disposition: form-data; filename="a.txt"; name=files',
        ]
    )

    answer = workspace.upload(part, Content_Type=f'multipart/form-data; boundary="{BOUNDARY}"')

    assert names(answer) == ["a.txt"]
    assert answer.json["files"][0]["mimeType"] == "text/plain"
