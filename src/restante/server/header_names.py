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
    status, *lines = head.split(_END)
    return _END.join([status, *map(_line, lines)])


def _line(line: bytes) -> bytes:
    name, separator, value = line.partition(_SEPARATOR)
    return _usual(name) + separator + value


# The names are ours, and those of an answer that we relay: a short list.
@lru_cache
def _usual(name: bytes) -> bytes:
    text = name.decode("latin-1")
    return _OTHERS.get(text, text.title()).encode("latin-1")
