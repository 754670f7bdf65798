"""The code of a refusal selects the error class, whatever else the answer contains."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from restante import errors
from restante.client import http_replies
from restante.client.http_replies import Reply
from restante.errors import (
    AnswerInvalid,
    CursorGone,
    FileTooLarge,
    RestanteError,
    ServerRefused,
    UploadGone,
    WorkspaceFull,
)
from restante.http.problems import STATUS


def refusal(status: int, said: Any, **headers: str) -> RestanteError:
    """The error of an answer; header names are written with _ for -."""
    named = {name.replace("_", "-").lower(): value for name, value in headers.items()}
    body = said if isinstance(said, bytes) else msgspec.json.encode(said)
    with pytest.raises(RestanteError) as caught:
        http_replies.raise_for_status(Reply(status, named, body))
    return caught.value


@pytest.mark.parametrize(("error", "status"), STATUS.items(), ids=str)
def test_every_error_of_the_server_is_raised_as_the_same_class(
    error: type[RestanteError], status: int
):
    """Both sides share the classes of restante.errors."""
    got = refusal(status, {"error": "It did not work.", "code": error.code})

    assert type(got) is error
    assert str(got) == "It did not work."


def test_extra_fields_become_facts():
    said = {"error": "Too large.", "code": "file_too_large", "filename": "a", "size": 3, "max": 2}

    got = refusal(413, said)

    assert isinstance(got, FileTooLarge)
    assert got.facts == {"filename": "a", "size": 3, "max": 2, "retry_after": 0}


@pytest.mark.parametrize("status", [200, 206])
def test_a_success_raises_nothing(status: int):
    http_replies.raise_for_status(Reply(status, {}, b"whatever"))


@pytest.mark.parametrize(
    "said",
    [
        {"error": "Gone.", "code": "upload_gone", "self": 1, "sentence": "x", "args": "y"},
        {"error": "Gone.", "code": "upload_gone", "facts": {"a": 1}, "list": [1], "null": None},
        {"error": "Gone.", "code": "upload_gone", "": 1, "not an identifier": 2, "ü": 3},
        {"error": "Gone.", "code": "upload_gone", "huge": "x" * 1_000_000, "number": 10**30},
        {"error": "Gone.", "code": "upload_gone", "retry_after": "soon", "status": "teapot"},
    ],
    ids=["self", "nested", "odd names", "huge", "ours"],
)
def test_hostile_fields_are_ignored(said: dict[str, Any]):
    got = refusal(404, said)

    assert isinstance(got, UploadGone)
    assert got.facts["retry_after"] == 0
    assert all(isinstance(fact, str | int | float) for fact in got.facts.values())


def test_an_unknown_code_is_kept_with_its_status():
    """A newer server may have codes that this client does not know."""
    got = refusal(418, {"error": "Short and stout.", "code": "teapot", "handle": 1})

    assert isinstance(got, ServerRefused)
    assert str(got) == "Short and stout."
    assert got.facts == {"handle": 1, "status": 418, "refused_as": "teapot", "retry_after": 0}


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"<html>Bad gateway</html>",
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 100_000,
        {},
        {"code": "upload_gone"},
        {"code": "upload_gone", "error": ""},
        {"code": "upload_gone", "error": None},
        {"code": "upload_gone", "error": ["Gone."]},
        {"code": ["upload_gone"], "error": ""},
    ],
    ids=lambda said: str(said)[:40],
)
def test_a_refusal_without_a_message_reports_its_status(said: Any):
    """A gateway answers with pages of its own."""
    got = refusal(502, said)

    assert isinstance(got, ServerRefused)
    assert str(got) == "The server answered with status 502 and no reason."
    assert got.facts["status"] == 502


def test_the_body_cannot_overwrite_the_status():
    """The status decides whether a request is retried."""
    got = refusal(400, {"error": "No.", "code": "?", "status": 503, "refused_as": "x"})

    assert got.facts["status"] == 400
    assert got.facts["refused_as"] == "?"


@pytest.mark.parametrize("code", ["folder_full", "command_failed", "server_unreachable"])
def test_client_side_codes_from_a_server_are_not_believed(code: str):
    assert type(refusal(404, {"error": "Your disk is full.", "code": code})) is ServerRefused


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7", 7),
        ("0", 0),
        ("-1", 0),
        ("1.5", 0),
        ("٣", 0),
        ("", 0),
        ("Wed, 21 Oct 2026 07:28:00 GMT", 0),
        ("9" * 40, 0),
    ],
)
def test_retry_after_is_a_number_of_seconds_or_ignored(text: str, seconds: int):
    got = refusal(429, {"error": "Full.", "code": "workspace_full"}, Retry_After=text)

    assert isinstance(got, WorkspaceFull)
    assert got.facts["retry_after"] == seconds


def test_cursor_gone_carries_the_bounds_of_the_feed():
    said = {"error": "since_id.", "code": "cursor_gone", "lowest_seq": 5, "latest_seq": 9}

    got = refusal(410, said)

    assert isinstance(got, CursorGone)
    assert (got.facts["lowest_seq"], got.facts["latest_seq"]) == (5, 9)


@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 307, 308])
def test_redirects_are_reported_and_not_followed(status: int):
    """The token must not go to another server."""
    got = refusal(status, b"", Location="https://elsewhere.invalid/")

    assert isinstance(got, AnswerInvalid)
    assert "https://elsewhere.invalid/" in str(got)


def test_a_redirect_without_a_location_is_refused():
    assert isinstance(refusal(302, b""), AnswerInvalid)


@pytest.mark.parametrize("place", ["error", "location"])
def test_control_characters_are_removed_from_messages(place: str):
    """Messages are printed to terminals."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31mred\u202e\u2028" + "x" * 10_000

    got = (
        refusal(400, {"error": evil, "code": "bad_request"})
        if place == "error"
        else refusal(302, b"", Location=evil)
    )

    assert str(got).isprintable()
    assert len(str(got)) < 1000


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.floats() | st.booleans()))
def test_any_fields_can_be_parsed(fields: dict[str, Any]):
    got = refusal(404, {**fields, "code": "upload_gone", "error": "Gone."})

    assert isinstance(got, UploadGone)


def test_codes_are_unique():
    """A shared code would be raised as the wrong class."""
    classes = [
        item
        for item in vars(errors).values()
        if isinstance(item, type) and issubclass(item, RestanteError) and item is not RestanteError
    ]

    assert len({item.code for item in classes}) == len(classes)
