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
CLIENT_VARIABLES = frozenset({"RESTANTE_URL"})


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
        field: environ[variable(field)]
        for field in Settings.__struct_fields__
        if environ.get(variable(field))
    }
    given |= {field: value for field, value in flags.items() if value is not None}
    try:
        settings = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise SettingsInvalid(_sentence(str(error), flags)) from error
    if settings.admin_token is not None and len(settings.admin_token) < MIN_TOKEN_LENGTH:
        raise SettingsInvalid(
            f"{variable('admin_token')} is too short: use at least {MIN_TOKEN_LENGTH} characters."
        )
    return settings


def _refuse_unknown(environ: Mapping[str, str]) -> None:
    known = {variable(field) for field in Settings.__struct_fields__} | CLIENT_VARIABLES
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
