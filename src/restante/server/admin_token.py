"""The operator's token: generated once, and stored where only its owner can read it."""

import os
import secrets
from pathlib import Path

from restante.errors import DataDirectoryUnusable

FILE_NAME = "admin-token"


def stored_in(directory: Path) -> str:
    """
    The token of this data directory, generated on first use with mode 0600.

    Two processes that start at once agree: the file is created atomically, and the first one wins.
    """
    path = directory / FILE_NAME
    try:
        if not path.exists():
            put(directory, secrets.token_urlsafe(32))
        token = path.read_text().strip()
    except OSError as error:
        raise DataDirectoryUnusable(
            f"The admin token cannot be stored in {path}: {error.strerror}."
        ) from error
    if not token:
        raise DataDirectoryUnusable(
            f"The admin token in {path} is empty. Remove the file, and a new token is generated."
        )
    return token


def put(directory: Path, token: str) -> None:
    """Store the token, unless there is one."""
    path = directory / FILE_NAME
    draft = path.with_name(f".{FILE_NAME}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{token}\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        path.hardlink_to(draft)
    except FileExistsError:
        return
    finally:
        draft.unlink()
