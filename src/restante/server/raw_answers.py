"""Answers that are sent before a request has reached the application, or instead of it."""

import json
import secrets

import structlog

log = structlog.get_logger()


def raw_answer(status: str, sentence: str, code: str, *headers: str) -> bytes:
    """A whole answer; the connection is closed after it."""
    body = json.dumps({"error": sentence, "code": code}, separators=(",", ":"))
    lines = [
        f"HTTP/1.1 {status}",
        "Content-Type: application/json",
        "Connection: close",
        f"Content-Length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", body]).encode()


def identified(answer: bytes, client: str | None) -> bytes:
    """The answer with an id of its own, under which it is logged."""
    request_id = secrets.token_hex(8)
    status = int(answer[9:12])
    # Whoever opens too many connections must not fill the log; a metric counts them.
    say = log.debug if status == 503 else log.info
    say("refused_unread", status=status, client=client, request_id=request_id)
    return answer.replace(b"\r\n\r\n", f"\r\nX-Request-ID: {request_id}\r\n\r\n".encode(), 1)
