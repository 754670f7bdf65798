"""`restante migrate`: run the migrations, or show which have run."""

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from restante.cli.flags import DATABASE, flags_for, settings_from
from restante.cli.output import json_text
from restante.settings import Settings

if TYPE_CHECKING:
    DatabaseFlags = Any
else:
    DatabaseFlags = flags_for("DatabaseFlags", DATABASE)


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(migrate, group=group)


def migrate(
    *,
    status: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    pre_only: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    json: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    flags: Annotated[DatabaseFlags | None, Parameter(name="*")] = None,
) -> None:
    """
    Run the migrations of this release.

    `restante serve` runs the `pre` migrations at startup. Run this command after the last server of
    the older release has stopped: it also runs the `post` migrations, and after them the older
    release can no longer use the database.

    Example: restante migrate --status

    Parameters
    ----------
    status
        Show which migrations have run; change nothing.
    pre_only
        Run only the `pre` migrations, which the older release tolerates.
    json
        Print JSON.
    """
    settings = settings_from(flags)
    rows = asyncio.run(_rows(settings, status=status, pre_only=pre_only))
    if json:
        print(json_text(rows, indent=2))
    else:
        print("\n".join(f"{row.migration:<40} {row.state}" for row in rows) or "Nothing to do.")


async def _rows(settings: Settings, *, status: bool, pre_only: bool) -> list[Any]:
    from restante.database import migrate
    from restante.server import logs, operator

    logs.configure(settings.log_format, "warning")
    async with operator.database_for_a_while(settings) as dsn:
        if status:
            return await migrate.status(dsn)
        return await migrate.run(dsn, pre_only=pre_only)
