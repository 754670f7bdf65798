"""Generates the flags of a command from the settings, and loads the settings from them."""

import os
from collections.abc import Sequence
from dataclasses import asdict, field, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import msgspec
from cyclopts import Parameter

from restante.settings import Settings, given, load, variable

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from restante.server.operator import Operator

# Settings that locate the database; every operator command needs them.
DATABASE = ("data_dir", "database_url", "postgres_bin", "postgres_account")

# How long ops are kept, and how much they may take.
OPS_LIMITS = (
    "ops_retention_days",
    "ops_cursor_margin_seconds",
    "ops_cap_days",
    "ops_cap_bytes",
    "dormant_ops_cleanup",
    "dormant_ops_threshold_days",
)


def flags_for(class_name: str, names: Sequence[str] = Settings.__struct_fields__) -> type:
    """
    A dataclass with one optional flag per setting, for cyclopts to fill.

    A flag that was not given is None; the environment or the default applies.
    """
    hints = get_type_hints(Settings, include_extras=True)
    return make_dataclass(
        class_name,
        [(name, _flag(name, hints[name]), field(default=None)) for name in names],
        frozen=True,
        kw_only=True,
        namespace={"__module__": __name__},  # cyclopts treats a class from `types` as a plain value
    )


def _flag(name: str, annotation: Any) -> Any:
    bare, meta = annotation.__origin__, annotation.__metadata__[0]
    default = next(f.default for f in msgspec.structs.fields(Settings) if f.name == name)
    is_switch = isinstance(default, bool)
    default = {True: "on", False: "off"}[default] if is_switch else default
    shown = "" if default is None else f" [default: {default}]"
    text = f"{meta.description}{shown} [env: {variable(name)}]"
    negative = None if is_switch else ()
    return Annotated[bare | None, Parameter(help=text, show_default=False, negative=negative)]


def settings_from(flags: Any) -> Settings:
    """The settings from these flags and the environment."""
    return load(os.environ, _values(flags))


def operator_for(flags: Any) -> "AbstractAsyncContextManager[Operator]":
    """
    The services for one operator command.

    A retention given by flag or environment applies; otherwise the one that the servers use.
    """
    from restante.server.operator import operator

    values = _values(flags)
    return operator(load(os.environ, values), given=given(os.environ, values))


def _values(flags: Any) -> dict[str, Any]:
    return {} if flags is None else asdict(flags)
