"""The feed as an existing poller reads it: parameters, order, cursors and the acknowledged mark."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from uuid import UUID, uuid4

import pytest
from callers import Part
from outsiders import Outsider, message

FIELDS = {
    "id",
    "workspace_id",
    "activity_type",
    "source_id",
    "target_id",
    "method",
    "summary",
    "request_body",
    "response_body",
    "duration_ms",
    "status",
    "error_detail",
    "created_at",
    "seq",
}


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


def test_a_file_is_a_row_with_these_values(workspace: Outsider):
    (file,) = workspace.upload(Part(b"12345", name="my plan.txt")).json["files"]

    (row,) = workspace.rows()

    assert row.keys() >= FIELDS
    expected = {
        "workspace_id": workspace.id,
        "activity_type": "a2a_receive",
        "method": "chat_upload_receive",
        "summary": "chat_upload_receive: my_plan.txt",
        "status": "ok",
        "source_id": None,
        "target_id": workspace.id,
    }
    assert expected.items() <= row.items()
    announced = {
        "file_id": file["uri"].rpartition("/")[2],
        "name": "my_plan.txt",
        "mimeType": "text/plain",
        "size": 5,
        "uri": file["uri"],
    }
    assert announced.items() <= row["request_body"].items()


def test_ids_times_and_numbers_have_the_types_of_the_protocol(workspace: Outsider):
    workspace.file()

    (row,) = workspace.rows()

    assert str(UUID(row["id"])) == row["id"]
    created = datetime.fromisoformat(row["created_at"])
    assert created.utcoffset() == timedelta(0)
    assert "T" in row["created_at"]
    assert type(row["seq"]) is int
    assert type(row["request_body"]["size"]) is int


def test_seq_increases_strictly_in_the_order_of_the_parts(workspace: Outsider, other: Outsider):
    workspace.upload(*(Part(name=f"{n}.txt") for n in range(3)))
    other.file()
    workspace.upload(Part(name="3.txt"))

    rows = workspace.rows()

    assert [row["request_body"]["name"] for row in rows] == ["3.txt", "2.txt", "1.txt", "0.txt"]
    seqs = [row["seq"] for row in rows]
    assert seqs == sorted(set(seqs), reverse=True)


def test_an_empty_feed_is_an_empty_array(workspace: Outsider):
    """A Go server could have written null, and a JavaScript client calls .map on it."""
    assert workspace.feed().body == b"[]"


def test_type_filters_by_activity_type(workspace: Outsider):
    workspace.file()

    assert len(workspace.rows(type="a2a_receive")) == 1
    assert workspace.rows(type="task_update") == []


def test_source_is_the_canvas_or_an_agent_and_nothing_else(workspace: Outsider, other: Outsider):
    workspace.file()
    other.send(message(), to=workspace)

    assert [row["source_id"] for row in workspace.rows(source="canvas")] == [None]
    assert [row["source_id"] for row in workspace.rows(source="agent")] == [other.id]
    assert workspace.feed(source="pigeon").status == 400


def test_limits_out_of_range_are_not_refused(workspace: Outsider):
    """A larger one counts as 500, and anything that is not a positive integer as 100."""
    for _ in range(8):
        workspace.upload(*[Part(b"x")] * 64)

    assert len(workspace.rows(limit=3)) == 3
    for large in (500, 501, 10**6):
        assert len(workspace.rows(limit=large)) == 500, large
    for wrong in (0, -1, "x", "1.5", "1e2"):
        assert len(workspace.rows(limit=wrong)) == 100, wrong
    assert len(workspace.rows()) == 100


def test_since_secs_is_a_positive_integer_of_at_most_30_days(workspace: Outsider):
    workspace.file()

    assert len(workspace.rows(since_secs=60)) == 1
    assert len(workspace.rows(since_secs=10**9)) == 1
    for wrong in (0, -1, "x", "1.5"):
        assert workspace.feed(since_secs=wrong).status == 400, wrong


def test_peer_id_selects_the_rows_exchanged_with_one_workspace(
    workspace: Outsider, other: Outsider, admin: Outsider
):
    workspace.file()
    other.send(message("from the peer"), to=workspace)
    admin.send(message("from the user"), to=workspace)

    (row,) = workspace.rows(peer_id=other.id)

    assert row["source_id"] == other.id
    assert len(workspace.rows(peer_id=workspace.id)) == 3  # the target of each
    assert workspace.rows(peer_id=str(uuid4())) == []
    assert workspace.feed(peer_id="x").status == 400


def test_before_ts_pages_back_newest_first(workspace: Outsider):
    for _ in range(4):
        workspace.file()
    rows = workspace.rows()

    pages = [workspace.rows(limit=1)]
    for _ in rows[1:]:
        pages.append(workspace.rows(limit=1, before_ts=pages[-1][-1]["created_at"]))

    assert [row for page in pages for row in page] == rows
    assert workspace.rows(before_ts=rows[1]["created_at"]) == rows[2:]
    assert workspace.rows(before_ts="2001-01-01T00:00:00Z") == []


def test_before_ts_is_a_time_of_rfc_3339_in_any_zone(workspace: Outsider):
    workspace.file()
    soon = datetime.now(UTC) + timedelta(minutes=1)
    zones = (UTC, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-8)))

    for zone in zones:
        local = soon.astimezone(zone)
        assert len(workspace.rows(before_ts=local.isoformat())) == 1
        assert workspace.rows(before_ts=(local - timedelta(hours=1)).isoformat()) == []
    assert len(workspace.rows(before_ts=f"{soon:%Y-%m-%dT%H:%M:%S}.123456789Z")) == 1
    for wrong in ("yesterday", "2026-13-01T00:00:00Z", "1700000000", "2026-01-01"):
        assert workspace.feed(before_ts=wrong).status == 400, wrong


def test_empty_parameters_count_as_absent_and_unknown_ones_are_ignored(workspace: Outsider):
    workspace.upload(Part(), Part())
    plain = workspace.rows()
    parameters = ("type", "since_id", "source", "limit", "since_secs", "peer_id", "before_ts")

    for name in parameters:
        assert workspace.rows(**{name: ""}) == plain, name
    assert workspace.rows(include="everything", _="1700000000") == plain
    assert workspace.get(f"{workspace.path}/activity?").json == plain


def test_without_a_cursor_the_newest_come_first_and_with_one_the_oldest(workspace: Outsider):
    workspace.upload(*[Part()] * 4)
    newest_first = workspace.rows()

    after = workspace.rows(since_id=newest_first[2]["id"])

    assert ids(after) == ids(newest_first[:2])[::-1]
    assert workspace.rows(since_id=newest_first[0]["id"]) == []
    assert workspace.rows(since_id=newest_first[3]["id"], limit=1) == [newest_first[2]]


def test_a_cursor_may_be_written_in_capitals(workspace: Outsider):
    workspace.upload(Part(), Part())
    newest, oldest = workspace.rows()

    assert workspace.rows(since_id=oldest["id"].upper()) == [newest]


def test_a_cursor_that_is_not_a_row_of_this_feed_is_gone(workspace: Outsider, other: Outsider):
    """Never an empty page: a poller would wait behind it for ever."""
    workspace.file()
    other.file()
    (theirs,) = other.rows()

    answers = [
        workspace.feed(since_id=cursor, **also)
        for cursor in (str(uuid4()), theirs["id"])
        for also in ({}, {"type": "a2a_receive"}, {"source": "canvas"}, {"limit": "x"})
    ]

    assert {answer.status for answer in answers} == {410}
    assert len({answer.body for answer in answers}) == 1
    assert "since_id" in answers[0].error
    assert "omit" in answers[0].error.lower()


@pytest.mark.parametrize("cursor", ["x", "17", "null", "00000000-0000-0000-0000-00000000000g"])
def test_a_cursor_that_is_not_a_uuid_is_a_400(workspace: Outsider, cursor: str):
    answer = workspace.feed(since_id=cursor)

    assert answer.status == 400
    assert "since_id" in answer.error


def test_a_wait_ends_at_once_when_there_is_a_row(workspace: Outsider):
    workspace.file()

    assert len(workspace.rows(wait=60)) == 1


def test_the_answer_says_which_rows_are_kept(workspace: Outsider):
    workspace.upload(Part(), Part())

    headers = workspace.feed().headers

    assert headers["X-Restante-Lowest-Seq"] == "1"
    assert headers["X-Restante-Latest-Seq"] == "2"


def test_the_mark_moves_forward_only_and_is_answered_under_both_names(
    workspace: Outsider, admin: Outsider
):
    workspace.upload(*[Part()] * 3)
    path = f"{workspace.path}/activity/ack"

    marks = [
        caller.post(path, {"acked_seq": seq}).json
        for caller, seq in ((workspace, 2), (workspace, 2), (workspace, 1), (admin, 3))
    ]

    assert [mark["acked_seq"] for mark in marks] == [2, 2, 2, 3]
    assert [mark["last_acked_seq"] for mark in marks] == [2, 2, 2, 3]
    assert len(workspace.rows()) == 3


def test_only_the_workspace_and_the_admin_read_and_mark_a_feed(
    workspace: Outsider, other: Outsider, admin: Outsider
):
    for token, status in ((admin.token, 200), (other.token, 401), ("", 401), ("stale", 401)):
        reader = workspace.with_token(token)
        mark = reader.post(f"{workspace.path}/activity/ack", {"acked_seq": 0})

        assert (reader.feed().status, mark.status) == (status, status)
