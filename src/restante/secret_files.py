"""Secrets in files: `RESTANTE_ADMIN_TOKEN_FILE` names a file with the admin token, and so on."""

from collections.abc import Mapping
from pathlib import Path

from restante.errors import SettingsInvalid

# What containers and service managers hand over as files, so that it is in no list of processes.
SECRETS = ("RESTANTE_ADMIN_TOKEN", "RESTANTE_REGISTRATION_TOKEN", "RESTANTE_DATABASE_URL")
FILE_VARIABLES = frozenset(f"{name}_FILE" for name in SECRETS)


def with_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with the contents of those files; raises SettingsInvalid."""
    read = {name: path for name in SECRETS if (path := environ.get(f"{name}_FILE"))}
    for name in read:
        if environ.get(name):
            raise SettingsInvalid(f"{name} and {name}_FILE are both set; set one of them.")
    others = {name: value for name, value in environ.items() if name not in FILE_VARIABLES}
    return others | {name: _secret(name, path) for name, path in read.items()}


def _secret(name: str, path: str) -> str:
    """The file without white space around it: editors end the last line."""
    try:
        secret = Path(path).read_text().strip()
    except OSError as error:
        raise SettingsInvalid(
            f"{name}_FILE is wrong: {path} cannot be read: {error.strerror}."
        ) from error
    except ValueError as error:
        raise SettingsInvalid(f"{name}_FILE is wrong: {path} is not a text file.") from error
    if not secret:
        raise SettingsInvalid(f"{name}_FILE is wrong: {path} is empty.")
    return secret
