"""
The content of a message: its text, and the URIs of the files it refers to.

A sender refers to a file as `platform-pending:<workspace>/<file>`, its place on the server.  After
it was received, the URI is rewritten to `workspace:<path>`.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from restante.delivery.rules import PENDING
from restante.ids import FileId, WorkspaceId, as_uuid

# Where a message may have its `parts`.
_PLACES = ((), ("params",), ("params", "message"))

Lookup = Callable[[str], str | None]


def pending_file(uri: str, workspace_id: WorkspaceId) -> FileId | None:
    """The file of this workspace that a URI refers to, None for any other URI."""
    owner, _, file = uri.removeprefix(PENDING).partition("/")
    file_id = as_uuid(file)
    if not uri.startswith(PENDING) or file_id is None or as_uuid(owner) != workspace_id:
        return None
    return FileId(file_id)


def rewritten(body: Any, known: Lookup) -> Any:
    """
    Return a copy of a message with its known file URIs replaced.

    Only `parts`, `params.parts` and `params.message.parts` are searched.
    """
    for place in _PLACES:
        body = _rewritten_at(body, place, known)
    return body


def text_of(body: Any) -> str:
    """The text of a message and the number of its files, for display."""
    parts = [part for place in _PLACES for part in _parts_at(body, place)]
    texts = [text for part in parts if isinstance(text := _field(part, "text"), str)]
    files = sum(_field(part, "file") is not None for part in parts)
    words = " ".join(texts) or "(no text)"
    return f"{words} (+{files} files)" if files else words


def _rewritten_at(body: Any, place: tuple[str, ...], known: Lookup) -> Any:
    if place:
        inner = _field(body, place[0])
        return (
            body if inner is None else _with(body, place[0], _rewritten_at(inner, place[1:], known))
        )
    parts = _parts_at(body, ())
    return _with(body, "parts", [_part(part, known) for part in parts]) if parts else body


def _with(holder: Any, name: str, value: Any) -> Any:
    return {**holder, name: value}


def _parts_at(body: Any, place: tuple[str, ...]) -> list[Any]:
    for name in place:
        body = _field(body, name)
    parts = _field(body, "parts")
    return cast("list[Any]", parts) if isinstance(parts, list) else []


def _part(part: Any, known: Lookup) -> Any:
    file = _field(part, "file")
    uri = _field(file, "uri")
    found = known(uri) if isinstance(uri, str) else None
    return part if found is None else {**part, "file": {**file, "uri": found}}


def _field(holder: Any, name: str) -> Any:
    return cast("Mapping[str, Any]", holder).get(name) if isinstance(holder, Mapping) else None
