"""One type for each kind of id, so that two of them cannot be swapped."""

from typing import NewType
from uuid import UUID, uuid4

WorkspaceId = NewType("WorkspaceId", UUID)
FileId = NewType("FileId", UUID)
ActivityId = NewType("ActivityId", UUID)


def new_file_id() -> FileId:
    """Random: it is part of an address, and must not be guessed from another."""
    return FileId(uuid4())


def as_uuid(text: str) -> UUID | None:
    """The UUID in its usual text form, or None; looser spellings are not accepted."""
    try:
        found = UUID(text)
    except ValueError:
        return None
    return found if str(found) == text.lower() else None
