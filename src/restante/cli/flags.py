"""Makes a command's flags out of the settings, so that each is declared once."""

from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any, get_type_hints

import msgspec
from cyclopts import Parameter

from restante.settings import Settings, load, variable

# Where the database is: what every command of the operator has to know.
DATABASE = ("data_dir", "database_url", "postgres_bin", "postgres_account")


def flags_for(class_name: str, names: Sequence[str] = Settings.__struct_fields__) -> type:
    """
    A dataclass with one optional flag per setting, for cyclopts to fill.

    A flag that was not given stays None, and the environment and the default decide.
    """
    hints = get_type_hints(Settings, include_extras=True)
    return make_dataclass(
        class_name,
        [(name, _flag(name, hints[name]), field(default=None)) for name in names],
        frozen=True,
        kw_only=True,
        namespace={"__module__": __name__},  # cyclopts takes a class of `types` for a plain value
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


def settings_from(flags: Any, environ: dict[str, str]) -> Settings:
    """The settings that these flags and this environment make."""
    given = {f.name: getattr(flags, f.name) for f in fields(flags)} if flags is not None else {}
    return load(environ, given)
