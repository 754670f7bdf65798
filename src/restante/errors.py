"""
Every error that Restante raises on purpose, with its public code.

A class docstring is the published meaning of the code. A message is a whole sentence: what
happened and, if there is a choice, what to do. HTTP statuses are not defined here.
"""

from typing import ClassVar


class RestanteError(Exception):
    """
    Base class of every error that Restante raises on purpose.

    `facts` become extra fields of the HTTP answer, for programs to act on.
    """

    code: ClassVar[str]  # public and stable: clients branch on it

    def __init__(self, sentence: str, /, **facts: str | float | None) -> None:
        super().__init__(sentence)
        self.facts = {name: fact for name, fact in facts.items() if fact is not None}


class SettingsInvalid(RestanteError):
    """A flag or an environment variable is unknown or has an invalid value."""

    code = "settings_invalid"


class AddressTaken(RestanteError):
    """The server cannot listen on the configured host and port."""

    code = "address_taken"


class DataDirectoryUnusable(RestanteError):
    """The data directory cannot be created, read or written."""

    code = "data_directory_unusable"


class DataDirectoryInUse(RestanteError):
    """Another running Restante process uses the data directory."""

    code = "data_directory_in_use"


class PostgresUnusable(RestanteError):
    """The embedded Postgres was not found or did not start."""

    code = "postgres_unusable"


class BackupFailed(RestanteError):
    """A backup could not be written, or not be restored here."""

    code = "backup_failed"


class BackupUnusable(RestanteError):
    """The file is not a backup, is damaged or incomplete, or was made by a newer release."""

    code = "backup_unusable"


class DatabaseUnavailable(RestanteError):
    """The database is not reachable, or no connection was free in time."""

    code = "database_unavailable"


class DatabaseReadOnly(RestanteError):
    """The database accepts no writes now: a standby, a failover, or set read-only."""

    code = "database_read_only"


class DatabaseForbidden(RestanteError):
    """The database role lacks a right that Restante needs."""

    code = "database_forbidden"


class DatabaseRefused(RestanteError):
    """The database refused a command's statement: a table was changed meanwhile, or is damaged."""

    code = "database_refused"


class PoolerUnusable(RestanteError):
    """A connection pooler in front of the database does not keep sessions apart."""

    code = "pooler_unusable"


class OutcomeUnknown(RestanteError):
    """
    Whether the request took effect could not be found out.

    The database did not confirm a commit; or, with `delivery_mode` `push`, an earlier attempt may
    have reached the workspace, which is called directly.
    """

    code = "outcome_unknown"


class DatabaseTooOld(RestanteError):
    """The database server is older than Postgres 15."""

    code = "database_too_old"


class StatementTimedOut(RestanteError):
    """A SQL statement was cancelled because it exceeded its timeout."""

    code = "statement_timed_out"


class TableBusy(RestanteError):
    """A lock in the database was not acquired within the lock timeout."""

    code = "table_busy"


class CodeTooOld(RestanteError):
    """A newer release has migrated the database, and this release can no longer use it."""

    code = "code_too_old"


class MigrationFailed(RestanteError):
    """A migration failed; the migrations before it were applied."""

    code = "migration_failed"


class NotReady(RestanteError):
    """The database does not answer, accepts no writes, or a migration has not run yet."""

    code = "not_ready"


class DatabaseFull(RestanteError):
    """Postgres could not write because its disk is full."""

    code = "database_full"


class DiskLow(RestanteError):
    """The database's disk is almost full, so nothing new is stored."""

    code = "disk_low"


class BadRequest(RestanteError):
    """The request is malformed; nothing was changed."""

    code = "bad_request"


class NotAuthenticated(RestanteError):
    """The token is missing or does not grant access."""

    code = "not_authenticated"


class OriginRefused(RestanteError):
    """
    A web page of an origin that is not listed, or a registration without a token from elsewhere.
    """

    code = "origin_refused"


class NotJson(RestanteError):
    """The Content-Type is not `application/json`, where a web page could have sent the request."""

    code = "not_json"


class WorkspaceUnknown(RestanteError):
    """The workspace does not exist or was removed."""

    code = "workspace_unknown"

    def __init__(
        self, sentence: str = "There is no such workspace.", /, **facts: str | float | None
    ) -> None:
        super().__init__(sentence, **facts)


class WorkspaceHasNoCallback(RestanteError):
    """The workspace has no URL to push to, and the server cannot hold the request for polling."""

    code = "workspace_has_no_callback"


class WorkspaceUnreachable(RestanteError):
    """A push workspace did not answer at its URL."""

    code = "workspace_unreachable"


class AddressRefused(RestanteError):
    """The URL of a push workspace points to an address that this server does not call."""

    code = "address_refused"


class UploadMalformed(RestanteError):
    """The multipart body is malformed, empty or contains no file."""

    code = "upload_malformed"


class UploadTooSlow(RestanteError):
    """The request body stood still, or did not arrive within the time allowed for its size."""

    code = "upload_too_slow"


class TooManyFiles(RestanteError):
    """The request contains more files than one request may."""

    code = "too_many_files"


class FileTooLarge(RestanteError):
    """A file exceeds the size limit for one file."""

    code = "file_too_large"


class RequestTooLarge(RestanteError):
    """The request exceeds the size limit for one request."""

    code = "request_too_large"


class QuotaTooSmall(RestanteError):
    """The request alone exceeds the workspace's quota, so it can never fit."""

    code = "quota_too_small"


class WorkspaceFull(RestanteError):
    """The files waiting for the workspace have reached the workspace's quota."""

    code = "workspace_full"


class ServerFull(RestanteError):
    """The files waiting for all workspaces, or all their feeds, have reached the server's limit."""

    code = "server_full"


class TooManyConnections(RestanteError):
    """The server, or the caller's address, has reached its limit of open connections."""

    code = "too_many_connections"


class TooMuchWritten(RestanteError):
    """As much was written for the workspace this hour as is allowed; aborted uploads count."""

    code = "too_much_written"


class FeedFull(RestanteError):
    """The workspace's feed has reached its limit of unacknowledged rows, or of all it keeps."""

    code = "feed_full"


class TooManyAtOnce(RestanteError):
    """The workspace, or the server, has reached its limit of requests of this kind."""

    code = "too_many_at_once"


class KeyReused(RestanteError):
    """An idempotency key was used again with different files."""

    code = "key_reused"


class MessageTooLarge(RestanteError):
    """A JSON body exceeds the size limit of its route."""

    code = "message_too_large"


class TooManyMessages(RestanteError):
    """The sender exceeded its rate limit."""

    code = "too_many_messages"


class UploadGone(RestanteError):
    """The upload does not exist, expired, was acknowledged or belongs to another workspace."""

    code = "upload_gone"


class RangeNotSatisfiable(RestanteError):
    """The requested byte range is outside of the file."""

    code = "range_not_satisfiable"


class CursorGone(RestanteError):
    """The cursor is unknown to this feed or was trimmed; rows may have been missed."""

    code = "cursor_gone"


class TableNotTracked(RestanteError):
    """The table's changes are not logged on this node."""

    code = "table_not_tracked"


class TableUntrackable(RestanteError):
    """The changes of this table cannot be kept in step with other nodes, or its log cannot."""

    code = "table_untrackable"


class PushedTableUnknown(RestanteError):
    """An op was pushed for a table that is not tracked here, or that the peer may not send."""

    code = "pushed_table_unknown"


class OpRefused(RestanteError):
    """An op was pushed that no node could apply, or in the name of another node."""

    code = "op_refused"


class TooManyHosts(RestanteError):
    """Ops of as many hosts are known as this node takes."""

    code = "too_many_hosts"


class PeerUnknown(RestanteError):
    """There is no peer with this address."""

    code = "peer_unknown"


class PeerUnreachable(RestanteError):
    """Another node did not answer, or not as a node of the op log does."""

    code = "peer_unreachable"


class SnapshotGone(RestanteError):
    """The snapshot that a peer was taking is no longer kept; it must begin again."""

    code = "snapshot_gone"


class ServerUnreachable(RestanteError):
    """The server did not answer completely; whether it processed the request is unknown."""

    code = "server_unreachable"


class ServerRefused(RestanteError):
    """The server answered with an error unknown to this release; `status` is the HTTP status."""

    code = "server_refused"


class AnswerInvalid(RestanteError):
    """The server's answer violates the protocol and was discarded."""

    code = "answer_invalid"


class FileCorrupt(RestanteError):
    """The received bytes do not match the announced file and were discarded."""

    code = "file_corrupt"


class FileUnreadable(RestanteError):
    """A file to send cannot be read."""

    code = "file_unreadable"


class FolderUnusable(RestanteError):
    """The folder for received files cannot be used."""

    code = "folder_unusable"


class FolderInUse(RestanteError):
    """Another running process receives into this folder."""

    code = "folder_in_use"


class FolderFull(RestanteError):
    """The disk is full, or too many received files wait for their command."""

    code = "folder_full"


class NoRoomForFile(FolderFull):
    """The disk has too little space for one file; smaller files may fit."""

    code = "no_room_for_file"


class CommandFailed(RestanteError):
    """The command for a received file or message failed."""

    code = "command_failed"
