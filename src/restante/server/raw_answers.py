"""Answers that are sent before a request has reached the application, or instead of it."""

import json


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
