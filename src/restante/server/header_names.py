"""The names of headers as people write them; uvicorn sends them in lower case."""

from functools import lru_cache

# Those whose words do not just begin with a capital.
_OTHERS = {
    "etag": "ETag",
    "www-authenticate": "WWW-Authenticate",
    "x-request-id": "X-Request-ID",
    "x-workspace-id": "X-Workspace-ID",
}
_SEPARATOR = b": "
_END = b"\r\n"


def with_usual_names(head: bytes) -> bytes:
    """
    The head of an answer with the names of its headers in the usual case.

    HTTP ignores the case, but scripts that search for `Content-Type` do not.
    """
    lines = head.split(_END)
    for number, line in enumerate(lines[1:-2], start=1):  # between the status and the empty line
        name, separator, value = line.partition(_SEPARATOR)
        lines[number] = _usual(name) + separator + value
    return _END.join(lines)


# The names are ours, and those of an answer that we relay: a short list.
@lru_cache
def _usual(name: bytes) -> bytes:
    text = name.decode("latin-1")
    return _OTHERS.get(text, text.title()).encode("latin-1")
