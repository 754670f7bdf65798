"""
The environment and the flags become one frozen, checked object, once, at start.

A setting is declared here and nowhere else: `RESTANTE_<NAME>` in the environment and `--<name>` on
the command line follow from it, and so does its line in the operations guide.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from restante.errors import SettingsInvalid

PREFIX = "RESTANTE_"

# Read by the commands a workspace runs; a server tolerates them in its environment.
CLIENT_VARIABLES = frozenset({"RESTANTE_URL", "RESTANTE_TOKEN"})

# What `restante connect` tells the commands that it runs; they may run others of ours.
COMMAND_VARIABLES = frozenset(
    {"RESTANTE_FILE_ID", "RESTANTE_FILE_NAME", "RESTANTE_FILE_TYPE", "RESTANTE_METHOD"}
)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything an operator can choose. Units are part of the names."""

    host: Annotated[str, Meta(min_length=1, description="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    ] = 8080
    data_dir: Annotated[
        str | None,
        Meta(
            description="Directory for the embedded Postgres and the admin token; "
            "by default /var/lib/restante for root, else ~/.local/share/restante."
        ),
    ] = None
    database_url: Annotated[
        str | None,
        Meta(
            description="Use this Postgres (15 or newer), as postgresql://user@host/name, "
            "instead of an embedded one."
        ),
    ] = None
    admin_token: Annotated[
        str | None,
        Meta(
            description="The operator's token; by default one is made and kept "
            "in the data directory."
        ),
    ] = None
    postgres_bin: Annotated[
        str | None, Meta(description="Directory with the Postgres programs to embed.")
    ] = None
    postgres_account: Annotated[
        str | None,
        Meta(
            description="As root, the account that the embedded Postgres runs under; "
            "by default postgres, else nobody."
        ),
    ] = None
    pool_size: Annotated[
        int, Meta(ge=2, le=500, description="Database connections this process may hold.")
    ] = 16
    acquire_timeout_seconds: Annotated[
        float, Meta(gt=0, le=300, description="How long a request waits for a free connection.")
    ] = 5.0
    statement_timeout_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="How long one statement may run.")
    ] = 30.0
    shutdown_grace_seconds: Annotated[
        float, Meta(ge=0, le=300, description="How long open requests may go on after SIGTERM.")
    ] = 2.0
    registration_token: Annotated[
        str | None,
        Meta(
            description="Token that new workspaces need to register; without one, anybody may on a "
            "server that listens on loopback, and only the admin on any other."
        ),
    ] = None
    staging: Annotated[
        bool, Meta(description="Accept files for workspaces that poll; off refuses them with 422.")
    ] = True
    push_to_private: Annotated[
        bool, Meta(description="Call push workspaces at private and loopback addresses too.")
    ] = False
    push_timeout_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="How long a push workspace may take to answer.")
    ] = 60.0
    upload_ttl_seconds: Annotated[
        int, Meta(ge=1, le=31_536_000, description="How long a file waits to be fetched.")
    ] = 86_400
    upload_ttl_min_seconds: Annotated[
        int, Meta(ge=1, le=31_536_000, description="The shortest wait a sender may ask for.")
    ] = 60
    upload_ttl_max_seconds: Annotated[
        int, Meta(ge=1, le=31_536_000, description="The longest wait a sender may ask for.")
    ] = 604_800
    ack_retention_seconds: Annotated[
        int,
        Meta(
            le=31_536_000,
            description="How long an acknowledged file can be reopened; 0 or less: not at all.",
        ),
    ] = 3600
    sweep_interval_seconds: Annotated[
        float, Meta(ge=0.1, le=86_400, description="How often what is due is deleted.")
    ] = 300.0
    phantom_stale_seconds: Annotated[
        int,
        Meta(
            ge=1, le=31_536_000, description="How long a busy workspace may be silent in its feed."
        ),
    ] = 600
    upload_grace_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="How long any upload may take, however small.")
    ] = 30.0
    upload_min_bytes_per_second: Annotated[
        int,
        Meta(ge=1, description="A body may take the grace and then as long as at this speed."),
    ] = 16_384
    bucket_seconds: Annotated[
        int, Meta(ge=1, le=86_400, description="How much time's bytes share one bucket.")
    ] = 3600
    feed_retention_days: Annotated[
        float, Meta(gt=0, le=3650, description="How long rows stay in the feed.")
    ] = 90.0
    workspace_max_bytes: Annotated[
        int, Meta(ge=1, description="Bytes that may wait for one workspace.")
    ] = 1_073_741_824
    workspace_max_files: Annotated[
        int, Meta(ge=1, le=2_000_000_000, description="Files that may wait for one workspace.")
    ] = 10_000
    server_max_bytes: Annotated[
        int, Meta(ge=1, description="Bytes that may wait for all workspaces together.")
    ] = 68_719_476_736
    server_max_files: Annotated[
        int, Meta(ge=1, description="Files that may wait for all workspaces together.")
    ] = 1_000_000
    messages_per_minute: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Messages that one workspace may send a minute.")
    ] = 6000
    log_format: Annotated[
        Literal["auto", "columns", "json"],
        Meta(description="Columns for people or JSON for machines; auto looks at the terminal."),
    ] = "auto"
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="The least level that is logged."),
    ] = "info"
    metrics_namespace: Annotated[
        str,
        Meta(pattern="^[a-z][a-z0-9_]*$", description="First part of every metric's name."),
    ] = "molecule"


MIN_TOKEN_LENGTH = 16

# How people write a switch, beside true and false.
_SWITCHES = {"on": "true", "yes": "true", "off": "false", "no": "false"}


def variable(field: str) -> str:
    """The environment variable of a setting."""
    return PREFIX + field.upper()


def load(environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """
    Read the settings: flags win over the environment, the environment over the defaults.

    Raises SettingsInvalid with the name as the operator wrote it. An empty variable counts as
    unset, which is how compose files and unit files spell it.
    """
    _refuse_unknown(environ)
    given = {
        field.name: _SWITCHES.get(value.lower(), value)
        if isinstance(field.default, bool)
        else value
        for field in msgspec.structs.fields(Settings)
        if (value := environ.get(variable(field.name)))
    }
    given |= {field: value for field, value in flags.items() if value is not None}
    try:
        settings = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(_sentence(str(error), flags)) from error
    if settings.upload_ttl_min_seconds > settings.upload_ttl_max_seconds:
        raise SettingsInvalid(
            f"{variable('upload_ttl_min_seconds')} must not be above "
            f"{variable('upload_ttl_max_seconds')}."
        )
    for field in ("admin_token", "registration_token"):
        if 0 < len(getattr(settings, field) or "") < MIN_TOKEN_LENGTH:
            raise SettingsInvalid(
                f"{variable(field)} is too short: use at least {MIN_TOKEN_LENGTH} characters."
            )
    return settings


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = (
        {variable(field) for field in Settings.__struct_fields__}
        | CLIENT_VARIABLES
        | COMMAND_VARIABLES
    )
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
