"""`restante serve`: run the server."""

import asyncio
import os
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Group, Parameter

from restante.cli.flags import flags_for, settings_from

if TYPE_CHECKING:
    ServeFlags = Any
else:
    ServeFlags = flags_for("ServeFlags")


def register(app: App, group: Group) -> None:
    """Add the command."""
    app.command(serve, group=group)


def serve(*, flags: Annotated[ServeFlags | None, Parameter(name="*")] = None) -> None:
    """
    Run a Restante until it is stopped with Ctrl-C or SIGTERM.

    Without a database URL it brings its own Postgres and keeps it in the data directory.

    Example: restante serve --port 9000 --data-dir ./data
    """
    settings = settings_from(flags, dict(os.environ))

    # Imported here: the client's commands run where the server's dependencies are not installed.
    import uvloop

    from restante.server import logs, wiring

    logs.configure(settings.log_format, settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(wiring.serve(settings, _announce))


def _announce(ready: Any) -> None:
    lines = [f"Restante is ready at {ready.address}"]
    if ready.admin_token_file:
        lines.append(f"  The admin token is in {ready.admin_token_file}")
    lines.append(f"  Try it:       curl {ready.address}/ready")
    lines.append("  Stop it with Ctrl-C.")
    print("\n".join(lines), flush=True)
