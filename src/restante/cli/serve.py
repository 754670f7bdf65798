"""`restante serve`: run the server."""

import asyncio
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
    Run the server until Ctrl-C or SIGTERM.

    Without a database URL it runs an embedded Postgres in the data directory.

    Example: restante serve --port 9000 --data-dir ./data
    """
    settings = settings_from(flags)

    # Imported here: client commands must work without the server's dependencies.
    import uvloop

    from restante.server import logs, wiring

    logs.configure(settings.log_format, settings.log_level)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(wiring.serve(settings, _announce))


def _announce(ready: Any) -> None:
    from restante.server import systemd

    lines = [f"Restante is ready at {ready.address}"]
    if ready.admin_token_file:
        lines.append(f"  The admin token is in {ready.admin_token_file}")
    lines.append(f"  Try it:       curl {ready.address}/ready")
    lines.append("  Stop it:      Ctrl-C")
    print("\n".join(lines), flush=True)
    systemd.notify("READY=1")
