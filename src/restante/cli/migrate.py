"""`restante migrate`: bring the database up to date, or say how far it is."""

import asyncio
import os
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter

from restante.cli.flags import DATABASE, flags_for, settings_from
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
    Run the migrations that this release brings.

    `restante serve` runs the `pre` ones by itself. Run this command once the last server of the
    older release has ended: it runs the `post` ones too, after which the older release is refused.

    Example: restante migrate --status

    Parameters
    ----------
    status
        Only show which migrations have run; change nothing.
    pre_only
        Run only the migrations that the older release does not notice.
    json
        Print JSON.
    """
    settings = settings_from(flags, dict(os.environ))
    rows = asyncio.run(_rows(settings, status=status, pre_only=pre_only))
    if json:
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
    else:
        print("\n".join(f"{row.migration:<40} {row.state}" for row in rows) or "Nothing to do.")


async def _rows(settings: Settings, *, status: bool, pre_only: bool) -> list[Any]:
    from restante.database import migrate
    from restante.server import logs, wiring

    logs.configure(settings.log_format, "warning")
    async with wiring.database_for_a_while(settings) as dsn:
        if status:
            return await migrate.status(dsn)
        return await migrate.run(dsn, pre_only=pre_only)
