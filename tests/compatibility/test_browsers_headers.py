"""Browsers on another origin, and the HTTP that scripts and old libraries speak."""

import json
import socket
from contextlib import closing
from urllib.parse import urlsplit

import pytest
from callers import FORM, Part, form
from outsiders import Outsider, message, reply

CANVAS = "http://localhost:3000"
STRANGE = "https://evil.example"


def listed(header: str | None) -> set[str]:
    return {one.strip().lower() for one in (header or "").split(",")}


def preflight(workspace: Outsider, path: str, method: str, headers: str, origin: str = CANVAS):
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": method,
        "Access-Control-Request-Headers": headers,
    }
    return workspace.with_token("").ask("OPTIONS", workspace.path + path, headers=asked)


CALLS = [
    ("/chat/uploads", "POST", "authorization,idempotency-key"),
    ("/chat/uploads", "POST", "authorization,x-workspace-id"),
    ("/a2a", "POST", "authorization,content-type,x-workspace-id"),
    ("/activity", "GET", "authorization"),
    ("/events", "GET", "authorization,cache-control,last-event-id"),
    ("/pending-uploads/{file}/content", "GET", "authorization,range"),
    ("/pending-uploads/{file}/ack", "POST", "authorization"),
    ("/notify", "POST", "authorization,content-type"),
    ("", "PATCH", "authorization,content-type"),
    ("", "DELETE", "authorization"),
]


@pytest.mark.parametrize(("path", "method", "headers"), CALLS)
def test_a_preflight_of_the_canvas_is_a_204(
    workspace: Outsider, path: str, method: str, headers: str
):
    answer = preflight(workspace, path.format(file=workspace.id), method, headers)

    assert (answer.status, answer.body) == (204, b"")
    assert answer.headers["Access-Control-Allow-Origin"] == CANVAS
    assert answer.headers["Access-Control-Allow-Credentials"] == "true"
    assert method.lower() in listed(answer.headers["Access-Control-Allow-Methods"])
    assert listed(headers) <= listed(answer.headers["Access-Control-Allow-Headers"])
    assert "origin" in listed(answer.headers["Vary"])


def test_an_origin_that_is_not_listed_is_allowed_nothing(workspace: Outsider):
    for origin in (STRANGE, "null", "http://localhost:3001", "http://localhost:3000.evil.example"):
        asked = preflight(workspace, "/activity", "GET", "authorization", origin)
        read = workspace.ask("GET", f"{workspace.path}/activity", headers={"Origin": origin})

        for answer in (asked, read):
            assert "Access-Control-Allow-Origin" not in answer.headers, origin
            assert "Access-Control-Allow-Credentials" not in answer.headers


def test_answers_and_refusals_can_be_read_by_the_canvas(workspace: Outsider):
    """Without the header on a refusal, a page sees a network error and no status."""
    sent = {"Origin": CANVAS}

    read = workspace.ask("GET", f"{workspace.path}/activity", headers=sent)
    refused = workspace.with_token("").ask("GET", f"{workspace.path}/activity", headers=sent)
    missing = workspace.ask("GET", "/nowhere", headers=sent)

    assert (read.status, refused.status, missing.status) == (200, 401, 404)
    for answer in (read, refused, missing):
        assert answer.headers["Access-Control-Allow-Origin"] == CANVAS
        assert "origin" in listed(answer.headers["Vary"])


def test_a_refusal_is_json_with_a_sentence_and_a_code(workspace: Outsider):
    for answer in (
        workspace.with_token("").feed(),
        workspace.feed(source="x"),
        workspace.fetch(workspace.id),
        workspace.get("/nowhere"),
    ):
        assert answer.headers.get_content_type() == "application/json"
        assert answer.json["error"]
        assert answer.json["code"].replace("_", "").isalpha()


def test_the_scheme_of_a_token_has_no_case(workspace: Outsider):
    for scheme in ("Bearer", "bearer", "BEARER"):
        own = {"Authorization": f"{scheme} {workspace.token}"}
        answer = workspace.with_token("").ask("GET", f"{workspace.path}/activity", headers=own)
        assert answer.status == 200, scheme


def test_one_connection_serves_many_requests(workspace: Outsider):
    own = {"Authorization": f"Bearer {workspace.token}"}
    with closing(workspace.connect()) as connection:
        connection.connect()
        first = connection.sock

        for body in (None, b"", b"ignored"):
            connection.request("GET", f"{workspace.path}/activity", body, own)
            assert reply(connection).status == 200
        connection.request("POST", f"{workspace.path}/chat/uploads", b"wrong", own)
        assert reply(connection).status == 400
        connection.request("GET", f"{workspace.path}/activity", None, own)
        assert reply(connection).status == 200
        assert connection.sock is first


def test_http_1_0_is_answered_and_closed(workspace: Outsider):
    own = f"Authorization: Bearer {workspace.token}"

    answer = exchange(workspace, f"GET {workspace.path}/activity HTTP/1.0\r\n{own}\r\n\r\n")

    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0].endswith(b" 200 OK")
    assert b"transfer-encoding" not in head.lower()
    assert body == b"[]"


def exchange(workspace: Outsider, request: str) -> bytes:
    """Send bytes as they are, and read until the server closes."""
    where = urlsplit(workspace.url)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as raw:
        raw.sendall(request.encode())
        return b"".join(iter(lambda: raw.recv(65536), b""))


def test_curl_waits_for_a_100_before_a_large_body(workspace: Outsider):
    body = form(Part(b"x" * 2000))
    where = urlsplit(workspace.url)
    head = (
        f"POST {workspace.path}/chat/uploads HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Authorization: Bearer {workspace.token}\r\nContent-Type: {FORM}\r\n"
        f"Content-Length: {len(body)}\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as raw:
        raw.sendall(head.encode())
        interim = raw.recv(65536)
        raw.sendall(body)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))

    assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


def test_head_is_get_without_the_body(workspace: Outsider):
    workspace.file()
    (row,) = workspace.rows()
    content = f"{workspace.path}/pending-uploads/{row['request_body']['file_id']}/content"

    for path in (f"{workspace.path}/activity", content, "/metrics", "/health"):
        answer = workspace.ask("HEAD", path)
        assert (answer.status, answer.body) == (200, b""), path
    assert workspace.ask("HEAD", content).headers["Content-Length"] == "5"


def test_json_is_read_whatever_its_content_type(workspace: Outsider, admin: Outsider):
    """`curl -d` says that it is a form, and some clients say nothing."""
    for kind in ({"Content-Type": "application/x-www-form-urlencoded"}, {}):
        path = f"{workspace.path}/a2a"
        assert admin.ask("POST", path, json.dumps(message()), kind).status == 200, kind
    assert len(workspace.rows()) == 2


def test_unknown_fields_are_ignored(workspace: Outsider, other: Outsider):
    newer = {"version": 3, "capabilities": {"x": [1]}}
    beat = {"workspace_id": workspace.id, "active_tasks": 0, "current_task": ""}

    answers = [
        workspace.register(**newer),
        workspace.post("/registry/heartbeat", beat | newer),
        workspace.post(f"{workspace.path}/activity/ack", {"acked_seq": 0} | newer),
        other.send(message() | newer, to=workspace),
    ]

    assert [answer.status for answer in answers] == [200] * 4


def test_what_other_programs_add_to_an_address_does_not_matter(workspace: Outsider):
    """Plus and percent signs, an empty query, and a host in capitals."""
    workspace.file()
    own = {"Authorization": f"Bearer {workspace.token}", "Host": "LOCALHOST"}
    queries = ("?", "?type=a2a%5Freceive", "?&&limit=1&", "?limit=+1", "?limit=1&limit=1")

    for query in queries:
        answer = workspace.ask("GET", f"{workspace.path}/activity{query}", headers=own)
        assert (answer.status, len(answer.json)) == (200, 1), query
