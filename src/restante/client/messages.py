"""
The content of a message: its text, and the files that it has or refers to.

A sender refers to a file as `platform-pending:<workspace>/<file>`, its place on the server.  After
it was received, the URI is rewritten to `workspace:<path>`.

What a workspace says to its user is a row with the method `notify`, which has no `request_body`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from uuid import uuid4

from restante import wire
from restante.client.http_replies import decoded
from restante.delivery.rules import PENDING, UPLOAD_METHOD
from restante.errors import AnswerInvalid, BadRequest
from restante.ids import FileId, WorkspaceId, as_uuid

# Requests that expect words as their answer.
_ANSWERABLE = {"message/send", "message/stream"}

# The role of an answer, so that two programs do not answer each other's answers for ever.
ANSWER_ROLE = "agent"

# Where a message may have its `parts`.
_PLACES = ((), ("params",), ("params", "message"))

Lookup = Callable[[str], str | None]

# A file to refer to: an accepted one, or a mapping with `uri` and `name`.
Attachment = wire.StagedFile | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Said:
    """A text, and the files with it: each with its `uri`, `name` or `bytes`."""

    text: str
    files: Sequence[Mapping[str, Any]] = ()


# Writing


def text_message(
    text: str,
    files: Iterable[Mapping[str, Any]] = (),
    *,
    message_id: str | None = None,
    context_id: str | None = None,
    role: str = "user",
) -> dict[str, Any]:
    """A JSON-RPC request that sends a text and file parts; raises BadRequest for no text."""
    message_id = message_id or str(uuid4())
    message = {
        "kind": "message",
        "messageId": message_id,
        "role": role,
        "parts": [
            {"kind": "text", "text": checked_text(text)},
            *({"kind": "file", "file": file} for file in files),
        ],
        **({"contextId": context_id} if context_id else {}),
    }
    params = {"message": message}
    return {"jsonrpc": "2.0", "id": message_id, "method": "message/send", "params": params}


def attached(file: Attachment) -> dict[str, Any]:
    """A file as a message refers to it."""
    if isinstance(file, Mapping):
        return dict(file)
    name = file.display_name or file.name  # servers of before send no display name
    typed = {"mimeType": file.mime_type} if file.mime_type else {}
    return {"uri": file.uri, "name": name, **typed, "size": file.size}


def checked_text(text: str) -> str:
    """The text; raises BadRequest if there is none, or if it cannot be sent."""
    if not text.strip():
        raise BadRequest("The text is empty: say something.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("The text is not valid UTF-8.") from error
    return text


def text_from(raw: bytes) -> str:
    """
    The text that a program printed, without the line breaks at its end.

    Raises BadRequest for bytes that are not text.
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise BadRequest("The text is not valid UTF-8: send binary data as a file.") from error
    if "\0" in text:
        raise BadRequest("The text contains a NUL byte: send binary data as a file.")
    return text.rstrip("\r\n")


# Reading


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


def said_in(body: Any) -> Said:
    """The text of a message and its files."""
    parts = [part for place in _PLACES for part in _parts_at(body, place)]
    texts = [text for part in parts if isinstance(text := _field(part, "text"), str)]
    files = [file for part in parts if (file := _object(_field(part, "file"))) is not None]
    return Said("\n".join(texts), files)


def said_in_answer(answer: Mapping[str, Any]) -> Said:
    """What a push workspace answered: a message, or a task with its status and artifacts."""
    result = answer.get("result")
    artifacts = _field(result, "artifacts")
    said = [
        said_in(result),
        said_in(_field(_field(result, "status"), "message")),
        *map(said_in, cast("list[Any]", artifacts) if isinstance(artifacts, list) else []),
    ]
    texts = "\n".join(one.text for one in said if one.text)
    return Said(texts, [file for one in said for file in one.files])


def error_in(answer: Mapping[str, Any]) -> str | None:
    """The JSON-RPC error of an answer, None if it has none."""
    error = answer.get("error")
    return None if error is None else str(_field(error, "message") or error)


def notified(row: wire.ActivityRow) -> Said | None:
    """What a workspace says to its user in a row, None for any other row."""
    if row.method != wire.NOTIFY or bytes(row.request_body) not in {b"", b"null"}:
        return None  # a workspace could send another one a message with this method
    try:
        body = decoded(row.response_body, cast("type[Any]", Any))
    except AnswerInvalid:
        return None
    text = _field(body, "result")
    return Said(text, said_in(body).files) if isinstance(text, str) else None


def is_same(said: Said, other: Said | None) -> bool:
    """Whether two have the same text and refer to the same files."""
    return other is not None and said.text == other.text and _uris(said) == _uris(other)


def _uris(said: Said) -> list[Any]:
    return [file.get("uri") for file in said.files]


def is_own(row: wire.ActivityRow) -> bool:
    """Whether the workspace itself wrote the row, for its user: an answer, or a file with one."""
    if row.method == UPLOAD_METHOD:
        return row.source_id == row.workspace_id
    return notified(row) is not None


def is_answerable(row: wire.ActivityRow, body: Any) -> bool:
    """Whether a message asks for an answer; an answer does not."""
    return row.method in _ANSWERABLE and _message_field(body, "role") != ANSWER_ROLE


def context_of(body: Any) -> str | None:
    """The conversation that a message belongs to, None if it does not say."""
    context_id = _message_field(body, "contextId")
    return context_id if isinstance(context_id, str) else None


def text_of(body: Any) -> str:
    """The text of a message and the number of its files, for display."""
    said = said_in(body)
    words = said.text or "(no text)"
    files = "1 file" if len(said.files) == 1 else f"{len(said.files)} files"
    return f"{words} (+{files})" if said.files else words


def _message_field(body: Any, name: str) -> Any:
    return _field(_field(_field(body, "params"), "message"), name)


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
    found = _object(holder)
    return None if found is None else found.get(name)


def _object(value: Any) -> Mapping[str, Any] | None:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else None
