"""What the tests of hostile clients share."""

import re
from contextlib import suppress

from callers import BOUNDARY, Answer, Wire

MIB = 1024 * 1024
CLEAN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
DELIMITER = b"--" + BOUNDARY.encode()
DISPOSITION = b'Content-Disposition: form-data; name="files"; filename="a"'


def assert_refused(answer: Answer, *statuses: int) -> None:
    """Assert a refusal with a sentence and a code, 400 by default."""
    assert answer.status in (statuses or {400}), answer
    refusal = answer.json
    assert refusal["error"]
    assert re.fullmatch("[a-z_]+", refusal["code"])
    assert refusal["code"] != "internal"


async def pour(wire: Wire, piece: bytes, *, most: int) -> int:
    """Send the piece again and again until the server closes; returns how much was sent."""
    sent = 0
    with suppress(ConnectionError):
        while sent < most:
            await wire.send(piece)
            sent += len(piece)
    return sent
