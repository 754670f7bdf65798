"""A row of a feed as a line of the conversation between a workspace and those who write to it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from restante import wire
from restante.cli.lines import INDENT_COLUMNS
from restante.cli.output import shown_bytes
from restante.text import printable

if TYPE_CHECKING:
    from restante.client.messages import Said

_MAX_NAMES = 10


def line_of(row: wire.ActivityRow, *, agent: str) -> str:
    """When, who and what; `agent` is what to call the workspace itself.  Raises AnswerInvalid."""
    said = printable(f"{_who(row, agent)}: {_what(row)}")
    number = f"{row.seq:>{INDENT_COLUMNS - 2}}"
    return f"{number}  {row.created_at:%Y-%m-%d %H:%M:%S}  {said}"


def _who(row: wire.ActivityRow, agent: str) -> str:
    from restante.client.messages import is_own

    if is_own(row) or row.source_id == row.workspace_id:
        return agent
    return str(row.source_id) if row.source_id else "canvas"


def _what(row: wire.ActivityRow) -> str:
    from restante.client.http_replies import body_of
    from restante.client.messages import notified, said_in
    from restante.client.poller import announced, own_file

    if file := announced(row) or own_file(row):
        return f"file {file.original_name} ({shown_bytes(file.size)})"
    if (said := notified(row)) is not None:
        return _shown(said)
    words = _shown(said_in(body_of(row)))
    return words if row.method == "message/send" else f"{row.method}: {words}"


def _shown(said: "Said") -> str:
    """The text, and the names of the files behind it."""
    names = [_name(file) for file in said.files[:_MAX_NAMES]]
    if len(said.files) > _MAX_NAMES:
        names.append(f"{len(said.files) - _MAX_NAMES} more")
    files = f"[{', '.join(names)}]" if names else ""
    return " ".join(part for part in (said.text, files) if part) or "(no text)"


def _name(file: Mapping[str, Any]) -> str:
    return str(file.get("name") or file.get("uri") or "file")
