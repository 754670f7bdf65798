"""The requests that the SDK builds, and how it parses the answers."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, strategies as st

from restante import wire
from restante.client import calls
from restante.client.calls import Call, Cursor, Part
from restante.client.http_replies import Reply, body_of
from restante.errors import AnswerInvalid, RestanteError
from restante.ids import ActivityId, FileId, WorkspaceId

WORKSPACE = WorkspaceId(UUID("11111111-2222-3333-4444-555555555555"))
FILE = FileId(UUID("aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"))
ROW = ActivityId(UUID("01234567-89ab-cdef-0123-456789abcdef"))
HOME = f"/workspaces/{WORKSPACE}"
MESSAGE = {"jsonrpc": "2.0", "method": "message/send"}
ONE_FILE = [Part("a.txt", "text/plain", 3)]

ALL_CALLS: dict[str, Call[Any]] = {
    "register": calls.register(WORKSPACE, "laptop"),
    "heartbeat": calls.heartbeat(WORKSPACE, 2, "reading"),
    "workspaces": calls.workspaces(None),
    "feed": calls.feed(WORKSPACE, None, limit=7),
    "acknowledge_feed": calls.acknowledge_feed(WORKSPACE, Cursor(9)),
    "send_message": calls.send_message(WORKSPACE, MESSAGE),
    "pending": calls.pending(WORKSPACE),
    "content": calls.content(WORKSPACE, FILE, 0),
    "acknowledge": calls.acknowledge(WORKSPACE, FILE),
    "reopen": calls.reopen(WORKSPACE, FILE),
    "upload": calls.upload(WORKSPACE, ONE_FILE, key="k" * 32, ttl_seconds=None),
}


def row(seq: int = 1, **other: Any) -> dict[str, Any]:
    """A feed row as JSON."""
    fields: dict[str, Any] = {
        "id": str(ROW),
        "workspace_id": str(WORKSPACE),
        "activity_type": "a2a_receive",
        "source_id": None,
        "target_id": str(WORKSPACE),
        "method": "message/send",
        "summary": "message/send",
        "request_body": MESSAGE,
        "response_body": None,
        "duration_ms": None,
        "status": "ok",
        "error_detail": None,
        "created_at": "2026-01-02T03:04:05Z",
        "seq": seq,
    }
    return fields | other


def replied(body: object, status: int = 200, **headers: str) -> Reply:
    """A reply; header names are written with _ for -."""
    named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
    return Reply(status, named, body if isinstance(body, bytes) else msgspec.json.encode(body))


# Requests


@pytest.mark.parametrize(
    ("name", "method", "path", "query", "repeatable"),
    [
        ("register", "POST", "/registry/register", {}, False),
        ("heartbeat", "POST", "/registry/heartbeat", {}, True),
        ("workspaces", "GET", "/admin/workspaces", {"limit": "500"}, True),
        ("feed", "GET", HOME + "/activity", {"limit": "7"}, True),
        ("acknowledge_feed", "POST", HOME + "/activity/ack", {}, True),
        ("send_message", "POST", HOME + "/a2a", {}, False),
        ("pending", "GET", HOME + "/pending-uploads", {"limit": "50"}, True),
        ("content", "GET", f"{HOME}/pending-uploads/{FILE}/content", {}, True),
        ("acknowledge", "POST", f"{HOME}/pending-uploads/{FILE}/ack", {}, True),
        ("reopen", "POST", f"{HOME}/pending-uploads/{FILE}/reopen", {}, False),
        ("upload", "POST", HOME + "/chat/uploads", {}, True),
    ],
)
def test_each_call_goes_to_its_route(
    name: str, method: str, path: str, query: dict[str, str], repeatable: bool
):
    """Only idempotent requests are repeatable."""
    call = ALL_CALLS[name]

    assert (call.method, call.path, call.query) == (method, path, query)
    assert call.repeatable is repeatable


@pytest.mark.parametrize(
    ("name", "body"),
    [
        (
            "register",
            {
                "id": str(WORKSPACE),
                "agent_card": {"name": "laptop"},
                "delivery_mode": "poll",
                "url": None,
            },
        ),
        (
            "heartbeat",
            {"workspace_id": str(WORKSPACE), "active_tasks": 2, "current_task": "reading"},
        ),
        ("acknowledge_feed", {"acked_seq": 9}),
        ("send_message", MESSAGE),
    ],
)
def test_bodies_are_json(name: str, body: dict[str, Any]):
    call = ALL_CALLS[name]

    assert call.headers["Content-Type"] == "application/json"
    assert msgspec.json.decode(call.body or b"") == body


def test_a_card_keeps_its_fields_and_gets_the_name():
    call = calls.register(WORKSPACE, "laptop", card={"name": "old", "skills": ["read"]})

    card = msgspec.json.decode(call.body or b"")["agent_card"]
    assert card == {"name": "laptop", "skills": ["read"]}


@pytest.mark.parametrize(
    ("cursor", "query"),
    [
        (None, {}),
        (Cursor(), {"since_seq": "0"}),
        (Cursor(7), {"since_seq": "7"}),
        (Cursor(7, ROW), {"since_id": str(ROW)}),
    ],
)
def test_a_cursor_is_sent_as_its_id_or_else_its_seq(cursor: Cursor | None, query: dict[str, str]):
    """An id detects that the feed was replaced; a seq works without a row."""
    call = calls.feed(WORKSPACE, cursor, limit=5)

    assert call.query == {"limit": "5"} | query


@pytest.mark.parametrize(("seconds", "text"), [(30, "30"), (0.25, "0.25"), (1e-9, "1e-09")])
def test_a_long_poll_extends_the_read_timeout(seconds: float, text: str):
    """The requested wait must not count as silence."""
    call = calls.feed(WORKSPACE, None, wait_seconds=seconds, limit=5)

    assert call.query["wait"] == text
    assert call.wait_seconds == seconds


def test_later_pages_start_after_an_id():
    assert calls.pending(WORKSPACE, after=FILE).query["after"] == str(FILE)
    assert calls.workspaces(WORKSPACE).query["after"] == str(WORKSPACE)


def test_a_resumed_download_asks_for_a_range():
    assert calls.content(WORKSPACE, FILE, 0).headers == {}
    assert calls.content(WORKSPACE, FILE, 10).headers == {"Range": "bytes=10-"}


def test_a_time_to_live_is_sent_only_if_given():
    call = calls.upload(WORKSPACE, ONE_FILE, key="k" * 32, ttl_seconds=60)

    assert call.query == {"ttl_seconds": "60"}
    assert call.headers[wire.IDEMPOTENCY_KEY] == "k" * 32


# Replies


@pytest.mark.parametrize("page", [b"<html>", b"  \n<!DOCTYPE html><p>Welcome to our network"])
def test_a_web_page_is_recognized(page: bytes):
    """Login pages of hotel networks come with status 200."""
    with pytest.raises(AnswerInvalid, match="a web page"):
        ALL_CALLS["feed"].read(replied(page))


def test_answers_are_parsed():
    read = {
        "register": {"status": "registered", "delivery_mode": "poll", "auth_token": "t"},
        "heartbeat": {"status": "ok"},
        "acknowledge_feed": {"acked_seq": 9},
        "acknowledge": {"acked": True, "raced": True},
        "pending": {"uploads": []},
        "workspaces": {"workspaces": [], "next_after": str(WORKSPACE)},
        "upload": {"files": [{"uri": "u", "name": "n", "mimeType": "m", "size": 1}]},
        "send_message": {"jsonrpc": "2.0", "result": 1},
    }

    got = {name: ALL_CALLS[name].read(replied(body)) for name, body in read.items()}

    assert got["register"].auth_token == "t"
    assert got["acknowledge_feed"].acked_seq == 9
    assert got["acknowledge"] == wire.Acked(acked=True, raced=True)
    assert got["workspaces"].next_after == WORKSPACE
    assert got["upload"].files == [wire.StagedFile("u", "n", "m", 1)]
    assert got["send_message"] == {"jsonrpc": "2.0", "result": 1}


def test_rows_are_sorted_oldest_first():
    reply = replied(
        [row(9), row(8), row(7)],
        X_Restante_Lowest_Seq="3",
        X_Restante_Latest_Seq="9",
        X_Restante_Acked_Seq="6",
    )

    page = ALL_CALLS["feed"].read(reply)

    assert [found.seq for found in page.rows] == [7, 8, 9]
    assert page.rows[0].created_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert (page.lowest_seq, page.latest_seq, page.acked_seq) == (3, 9, 6)


@pytest.mark.parametrize("text", ["", "-1", "1.5", "٣", "9" * 19, "nine"])
def test_invalid_sequence_headers_are_ignored(text: str):
    """Other servers may not send them; their rows are still used."""
    reply = replied([row(4)], X_Restante_Lowest_Seq=text, X_Restante_Latest_Seq=text)

    page = ALL_CALLS["feed"].read(reply)

    assert (page.lowest_seq, page.latest_seq, page.acked_seq) == (1, 4, 0)


@pytest.mark.parametrize("seq", [0, -1, 2**63, 10**30])
def test_a_row_with_an_invalid_seq_is_refused(seq: int):
    """The seq is stored in SQLite and sent back, so it must fit into 64 bits."""
    with pytest.raises(AnswerInvalid, match="invalid seq"):
        ALL_CALLS["feed"].read(replied([row(seq)]))


@pytest.mark.parametrize("sent", [b'"\xff"', b"1e999", b"9" * 5000], ids=len)
def test_the_body_of_a_row_is_decoded_on_access(sent: bytes):
    """An invalid body does not invalidate its page; reading it raises AnswerInvalid."""
    good = msgspec.json.encode([row()])
    reply = replied(good.replace(msgspec.json.encode(MESSAGE), sent))
    (found,) = ALL_CALLS["feed"].read(reply).rows

    with pytest.raises(AnswerInvalid, match="cannot be understood"):
        body_of(found)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["files", "uploads", "code", "error", "seq", "id", "status"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
BODIES = st.binary(max_size=200) | JSON.map(msgspec.json.encode)
HEADERS = st.dictionaries(
    st.sampled_from(
        ["content-length", "content-range", "repr-digest", "retry-after", "location"]
        + [name.lower() for name in (wire.LOWEST_SEQ, wire.LATEST_SEQ, wire.ACKED_SEQ)]
    ),
    st.text(max_size=30),
)


@given(
    name=st.sampled_from(sorted(ALL_CALLS)),
    status=st.sampled_from([200, 206, 204, 301, 307, 400, 401, 404, 410, 429, 500, 503, 599]),
    headers=HEADERS,
    body=BODIES,
)
def test_any_answer_is_parsed_or_raises_a_restante_error(
    name: str, status: int, headers: dict[str, str], body: bytes
):
    """A program that catches RestanteError survives any server."""
    try:
        read = ALL_CALLS[name].read(Reply(status, headers, body))
    except RestanteError:
        return

    assert status in {200, 206}
    assert read is not None


@given(rows=st.lists(JSON, max_size=3))
def test_a_page_of_junk_is_refused(rows: list[Any]):
    if rows:
        with pytest.raises(AnswerInvalid):
            ALL_CALLS["feed"].read(replied(rows))
    else:
        assert not ALL_CALLS["feed"].read(replied(rows)).rows


def test_a_message_gets_an_id_of_its_own_unless_it_has_one():
    """A receiver can tell a message that was sent twice from two messages."""
    bare: dict[str, Any] = {"method": "message/send", "params": {"message": {"parts": []}, "x": 1}}
    own = {"method": "message/send", "params": {"message": {"messageId": "mine", "parts": []}}}

    first, second, kept = (
        msgspec.json.decode(calls.send_message(WORKSPACE, body).body or b"")
        for body in (bare, bare, own)
    )

    assert first["params"]["message"]["messageId"] != second["params"]["message"]["messageId"]
    assert first["params"]["x"] == 1
    assert kept == own
    assert "messageId" not in bare["params"]["message"]


@pytest.mark.parametrize("params", [None, [], "x", {}, {"message": "text"}, {"message": None}])
def test_a_body_without_a_message_object_is_sent_as_it_is(params: Any):
    body = {"method": "x", "params": params}

    assert msgspec.json.decode(calls.send_message(WORKSPACE, body).body or b"") == body
