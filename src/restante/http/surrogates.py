"""
Halves of surrogate pairs in JSON.

A text that a program cuts inside an emoji ends with the first half of a pair, such as `\\ud83d`.
JavaScript and Python send it so, and no UTF-8 can hold it.
"""

import json

# What is mended takes several times its size.
_MAX_BYTES = 1024 * 1024


def mended(body: bytes) -> bytes | None:
    """The JSON with U+FFFD for each half, as other servers read it; None if it is not JSON."""
    if len(body) > _MAX_BYTES:
        return None
    try:
        text = json.dumps(json.loads(body.decode()), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").encode()
