"""
Every failure we raise on purpose, with its public code.

A message is a whole sentence: what happened, and where there is a choice, what to do.
Nothing here knows an HTTP status; `web.problems` has that table.
"""

from typing import ClassVar


class RestanteError(Exception):
    """
    Base of every failure we raise on purpose.

    `facts` are the extra fields of the answer that carries it: what a program needs to act on.
    """

    code: ClassVar[str]  # public and stable; clients branch on it

    def __init__(self, sentence: str, /, **facts: str | float | None) -> None:
        super().__init__(sentence)
        self.facts = {name: fact for name, fact in facts.items() if fact is not None}


class SettingsInvalid(RestanteError):
    """The environment or the flags ask for something that cannot be."""

    code = "settings_invalid"


class AddressTaken(RestanteError):
    """The host and port we were told to listen on cannot be had."""

    code = "address_taken"


class DataDirectoryUnusable(RestanteError):
    """The data directory cannot be made, written or owned."""

    code = "data_directory_unusable"


class DataDirectoryInUse(RestanteError):
    """Another running Restante owns the data directory."""

    code = "data_directory_in_use"


class PostgresUnusable(RestanteError):
    """The embedded Postgres cannot be found or does not start."""

    code = "postgres_unusable"


class DatabaseUnavailable(RestanteError):
    """The database cannot be reached, or has no connection to spare, right now."""

    code = "database_unavailable"


class DatabaseTooOld(RestanteError):
    """The server at the other end is older than the SQL we speak."""

    code = "database_too_old"


class StatementTimedOut(RestanteError):
    """A statement was cut off because it took longer than it may."""

    code = "statement_timed_out"


class TableBusy(RestanteError):
    """Somebody holds a lock that we did not get in time."""

    code = "table_busy"


class CodeTooOld(RestanteError):
    """A newer release has moved the database on, and it no longer serves this one."""

    code = "code_too_old"


class MigrationFailed(RestanteError):
    """A migration could not be applied; the ones before it were."""

    code = "migration_failed"


class NotReady(RestanteError):
    """The server runs but cannot do its work yet."""

    code = "not_ready"


class DatabaseFull(RestanteError):
    """Postgres could not write because its disk is full."""

    code = "database_full"


class BadRequest(RestanteError):
    """The request does not have the form it must have; nothing was done."""

    code = "bad_request"


class NotAuthenticated(RestanteError):
    """No token, or not one that opens this door.  Says nothing about what is behind it."""

    code = "not_authenticated"


class WorkspaceUnknown(RestanteError):
    """There is no such workspace, or it was removed."""

    code = "workspace_unknown"


class WorkspaceHasNoCallback(RestanteError):
    """The workspace can neither be called nor does it poll."""

    code = "workspace_has_no_callback"


class WorkspaceUnreachable(RestanteError):
    """A push-mode workspace did not answer at its address."""

    code = "workspace_unreachable"


class AddressRefused(RestanteError):
    """A push-mode workspace's address is one we do not call."""

    code = "address_refused"


class UploadMalformed(RestanteError):
    """The multipart body is broken, empty, or holds no file."""

    code = "upload_malformed"


class UploadTooSlow(RestanteError):
    """The body did not arrive in the time its size allows."""

    code = "upload_too_slow"


class TooManyFiles(RestanteError):
    """More files in one request than it may carry."""

    code = "too_many_files"


class FileTooLarge(RestanteError):
    """One file is larger than any may be."""

    code = "file_too_large"


class RequestTooLarge(RestanteError):
    """The whole request is larger than any may be."""

    code = "request_too_large"


class QuotaTooSmall(RestanteError):
    """The request alone is larger than all that may wait for this workspace."""

    code = "quota_too_small"


class WorkspaceFull(RestanteError):
    """As much as may wait for this workspace is waiting already."""

    code = "workspace_full"


class ServerFull(RestanteError):
    """As much as this server may hold is waiting already."""

    code = "server_full"


class TooManyAtOnce(RestanteError):
    """More requests of this kind at the same time than one workspace may have."""

    code = "too_many_at_once"


class KeyReused(RestanteError):
    """An idempotency key came again with other files."""

    code = "key_reused"


class MessageTooLarge(RestanteError):
    """A JSON body is larger than its route takes."""

    code = "message_too_large"


class TooManyMessages(RestanteError):
    """The sender is over its rate."""

    code = "too_many_messages"


class UploadGone(RestanteError):
    """Absent, expired, acknowledged or somebody else's: the caller cannot tell, and need not."""

    code = "upload_gone"


class RangeNotSatisfiable(RestanteError):
    """The byte range lies outside of the file."""

    code = "range_not_satisfiable"


class CursorGone(RestanteError):
    """A reader's cursor is not, or no longer, in this feed; rows may have been missed."""

    code = "cursor_gone"


class ServerUnreachable(RestanteError):
    """No answer from the server: not there, too slow, or cut off; whether it acted is unknown."""

    code = "server_unreachable"


class ServerRefused(RestanteError):
    """The server refused in a way that this release has no name for; `status` has the number."""

    code = "server_refused"


class AnswerInvalid(RestanteError):
    """The server's answer is not what the protocol says; nothing of it was used."""

    code = "answer_invalid"


class FileCorrupt(RestanteError):
    """The bytes that came are not the file that was announced; they were thrown away."""

    code = "file_corrupt"


class FileUnreadable(RestanteError):
    """A file that should be sent cannot be read."""

    code = "file_unreadable"


class FolderUnusable(RestanteError):
    """A folder for received files cannot be used as it is."""

    code = "folder_unusable"


class FolderInUse(RestanteError):
    """Another running program receives into this folder."""

    code = "folder_in_use"


class FolderFull(RestanteError):
    """There is no room on the disk that received files go to."""

    code = "folder_full"


class CommandFailed(RestanteError):
    """A command that should take a file or a message did not succeed."""

    code = "command_failed"
