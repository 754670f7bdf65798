"""
All settings, read once at startup from flags and environment into one frozen, validated object.

Each setting is declared only here. Its variable `RESTANTE_<NAME>`, its flag `--<name>` and its line
in the operations guide follow from the declaration.
"""

import difflib
import re
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from restante.errors import SettingsInvalid
from restante.limits import MAX_FILE_BYTES, MAX_REQUEST_BYTES
from restante.secret_files import FILE_VARIABLES, with_secrets

PREFIX = "RESTANTE_"

# Variables of the client commands; a server ignores them.
CLIENT_VARIABLES = frozenset(
    {
        "RESTANTE_URL",
        "RESTANTE_TOKEN",
        "RESTANTE_NEW_TOKEN",
        "RESTANTE_CONNECT_MAX_FILE_BYTES",
    }
)

# Set by `restante connect` for the commands it runs; those may run `restante` themselves.
COMMAND_VARIABLES = frozenset(
    {
        "RESTANTE_FILE_ID",
        "RESTANTE_FILE_DISPLAY_NAME",
        "RESTANTE_FILE_NAME",
        "RESTANTE_FILE_TYPE",
        "RESTANTE_METHOD",
    }
)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a server and of the operator's commands."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    ] = 8080
    data_dir: Annotated[
        str | None,
        Meta(
            description="Directory for the embedded Postgres and the admin token. "
            "Default: /var/lib/restante for root, ~/.local/share/restante for other users."
        ),
    ] = None
    database_url: Annotated[
        str | None,
        Meta(
            description="Postgres (15 or newer) to use instead of the embedded one, "
            "as postgresql://user@host/name."
        ),
    ] = None
    admin_token: Annotated[
        str | None,
        Meta(
            description="The operator's token. Default: one is generated and stored "
            "in the data directory."
        ),
    ] = None
    postgres_bin: Annotated[
        str | None, Meta(description="Directory with the Postgres binaries to run.")
    ] = None
    postgres_account: Annotated[
        str | None,
        Meta(
            description="Account that runs the embedded Postgres when started as root. "
            "Default: postgres if it exists, else nobody."
        ),
    ] = None
    pool_size: Annotated[
        int, Meta(ge=2, le=500, description="Maximum database connections of this process.")
    ] = 16
    acquire_timeout_seconds: Annotated[
        float, Meta(gt=0, le=300, description="How long a request waits for a free connection.")
    ] = 5.0
    statement_timeout_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="Maximum time for one SQL statement.")
    ] = 30.0
    max_connections: Annotated[
        int, Meta(ge=16, le=1_000_000, description="Maximum open connections of this process.")
    ] = 10_000
    max_connections_per_address: Annotated[
        int,
        Meta(
            ge=0,
            description="Maximum open connections from one address on which no authenticated "
            "request runs; 0: no limit.",
        ),
    ] = 1000
    max_requests_per_workspace: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum requests of one workspace at once, waiting polls, event streams "
            "and WebSockets included.",
        ),
    ] = 256
    send_timeout_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="A client that takes less than 512 bytes a second for so long is cut off.",
        ),
    ] = 30.0
    shutdown_grace_seconds: Annotated[
        float, Meta(ge=0, le=300, description="How long open requests may continue after SIGTERM.")
    ] = 2.0
    registration_token: Annotated[
        str | None,
        Meta(
            description="Token required to register a workspace. Without it, anybody can register "
            "on a server that listens on loopback, and only the admin on any other."
        ),
    ] = None
    cors_origins: Annotated[
        str | None,
        Meta(
            description="Origins whose web pages may use this server, separated by commas, or "
            "none. Default: http://localhost:3000 on a server that listens on loopback, none on "
            "any other."
        ),
    ] = None
    trusted_proxies: Annotated[
        str | None,
        Meta(
            description="Address ranges of reverse proxies, separated by commas, whose "
            "X-Forwarded-For, -Proto and -Host are believed. Default: none."
        ),
    ] = None
    staging: Annotated[
        bool, Meta(description="Accept files for workspaces that poll; if off, answer 422.")
    ] = True
    push_to_private: Annotated[
        bool, Meta(description="Allow push to private and loopback addresses.")
    ] = False
    push_timeout_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="Maximum time for a push workspace to answer.")
    ] = 60.0
    upload_ttl_seconds: Annotated[
        int, Meta(ge=1, le=31_536_000, description="Time until an unacknowledged file expires.")
    ] = 86_400
    upload_ttl_min_seconds: Annotated[
        int, Meta(ge=1, le=31_536_000, description="Shortest TTL that a sender may request.")
    ] = 60
    upload_ttl_max_seconds: Annotated[
        int, Meta(ge=1, le=31_536_000, description="Longest TTL that a sender may request.")
    ] = 604_800
    ack_retention_seconds: Annotated[
        int,
        Meta(
            le=31_536_000,
            description="How long an acknowledged file can be reopened; 0 or less disables it.",
        ),
    ] = 3600
    serve_acked: Annotated[
        bool,
        Meta(description="Serve acknowledged files too, until they are swept; if off, answer 404."),
    ] = False
    sweep_interval_seconds: Annotated[
        float, Meta(ge=0.1, le=86_400, description="Time between two sweeps.")
    ] = 300.0
    self_url: Annotated[
        Annotated[str, Meta(min_length=1, max_length=255)] | None,
        Meta(
            description="The address under which peers of the op log know this node. Without it, "
            "the node has a random name.",
        ),
    ] = None
    ops_pull_seconds: Annotated[
        float,
        Meta(gt=0, le=86_400, description="Time between two pulls of a peer without long polls."),
    ] = 10.0
    ops_open_to: Annotated[
        str | None,
        Meta(
            description="Address ranges, separated by commas, whose nodes may read the op log "
            "without a token. Default: none."
        ),
    ] = None
    ops_retention_days: Annotated[
        Annotated[float, Meta(gt=0, le=3650)] | None,
        Meta(
            description="How long ops are kept, of tables without a retention of their own; what a "
            "peer has not read stays. Default: for ever."
        ),
    ] = None
    ops_cursor_margin_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=31_536_000,
            description="Ops stay for so long after the slowest peer has read them.",
        ),
    ] = 3600.0
    ops_cap_days: Annotated[
        Annotated[float, Meta(gt=0, le=3650)] | None,
        Meta(
            description="Older ops go although a peer has not read them; it is evicted, and takes "
            "a snapshot when it comes back. Default: no cap."
        ),
    ] = None
    ops_cap_bytes: Annotated[
        Annotated[int, Meta(ge=1_048_576)] | None,
        Meta(
            description="The oldest ops go when the logs of all tables together take more than "
            "this on disk, although a peer has not read them. Default: no cap."
        ),
    ] = None
    dormant_ops_cleanup: Annotated[
        bool,
        Meta(description="Drop all ops of tables that have had none for long; peers come first."),
    ] = False
    dormant_ops_threshold_days: Annotated[
        float,
        Meta(gt=0, le=3650, description="For how long such a table has had no op; at least 1."),
    ] = 90.0
    phantom_stale_seconds: Annotated[
        int,
        Meta(
            ge=1,
            le=31_536_000,
            description="Time without feed activity after which a busy workspace is reset.",
        ),
    ] = 600
    upload_grace_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="Time that every upload gets, whatever its size.")
    ] = 30.0
    upload_min_bytes_per_second: Annotated[
        int,
        Meta(
            ge=1,
            description="Slowest accepted upload: the time limit is the grace plus the size at "
            "this speed.",
        ),
    ] = 16_384
    json_idle_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="Longest pause in the middle of a JSON body.")
    ] = 10.0
    json_seconds: Annotated[
        float,
        Meta(
            gt=0,
            le=3600,
            description="Maximum time for a JSON body to arrive, beside its size at the speed of "
            "the slowest upload.",
        ),
    ] = 30.0
    upload_idle_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="How long an upload may stand still.")
    ] = 20.0
    max_file_bytes: Annotated[
        int, Meta(ge=1, le=68_719_476_736, description="Maximum bytes of one file, up to 64 GiB.")
    ] = MAX_FILE_BYTES
    max_request_bytes: Annotated[
        int,
        Meta(
            ge=1,
            le=4_398_046_511_104,
            description="Maximum bytes of all files of one request; at least max_file_bytes.",
        ),
    ] = MAX_REQUEST_BYTES
    bucket_seconds: Annotated[
        int, Meta(ge=1, le=86_400, description="Time range of one bucket of file contents.")
    ] = 3600
    feed_retention_days: Annotated[
        float, Meta(gt=0, le=3650, description="How long the feed keeps its rows.")
    ] = 90.0
    workspace_max_bytes: Annotated[
        int, Meta(ge=1, description="Maximum bytes waiting for one workspace.")
    ] = 1_073_741_824
    workspace_max_files: Annotated[
        int, Meta(ge=1, le=2_000_000_000, description="Maximum files waiting for one workspace.")
    ] = 10_000
    workspace_max_written_bytes: Annotated[
        int,
        Meta(
            ge=1,
            description="Maximum bytes written for one workspace in an hour, whatever becomes of "
            "them.",
        ),
    ] = 10_737_418_240
    workspace_max_feed_bytes: Annotated[
        int, Meta(ge=1, description="Maximum bytes of unacknowledged rows in one feed.")
    ] = 268_435_456
    server_max_bytes: Annotated[
        int, Meta(ge=1, description="Maximum bytes waiting for all workspaces.")
    ] = 68_719_476_736
    server_max_files: Annotated[
        int, Meta(ge=1, description="Maximum files waiting for all workspaces.")
    ] = 1_000_000
    server_max_stored_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum bytes that file contents occupy on disk, those that are not swept "
            "yet included. Default: twice server_max_bytes, at least 256 MiB."
        ),
    ] = None
    server_max_feed_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="Maximum bytes of rows in the feeds of all workspaces; beyond it, messages "
            "are refused. Default: a quarter of the database's disk, at most 16 GiB."
        ),
    ] = None
    disk_reserve_bytes: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(
            description="Nothing new is stored when less than this is free on the database's disk. "
            "Default: 5 % of the disk, at most 1 GiB."
        ),
    ] = None
    ballast_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="Space beside the embedded Postgres that is given up when its disk is "
            "full, so that it can be emptied; 0 keeps none.",
        ),
    ] = 67_108_864
    messages_per_minute: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Messages per minute from one workspace.")
    ] = 6000
    message_bytes_per_minute: Annotated[
        int, Meta(ge=1_048_576, description="Bytes of messages per minute from one workspace.")
    ] = 67_108_864
    log_format: Annotated[
        Literal["auto", "columns", "json"],
        Meta(description="Log as columns or JSON; auto: columns on a terminal, else JSON."),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Lowest level to log."),
    ] = "info"
    metrics_namespace: Annotated[
        str,
        Meta(pattern="^[a-z][a-z0-9_]*$", description="Prefix of every metric name."),
    ] = "molecule"


MIN_TOKEN_LENGTH = 16

# Where the canvas runs while it is developed.
_LOCAL_CANVAS = "http://localhost:3000"
_NO_ORIGIN = "none"
_ORIGIN = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:(?P<port>[0-9]{1,5}))?"
)
_DEFAULT_PORTS = {"http": "80", "https": "443"}

# Accepted in the environment beside true and false.
_SWITCHES = {"on": "true", "yes": "true", "off": "false", "no": "false"}


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + field.upper()


def load(environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """
    Read the settings: flags override the environment, the environment overrides the defaults.

    Raises SettingsInvalid with the name as the operator wrote it. An empty variable counts as
    unset, because compose files and unit files write it that way.
    """
    _refuse_unknown(environ)
    environ = with_secrets(environ)
    for name in flags.keys() - set(Settings.__struct_fields__):
        raise SettingsInvalid(f"{name} is not a setting of Restante.")
    try:
        settings = msgspec.convert(_given_values(environ, flags), Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(_sentence(str(error), flags)) from error
    settings = _with_room_for_files(settings, given(environ, flags))
    _check_not_above(settings, "upload_ttl_min_seconds", "upload_ttl_max_seconds")
    _check_not_above(settings, "max_file_bytes", "max_request_bytes")
    _check_dormancy(settings)
    _check_token(settings, "admin_token")
    _check_token(settings, "registration_token")
    allowed_origins(settings, on_loopback=False)
    return settings


# Each has room for what the one before allows, unless it is set.
_SIZES = (
    "max_file_bytes",
    "max_request_bytes",
    "workspace_max_bytes",
    "workspace_max_written_bytes",
)


def _with_room_for_files(settings: Settings, given: Collection[str]) -> Settings:
    """An operator who raises the limit of files need not find every quota that it exceeds."""
    for smaller, larger in pairwise(_SIZES):
        least = getattr(settings, smaller)
        if larger not in given and getattr(settings, larger) < least:
            settings = msgspec.structs.replace(settings, **{larger: least})
    return settings


def given(environ: Mapping[str, str], flags: Mapping[str, Any]) -> frozenset[str]:
    """The settings given by flag or environment, including those equal to their default."""
    return frozenset(_given_values(environ, flags))


def _given_values(environ: Mapping[str, str], flags: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {
        field.name: _SWITCHES.get(value.lower(), value)
        if isinstance(field.default, bool)
        else value
        for field in msgspec.structs.fields(Settings)
        if (value := environ.get(variable(field.name)))
    }
    return values | {field: value for field, value in flags.items() if value is not None}


def _check_not_above(settings: Settings, lower: str, upper: str) -> None:
    low, high = getattr(settings, lower), getattr(settings, upper)
    if low > high:
        raise SettingsInvalid(
            f"{variable(lower)} must not be greater than {variable(upper)}; "
            f"they are {low} and {high}."
        )


def _check_dormancy(settings: Settings) -> None:
    if settings.dormant_ops_threshold_days < 1:
        raise SettingsInvalid(
            f"{variable('dormant_ops_threshold_days')} must be 1 or more: an op may reach its "
            "table a day late, so a table without one for less than 24 h is not dormant."
        )


def _check_token(settings: Settings, field: str) -> None:
    if 0 < len(getattr(settings, field) or "") < MIN_TOKEN_LENGTH:
        raise SettingsInvalid(
            f"{variable(field)} is too short: use at least {MIN_TOKEN_LENGTH} characters."
        )


def allowed_origins(settings: Settings, *, on_loopback: bool) -> frozenset[str]:
    """The origins whose pages may use the server, as browsers send them; raises SettingsInvalid."""
    listed = settings.cors_origins
    if listed is None:
        return frozenset({_LOCAL_CANVAS} if on_loopback else ())
    if listed.strip().lower() == _NO_ORIGIN:
        return frozenset()
    return frozenset(_origin(one.strip()) for one in listed.split(","))


def _origin(written: str) -> str:
    name = variable("cors_origins")
    if "*" in written:
        raise SettingsInvalid(
            f"{name} is wrong: list each origin by its name. {written} would let pages of anybody "
            "use this server with the credentials of whoever looks at them."
        )
    found = _ORIGIN.fullmatch(written.lower())
    if not found or int(found["port"] or 1) not in range(1, 65536):
        raise SettingsInvalid(
            f'{name} is wrong: "{written}" is not an origin. Write scheme://host or '
            "scheme://host:port, without a path or a slash at the end, or none."
        )
    has_default_port = found["port"] == _DEFAULT_PORTS.get(found["scheme"], "")
    return found[0].removesuffix(f":{found['port']}") if has_default_port else found[0]


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    settings = {variable(field) for field in Settings.__struct_fields__}
    known = settings | CLIENT_VARIABLES | COMMAND_VARIABLES | FILE_VARIABLES
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise SettingsInvalid(f"{name} is not a setting of Restante.{hint}")


def _sentence(problem: str, flags: Mapping[str, Any]) -> str:
    """Turn "Expected `int` >= 0 - at `$.port`" into a sentence about RESTANTE_PORT or --port."""
    expected, _, path = problem.partition(" - at `$.")
    field = path.rstrip("`")
    name = f"--{field.replace('_', '-')}" if flags.get(field) is not None else variable(field)
    return f"{name} is wrong: {expected[:1].lower()}{expected[1:].replace('`', '')}."
